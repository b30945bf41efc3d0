"""Dense parameters on one host: pushes against memory, and a two-worker step against DDP.

Both sides run in turns within one process group, one thread each; medians of the turns. Prints one
JSON line a figure: ``value`` is psplus, ``reference`` what it is compared with, ``ratio`` their
quotient, higher is better, ``bar`` the ratio that is the aim (docs/performance.md).
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor, nn

import psplus
from psplus import _C, config

REPEATS = 9
STEPS = 20
BARS = {
    "push+apply of 17 MB": {"a += b": 0.6, "gloo send/recv": 1.7, "torch.distributed.rpc": 1.7},
    "push+apply of 100 MB": {"a += b": 0.45, "gloo send/recv": 1.27, "torch.distributed.rpc": 1.27},
    "two-worker step, 25 M parameters": {"ddp over gloo": 1.8},
}
"""The ratios to reach, by figure and by what it is compared with."""


def median_seconds(sides: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Time the sides in turns, after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            begin = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


def report(name: str, unit: str, times: dict[str, list[float]], amount: float) -> None:
    """Print psplus against each other side, as ``amount`` per second."""
    own = statistics.median(times["psplus"])
    for side, seconds in times.items():
        if side == "psplus":
            continue
        reference = statistics.median(seconds)
        figure = {
            "name": name,
            "against": side,
            "value": round(amount / own, 3),
            "reference": round(amount / reference, 3),
            "ratio": round(reference / own, 3),
            "bar": BARS[name][side],
            "unit": unit,
            "repeats": len(seconds),
            "spread": round((max(times["psplus"]) - min(times["psplus"])) / own, 2),
            "torch": torch.__version__,
            "kernels": _C.kernel_isa(),
        }
        print(json.dumps(figure), flush=True)


totals: dict[int, Tensor] = {}
"""What the receiver of the calls below has added up, by number of elements."""


def add_to_total(update: Tensor) -> None:
    """Run by the receiver of a remote call."""
    total = totals.get(update.numel())
    if total is None:
        total = totals[update.numel()] = torch.zeros(update.numel())
    total += update


def bench_push(elements: int) -> None:
    """Push and apply of one tensor, both slots in use, by one worker.

    A push is the update copied into a slot and applied by the server; the payload counts once.
    Beside it ``a += b``; and, with the second process (rank 1) as the receiver that adds, a Gloo
    send and a call over torch.distributed.rpc.
    """
    rank = dist.get_rank()
    update = torch.ones(elements)
    received = torch.empty(elements)
    total = torch.zeros(elements)
    pushes = 12
    if rank == 1:
        for _ in range((REPEATS + 1) * pushes):
            dist.recv(received, src=0)
            total += received
        dist.barrier()
        return
    session = _C.Session(
        job_dir=config.job_directory(
            config.JobConfig(rank=0, world_size=1, job=secrets.token_hex(8), host="bench")
        ),
        server_path=config.server_path(),
        rank=0,
        world_size=1,
    )
    value = torch.zeros(elements)
    stream = session.open_stream(
        ordinal=0,
        mode="async",
        bound=None,
        buffered=False,
        params=[("w", "float32", [elements])],
        blob=None,
    )
    while not stream.wait_initialised():
        stream.publish_values([value])

    def psplus_pushes() -> None:
        for _ in range(pushes):
            stream.push_sum([update], 1.0, True)
        stream.refresh()

    def plain_adds() -> None:
        for _ in range(pushes):
            total.add_(update)

    def gloo_sends() -> None:
        for _ in range(pushes):
            dist.send(update, dst=1)

    def remote_calls() -> None:
        rpc_calls = [rpc.rpc_async("rank1", add_to_total, (update,)) for _ in range(pushes)]
        torch.futures.wait_all(rpc_calls)

    sides = {
        "psplus": psplus_pushes,
        "a += b": plain_adds,
        "gloo send/recv": gloo_sends,
        "torch.distributed.rpc": remote_calls,
    }
    times = median_seconds(sides, REPEATS)
    result = torch.empty(elements)
    stream.pull_cut([result])
    expected = float((REPEATS + 1) * pushes)
    assert torch.equal(result, torch.full_like(result, expected)), result[:3]
    stream.close()
    session.close()
    dist.barrier()
    gigabytes = elements * 4 * pushes / 1e9
    report(f"push+apply of {elements * 4 / 1e6:.0f} MB", "GB/s", times, gigabytes)


def bench_step(elements: int) -> None:
    """A two-worker step with little computation: PS+ with momentum against DDP over Gloo."""
    side = int(elements**0.5 / 5**0.5)

    def make(distributed: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(5)))
        net = nn.parallel.DistributedDataParallel(model) if distributed else model
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        if not distributed:
            optimizer = psplus.wrap(optimizer, "ps+", model=model, nonfinite="allow")
        inputs = torch.randn(2, side)

        def steps() -> None:
            for _ in range(STEPS):
                optimizer.zero_grad()
                net(inputs).square().mean().backward()
                optimizer.step()
            if isinstance(optimizer, psplus.DistributedOptimizer):
                optimizer.synchronize()  # the last push is in before the other side's turn

        return steps

    sides = {"psplus": make(distributed=False), "ddp over gloo": make(distributed=True)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(REPEATS + 1):
        for name, run in sides.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        report(f"two-worker step, {elements / 1e6:.0f} M parameters", "steps/s", times, STEPS)


def work(store: str) -> None:
    """What each of the two processes runs."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}.rpc")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    bench_push(4 << 20)
    bench_push(25_000_000)
    rpc.shutdown()
    bench_step(25_000_000)
    time.sleep(0.2)  # Gloo's thread must have let go of its last work before the interpreter ends
    dist.destroy_process_group()


def main() -> None:
    """Start the two processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help=argparse.SUPPRESS)
    store = parser.parse_args().store
    if store:
        work(store)
        return
    with tempfile.TemporaryDirectory() as folder:
        job = secrets.token_hex(8)
        variables = {"WORLD_SIZE": "2", "PSPLUS_JOB": job, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--store", str(Path(folder) / "store")]
        processes = [
            subprocess.Popen(command, env={**os.environ, **variables, "RANK": str(rank)})
            for rank in range(2)
        ]
        try:
            for process in processes:
                process.wait(timeout=600)
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode != 0 for process in processes):
            raise SystemExit("a benchmark process failed; its traceback is above")


if __name__ == "__main__":
    main()
