"""Ranks on several hosts, two on each: as names on one machine, and as network namespaces."""

import ctypes
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import begin
from test_process_group_four import (
    DTYPES,
    INTEGERS,
    LENGTH,
    convert,
    expect,
    island,
    operations,
    reference,
    small,
    untouched,
)
from test_process_group_training import agree, alone, batches, descend, wrapped
from torch.distributed import ReduceOp
from workers import start_worker, wait_workers

pytestmark = pytest.mark.cluster

SIZE = 4


@pytest.fixture
def store(clean_job: Path) -> str:
    return str(clean_job / "store")


def join_hosts(store: str | int, seconds: float = 30.0, placement: str = "0011") -> int:
    """Begin as a rank of the host that ``placement`` has for it."""
    os.environ["PSPLUS_HOST_ID"] = f"host {placement[int(os.environ['RANK'])]}"
    rank, size = begin(store, seconds)
    assert size == SIZE
    return rank


def by_host(store: str, placement: str) -> bool:
    rank = join_hosts(store, placement=placement)
    for dtype in DTYPES:
        for op, meaning in operations(dtype):
            tensor = convert(small(rank), dtype)
            dist.all_reduce(tensor, op)
            expect(tensor, reference(0, meaning, dtype), dtype, op)
        for root in range(SIZE):
            tensor = convert(small(rank), dtype)
            dist.broadcast(tensor, root)
            expect(tensor, convert(small(root), dtype), "broadcast", dtype, root)
    for dtype in INTEGERS[1:]:  # sums of four do not fit into the smallest
        values = torch.tensor([-7, -1, 120, 101], dtype=dtype) - rank
        mean = torch.div(sum(torch.tensor([-7, -1, 120, 101]) - r for r in range(SIZE)), SIZE)
        dist.all_reduce(values, ReduceOp.AVG)
        expect(values, mean.trunc().to(dtype), "AVG", dtype)
    halves = torch.full((5,), 60_000, dtype=torch.float16)
    dist.all_reduce(halves, ReduceOp.AVG)
    expect(halves, torch.full((5,), 60_000, dtype=torch.float16), "AVG of large float16")
    tensor = torch.full((9,), float(rank))
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    expect(tensor, torch.full((9,), 3.0), "premul_sum")
    for n in (0, 1, 2, 70_001):
        works = [dist.all_reduce(t := small(rank, n), async_op=True)]
        works.append(dist.barrier(async_op=True))
        for work in works:
            work.wait()
        expect(t, sum(small(r, n) for r in range(SIZE)), n)
    sheet, view = island(small(rank, 35).view(5, 7).float())
    dist.all_reduce(view)
    expect(view.contiguous(), sum(small(r, 35).view(5, 7).float() for r in range(SIZE)), "island")
    untouched(sheet)
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


@pytest.mark.parametrize("placement", ["0011", "0101", "0001", "0012"])
def test_collectives_by_host(workers: Callable[..., Any], store: str, placement: str) -> None:
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


def lose_a_rank(store: str, victim: int) -> list[Any]:
    rank = join_hosts(store)
    dist.all_reduce(torch.ones(10))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(100_000))
    except dist.DistBackendError as error:
        waited = time.monotonic() - begun
        time.sleep(2.5)  # the others must not learn of it from our end
        dist.destroy_process_group()
        return [str(error), waited]
    return ["no error", 0.0]


@pytest.mark.parametrize("victim", [1, 2])
def test_all_hosts_learn_of_a_lost_rank(clean_job: Path, store: str, victim: int) -> None:
    processes = [
        start_worker(lose_a_rank, rank, SIZE, clean_job, "hosts", store=store, victim=victim)
        for rank in range(SIZE)
    ]
    ended = wait_workers(processes, clean_job, 60)
    for rank in set(range(SIZE)) - {victim}:
        assert ended[rank].result is not None, ended[rank].stderr
        message, seconds = ended[rank].result
        assert message != "no error"
        assert seconds < 2.0, (rank, message)


ADDRESSES = ["10.211.7.1", "10.211.7.2"]
CLONE_NEWNET = 0x40000000  # linux/sched.h


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them; their names."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    tag = secrets.token_hex(3)
    names = [f"ps-{tag}-{i}" for i in range(2)]
    made: list[str] = []

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)

    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"this machine allows no network namespaces: {error}")
            made.append(name)
        ends = [f"v{tag}{i}" for i in range(2)]
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1],
           "netns", names[1])  # fmt: skip
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", end, "name", "cable")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def enter(network: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {network}")


def sent() -> int:
    """Bytes that have gone out through the cable."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "cable":
            return int(numbers.split()[8])
    raise AssertionError("there is no cable")


def across(networks: list[str], backend: str, ranks_per_host: int) -> list[int]:
    """Bytes that this rank's host sends for an all_reduce and a broadcast of 8 MB each."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = rank // ranks_per_host
    enter(networks[host])
    os.environ["PSPLUS_HOST_ID"] = networks[host]
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"tcp://{ADDRESSES[0]}:29617", rank=rank, world_size=size
    )
    n = 2_000_000
    results = []
    for _ in range(2):
        dist.barrier()
        before = sent()
        tensor = small(rank, n).float()
        dist.all_reduce(tensor)
        dist.barrier()
        results.append(sent() - before)
        expect(tensor, sum(small(r, n) for r in range(size)).float(), "all_reduce")
    dist.barrier()
    before = sent()
    tensor = small(rank, n).float()
    dist.broadcast(tensor, size - 1)
    dist.barrier()
    results.append(sent() - before)
    expect(tensor, small(size - 1, n).float(), "broadcast")
    whole = torch.zeros(size * 5)
    dist.all_gather_single(whole, torch.full((5,), float(rank)))
    expect(whole, torch.arange(float(size)).repeat_interleave(5), "all_gather")
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_two_hosts_send_no_more_than_gloo_with_one_rank_each(
    workers: Callable[..., Any], networks: list[str]
) -> None:
    gloo = workers(across, 2, networks=networks, backend="gloo", ranks_per_host=1)
    ours = workers(across, 4, networks=networks, backend="psplus", ranks_per_host=2)
    for host in (0, 1):
        for call in (1, 2):  # the first warms the connections up; acknowledgements count too
            assert ours[2 * host][call] <= 1.1 * gloo[host][call] + 100_000, (ours, gloo)
