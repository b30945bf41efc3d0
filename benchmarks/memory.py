"""Memory of two workers and their server, beside the same training without psplus.

The proportional set sizes (PSS, /proc/PID/smaps_rollup) of all processes are added up after some
steps; what psplus adds is their difference. Prints one JSON line a figure: ``value`` is that in
sizes of the parameters, ``reference`` what the design allows (the server's values and 2 %; for each
worker two push slots, one buffer more for optimizers without a fused step, two more for buffered
pulls), ``ratio`` reference by value, 1 or more is within.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import psplus
from psplus import config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))

from servers import servers_of

WORKERS = 2
STEPS = 4
LAYERS = 8
BUFFERS = {"fused": 2, "generic": 3, "buffered": 4}  # a worker, in sizes of the parameters


def work(mode: str, elements: int, place: Path) -> None:
    """Trains, says so, and stays until it is told to end."""
    torch.set_num_threads(1)
    parameters = [nn.Parameter(torch.zeros(elements // LAYERS)) for _ in range(LAYERS)]
    if mode in ("generic", "plain-generic"):
        plain: torch.optim.Optimizer = torch.optim.RMSprop(parameters, lr=1e-3, foreach=False)
    else:
        plain = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=False)
    optimizer = plain
    if not mode.startswith("plain"):
        pull = "buffered" if mode == "buffered" else "auto"
        optimizer = psplus.wrap(plain, "ps+", pull=pull, nonfinite="allow")
    for _ in range(STEPS):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.fill_(1e-3)
        optimizer.step()
    if isinstance(optimizer, psplus.DistributedOptimizer):
        optimizer.synchronize()
    (place / f"ready-{os.environ['RANK']}").touch()
    wait_until((place / "end").exists, "the measurement")
    if isinstance(optimizer, psplus.DistributedOptimizer):
        optimizer.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError after ten minutes."""
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited ten minutes for {what}")
        time.sleep(0.05)


def pss(process: int) -> int:
    """Bytes."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/smaps_rollup has no line 'Pss:'")


def measure(mode: str, elements: int) -> int:
    """PSS in bytes of all processes of one run."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment = {**os.environ, "WORLD_SIZE": str(WORKERS), "TMPDIR": folder}
        environment |= {"PSPLUS_JOB": secrets.token_hex(4), "LOCAL_WORLD_SIZE": str(WORKERS)}
        command = [sys.executable, __file__, "--work", mode, "--sizes", str(elements)]
        workers = [
            subprocess.Popen(
                [*command, "--place", folder],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORKERS)
        ]
        try:

            def all_are_ready() -> bool:
                if any(worker.poll() is not None for worker in workers):
                    raise RuntimeError(f"a worker of the run {mode!r} has failed")
                return len(list(place.glob("ready-*"))) == WORKERS

            wait_until(all_are_ready, "the workers")
            servers = servers_of(place)
            if (len(servers) == 0) != mode.startswith("plain"):
                raise RuntimeError(f"the run {mode!r} has {len(servers)} servers")
            total = sum(pss(process) for process in [w.pid for w in workers] + servers)
            (place / "end").touch()
            for worker in workers:
                if worker.wait(60) != 0:
                    raise RuntimeError(f"a worker of the run {mode!r} has failed")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        wait_until(lambda: not servers_of(place), "the server, which ends with its last worker")
    return total


def main() -> None:
    """Measure each way of training at each size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[25_000_000, 250_000_000])
    parser.add_argument("--work")
    parser.add_argument("--place", type=Path)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work, arguments.sizes[0], arguments.place)
        return
    if config.read().world_size != 1:
        parser.error("starts its own workers; run it by itself, without torchrun")
    for elements in arguments.sizes:
        size = 4 * elements
        plain = {p: measure(p, elements) for p in ("plain", "plain-generic")}
        for mode, buffers in BUFFERS.items():
            beside = plain["plain-generic" if mode == "generic" else "plain"]
            value = (measure(mode, elements) - beside) / size
            reference = 1.02 + WORKERS * buffers
            figure = {
                "name": f"memory, {mode}, {size / 1e6:.0f} MB",
                "value": round(value, 3),
                "reference": reference,
                "ratio": round(reference / value, 3),
                "unit": "sizes of the parameters",
                "torch": torch.__version__,
            }
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
