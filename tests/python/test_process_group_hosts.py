"""Ranks on several hosts, which are names here: results, and what becomes of a lost rank."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import begin
from test_process_group_four import (
    INTEGERS,
    LENGTH,
    SIZE,
    expect,
    move_everything,
    reduce_everything,
    small,
    what_gloo_does_not_do,
)
from test_process_group_life import free_port
from test_process_group_training import agree, alone, batches, descend, wrapped
from torch.distributed import ReduceOp
from workers import start_worker, wait_workers

pytestmark = pytest.mark.cluster


@pytest.fixture
def store(clean_job: Path) -> str:
    return str(clean_job / "store")


PLACEMENTS = ["0011", "0101", "0001", "0012"]


def join_hosts(store: str | int, seconds: float = 30.0, placement: str = "0011") -> int:
    """Begin as a rank of the host that ``placement`` has for it."""
    rank, size = begin(store, seconds, placement)
    assert size == SIZE
    return rank


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("body", [reduce_everything, move_everything, what_gloo_does_not_do])
def test_collectives_by_host(
    workers: Callable[..., Any], store: str, placement: str, body: Callable[..., bool]
) -> None:
    assert all(workers(body, SIZE, store=store, placement=placement))


def by_host(store: str, placement: str) -> bool:
    rank = join_hosts(store, placement=placement)
    for dtype in INTEGERS[1:]:  # sums of four do not fit into the smallest
        values = torch.tensor([-7, -1, 120, 101], dtype=dtype) - rank
        mean = torch.div(sum(torch.tensor([-7, -1, 120, 101]) - r for r in range(SIZE)), SIZE)
        dist.all_reduce(values, ReduceOp.AVG)
        expect(values, mean.trunc().to(dtype), "AVG", dtype)
    for dtype, largest in ((torch.float16, 60_000), (torch.uint8, 250)):
        expected = torch.full((5,), largest, dtype=dtype)
        tensor = expected.clone()
        dist.all_reduce(tensor, ReduceOp.AVG)
        expect(tensor, expected, "all_reduce: AVG of large ones", dtype)
        tensor = expected.clone()
        dist.reduce(tensor, 3, ReduceOp.AVG)
        expect(tensor, expected, "reduce: AVG of large ones", dtype)
        tensor = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_single(tensor, expected.repeat(SIZE), ReduceOp.AVG)
        expect(tensor, expected, "reduce_scatter: AVG of large ones", dtype)
    for n in (0, 1, 2, 70_001):
        works = [dist.all_reduce(t := small(rank, n), async_op=True)]
        works.append(dist.barrier(async_op=True))
        works.append(dist.broadcast(u := small(rank, n), 3, async_op=True))
        whole = torch.zeros(SIZE * n, dtype=torch.int64)
        works.append(dist.all_gather_single(whole, small(rank, n), async_op=True))
        for work in works:
            work.wait()
        expect(t, sum(small(r, n) for r in range(SIZE)), n)
        expect(u, small(3, n), n)
        expect(whole, torch.cat([small(r, n) for r in range(SIZE)]), n)
    source = torch.arange(SIZE * (rank + 1) * 3).view(-1, 3) + 1000 * rank
    taken = torch.zeros(sum(r + 1 for r in range(SIZE)), 3, dtype=torch.int64)
    dist.all_to_all_single(taken, source, [r + 1 for r in range(SIZE)], [rank + 1] * SIZE)
    parts = [torch.arange(SIZE * (r + 1) * 3).view(-1, 3) + 1000 * r for r in range(SIZE)]
    expect(taken, torch.cat([p.chunk(SIZE)[rank] for p in parts]), "uneven all_to_all")
    counts = [[(to * 2 + by) % 3 for to in range(SIZE)] for by in range(SIZE)]  # some are 0
    outs = [torch.zeros(counts[r][rank]) for r in range(SIZE)]
    dist.all_to_all(outs, [torch.full((n,), float(rank)) for n in counts[rank]])
    for r, out in enumerate(outs):
        expect(out, torch.full((counts[r][rank],), float(r)), "all_to_all with nothing for some")
    sparse = torch.sparse_coo_tensor([[rank, 5]], [4.0, 4.0 * rank], (7,))
    dist.all_reduce(sparse, ReduceOp.AVG)
    expect(sparse.to_dense(), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 6.0, 0.0]), "sparse")
    noise = torch.randn(LENGTH, generator=torch.manual_seed(rank))
    dist.all_reduce(noise)
    bits: list[Any] = [None] * SIZE
    dist.all_gather_object(bits, noise.numpy().tobytes())
    assert len(set(bits)) == 1, "ranks differ in bits"
    net = wrapped()
    descend(net, batches(SIZE)[:, rank])
    agree(net, alone(SIZE))
    dist.barrier()
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sizes_averages_and_training_by_host(
    workers: Callable[..., Any], store: str, placement: str
) -> None:
    assert all(workers(by_host, SIZE, store=store, placement=placement))


def barrier_waits(store: str) -> list[float]:
    rank = join_hosts(store)
    dist.barrier()
    if rank == 3:
        time.sleep(0.5)
    entered = time.monotonic()
    dist.barrier()
    left = time.monotonic()
    dist.barrier()
    dist.destroy_process_group()
    return [entered, left]


def test_a_barrier_lets_nobody_go_early(workers: Callable[..., Any], store: str) -> None:
    times = workers(barrier_waits, SIZE, store=store)
    assert min(left for _, left in times) >= max(entered for entered, _ in times)


def three_times(call: str) -> None:
    for _ in range(3):
        if call == "all_reduce":
            dist.all_reduce(torch.ones(100_000))
        elif call == "all_to_all":
            dist.all_to_all_single(torch.ones(100_000), torch.ones(100_000))
        else:
            dist.all_gather_single(torch.ones(400_000), torch.ones(100_000))


def lose_a_rank(
    store: str | int, placement: str, victim: int, how: str, call: str, seconds: float
) -> list[Any]:
    rank = join_hosts(store, seconds, placement)
    dist.all_reduce(torch.ones(10))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        three_times(call)
    waited = time.monotonic() - begun
    time.sleep(1.2)  # the others must not learn of it from our end
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as again:
        dist.barrier()
    assert str(again.value) == str(caught.value)
    dist.destroy_process_group()
    return [str(caught.value), waited, time.monotonic() - begun]


@pytest.mark.parametrize(
    ("placement", "victim", "how", "call"),
    [
        ("0011", 1, "killed", "all_reduce"),
        ("0011", 1, "killed", "all_to_all"),
        ("0011", 2, "killed", "all_reduce"),
        ("0011", 2, "killed", "all_gather"),
        ("0012", 3, "killed", "all_reduce"),  # nobody of its host sees it die
        ("0012", 3, "killed", "all_gather"),
        ("0011", 0, "killed with the store", "all_reduce"),
        ("0011", 2, "frozen", "all_reduce"),
        ("0011", 2, "frozen", "all_to_all"),
        ("0101", 3, "frozen", "all_gather"),
    ],
)
def test_all_hosts_learn_of_a_lost_rank(
    clean_job: Path, placement: str, victim: int, how: str, call: str
) -> None:
    seconds = 30.0 if how != "frozen" else 1.5
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store: str | int = server.port
    if how == "killed with the store":
        store, how = f"tcp://127.0.0.1:{free_port()}", "killed"
    others = sorted(set(range(SIZE)) - {victim})
    processes = [
        start_worker(
            lose_a_rank, rank, SIZE, clean_job, "hosts", store=store, placement=placement,
            victim=victim, how=how, call=call, seconds=seconds,
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    try:
        for rank in others:
            processes[rank].wait(60)
    finally:
        for process in processes:
            process.kill()
        ended = wait_workers(processes, clean_job, 10)
    for rank in others:
        assert ended[rank].result is not None, ended[rank].stderr
        message, waited, destroyed = ended[rank].result
        assert re.search(rf"rank {victim}\b", message), (rank, message)
        assert waited < (1.0 if how == "killed" else seconds + 1.0), (rank, message)
        assert destroyed < 1.0
