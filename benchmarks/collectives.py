"""The process group "psplus" against Gloo, both groups in the same processes, in turns.

Prints one JSON line a figure: median of the turns of the slowest rank; ``ratio`` is Gloo's time by
ours, higher is better. GB/s is 1e9 payload bytes of one rank a second.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import psplus  # noqa: F401 - makes the backend known in a source tree

TURNS = 9
BUDGET = 0.05  # seconds that one side may take in a turn
SIDES = ("psplus", "gloo")

Call = Callable[[], object]


def calls(group: dist.ProcessGroup, size: int) -> dict[str, Call]:
    """One call of each collective on ``size`` bytes a rank; ``psplus`` and Gloo get equal ones."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    elements = max(size // 4, 1)
    own = torch.zeros(elements)  # stays finite however often it is summed
    part = torch.empty(max(elements // world, 1))
    whole = torch.ones(part.numel() * world)
    outs = list(torch.empty(world, elements).unbind())
    after, before = (rank + 1) % world, (rank - 1) % world

    def send_receive() -> None:
        request = dist.isend(own, after, group)
        dist.recv(outs[0], before, group)
        request.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(own, dist.ReduceOp.SUM, group),
        "reduce": lambda: dist.reduce(own, 0, dist.ReduceOp.SUM, group),
        "broadcast": lambda: dist.broadcast(own, 0, group),
        "all_gather": lambda: dist.all_gather(outs, own, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "gather": lambda: dist.gather(own, outs if rank == 0 else None, 0, group),
        "scatter": lambda: dist.scatter(own, outs if rank == 0 else None, 0, group),
        "send_receive": send_receive,
        "barrier": lambda: dist.barrier(group),
    }


def slowest(seconds: float, clock: dist.ProcessGroup) -> float:
    """The longest time of all ranks."""
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, clock)
    return float(tensor)


def measure(call: Call, times: int, clock: dist.ProcessGroup) -> float:
    """Seconds of one call, of ``times`` in a row."""
    dist.barrier(clock)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return slowest((time.perf_counter() - begin) / times, clock)


def check(group: dist.ProcessGroup) -> None:
    """Both sides must be right before their time counts."""
    world = dist.get_world_size(group)
    tensor = torch.arange(1000, dtype=torch.float32) + dist.get_rank(group)
    dist.all_reduce(tensor, group=group)
    expected = torch.arange(1000, dtype=torch.float32) * world + world * (world - 1) / 2
    if not torch.equal(tensor, expected):
        raise RuntimeError("an all_reduce is wrong")


def report(name: str, size: int, seconds: dict[str, list[float]]) -> None:
    """Print one figure: medians of the turns."""
    if dist.get_rank() != 0:
        return
    own, reference = (statistics.median(seconds[side]) for side in SIDES)
    figure = {
        "name": name,
        "bytes": size,
        "ranks": dist.get_world_size(),
        "against": "gloo",
        "value_us": round(own * 1e6, 2),
        "reference_us": round(reference * 1e6, 2),
        "value_gb_s": round(size / own / 1e9, 3),
        "reference_gb_s": round(size / reference / 1e9, 3),
        "ratio": round(reference / own, 2),
        "turns": TURNS,
        "spread": round((max(seconds["psplus"]) - min(seconds["psplus"])) / own, 2),
        "torch": torch.__version__,
    }
    print(json.dumps(figure), flush=True)


def compare(name: str, size: int, sides: dict[str, Call], clock: dist.ProcessGroup) -> None:
    """Time a call on both sides in turns and print the figure."""
    times = {}
    for side, call in sides.items():
        measure(call, 2, clock)
        times[side] = min(2000, max(2, int(BUDGET / measure(call, 3, clock))))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(TURNS):
        for side, call in sides.items():
            seconds[side].append(measure(call, times[side], clock))
    report(name, size, seconds)


def ddp_step(group: dist.ProcessGroup, size: int) -> Call:
    """A step of DDP with little computation, for a model of ``size`` bytes."""
    torch.manual_seed(0)
    width = int((size / 4 / 4) ** 0.5)
    layers = (nn.Linear(width, width, bias=False) for _ in range(4))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    inputs = torch.randn(1, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def work(store: str) -> None:
    """What each process runs."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    groups = {side: dist.new_group(backend=side) for side in SIDES}
    for group in groups.values():
        check(group)
    clock = groups["psplus"]

    def one(name: str, size: int) -> None:
        compare(name, size, {side: calls(groups[side], size)[name] for side in SIDES}, clock)

    for size in (64, 4096, 65_536, 1 << 20, 4 << 20, 16 << 20, 100_000_000):
        one("all_reduce", size)
    one("barrier", 0)
    for name in calls(clock, 4):
        if name not in ("all_reduce", "barrier"):
            one(name, 1 << 20)
    for size in (1_000_000, 10_000_000, 100_000_000):
        compare("ddp_step", size, {side: ddp_step(groups[side], size) for side in SIDES}, clock)
    dist.barrier(groups["psplus"])
    time.sleep(0.2)  # Gloo's thread must have let go of its last work before the interpreter ends
    dist.destroy_process_group()


def run(ranks: int) -> None:
    """Start the processes and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--store", str(Path(folder) / "store")]
        processes = [
            subprocess.Popen(command, env={**os.environ, **variables, "RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.wait(timeout=900)
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode != 0 for process in processes):
            raise SystemExit("a benchmark process failed; its traceback is above")


def main() -> None:
    """Measure with two ranks and with four, which may be more than there are cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store:
        work(arguments.store)
        return
    for ranks in arguments.ranks:
        run(ranks)


if __name__ == "__main__":
    main()
