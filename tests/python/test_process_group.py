"""The process group "psplus": every function of torch.distributed that it stands behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import begin
from torch import nn
from workers import REPOSITORY, start_worker, wait_workers

SIZES = [0, 1, 7, 65_536, 200_003]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

pytestmark = pytest.mark.cluster


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def store(clean_job: Path) -> str:
    return str(clean_job / "store")


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, exact in every dtype, different for each rank and element."""
    return ((torch.arange(n) * (rank + 2) + rank * 5 + 1) % 11).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected), (actual, expected)


def check_reductions(rank: int, size: int) -> None:
    for dtype in FLOATS + INTEGERS:
        for n in SIZES if dtype in (torch.float32, torch.int64) else [7, 70_001]:
            wide = torch.stack([values(r, n, torch.float64) for r in range(size)])
            expected = {
                dist.ReduceOp.SUM: wide.sum(0),
                dist.ReduceOp.MIN: wide.amin(0) if n else wide[0],
                dist.ReduceOp.MAX: wide.amax(0) if n else wide[0],
            }
            if size == 2:  # at most 100: exact in every dtype
                expected[dist.ReduceOp.PRODUCT] = wide.prod(0)
            mean = wide.sum(0) / size
            if dtype in INTEGERS:
                expected[dist.ReduceOp.AVG] = mean.trunc()
            elif size == 2:
                expected[dist.ReduceOp.AVG] = mean
            for op, result in expected.items():
                tensor = values(rank, n, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, result.to(dtype))
                tensor = values(rank, n, dtype)
                dist.reduce(tensor, dst=size - 1, op=op)
                if rank == size - 1:
                    same(tensor, result.to(dtype))
    bits = torch.stack([values(r, 99, torch.int32) for r in range(size)])
    for op, combine in [
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ]:
        result = bits[0]
        for other in bits[1:]:
            result = combine(result, other)
        tensor = values(rank, 99, torch.int32)
        dist.all_reduce(tensor, op)
        same(tensor, result)
    negative = torch.tensor([-3, -1, 5, -7]) - rank
    dist.all_reduce(negative, dist.ReduceOp.AVG)  # toward zero, as NCCL does
    total = sum(torch.tensor([-3, -1, 5, -7]) - r for r in range(size))
    same(negative, torch.div(total, size, rounding_mode="trunc"))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags)
    same(flags, torch.tensor([True, True, False]))
    complex_ = torch.complex(values(rank, 33), values(rank + 1, 33))
    dist.all_reduce(complex_)
    same(complex_, sum(torch.complex(values(r, 33), values(r + 1, 33)) for r in range(size)))
    with pytest.raises(ValueError, match="BAND"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)


def check_moves(rank: int, size: int) -> None:
    for n in SIZES:
        for root in range(size):
            tensor = values(rank, n)
            dist.broadcast(tensor, src=root)
            same(tensor, values(root, n))
            outs = [torch.full((n,), -1.0) for _ in range(size)] if rank == root else None
            dist.gather(values(rank, n), outs, dst=root)
            for r, out in enumerate(outs or []):
                same(out, values(r, n))
            ins = [values(10 * root + r, n) for r in range(size)] if rank == root else None
            tensor = torch.full((n,), -1.0)
            dist.scatter(tensor, ins, src=root)
            same(tensor, values(10 * root + rank, n))
        outs = [torch.full((n,), -1.0) for _ in range(size)]
        dist.all_gather(outs, values(rank, n))
        for r, out in enumerate(outs):
            same(out, values(r, n))
        whole = torch.full((size * n,), -1.0)
        dist.all_gather_into_tensor(whole, values(rank, n))
        same(whole, torch.cat([values(r, n) for r in range(size)]))
        for op, divide in [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, size)]:
            expected = sum(values(10 * r + rank, n, torch.float64) for r in range(size)) / divide
            ins = [values(10 * rank + r, n, torch.float64) for r in range(size)]
            tensor = torch.full((n,), -1.0, dtype=torch.float64)
            dist.reduce_scatter(tensor, ins, op)
            same(tensor, expected)
            tensor.fill_(-1)
            dist.reduce_scatter_tensor(tensor, torch.cat(ins), op)
            same(tensor, expected)
        outs = [torch.full((n,), -1.0) for _ in range(size)]
        dist.all_to_all(outs, [values(10 * rank + r, n) for r in range(size)])
        for r, out in enumerate(outs):
            same(out, values(10 * r + rank, n))
    uneven = [torch.full((r + 1, 2), -1.0) for r in range(size)]
    dist.all_gather(uneven, values(rank, 2 * (rank + 1)).view(-1, 2))
    for r, out in enumerate(uneven):
        same(out, values(r, 2 * (r + 1)).view(-1, 2))
    whole = torch.full((sum(r + 1 for r in range(size)), 3), -1.0)
    source = values(rank, size * (rank + 1) * 3).view(-1, 3)
    dist.all_to_all_single(whole, source, [r + 1 for r in range(size)], [rank + 1] * size)
    parts = [values(r, size * (r + 1) * 3).view(-1, 3).chunk(size)[rank] for r in range(size)]
    same(whole, torch.cat(parts))
    dist.barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30))  # dist.monitored_barrier: Gloo only


def check_layouts(rank: int, size: int) -> None:
    grid = torch.full((6, 8), 100.0)
    grid[:, ::2] = values(rank, 24).view(6, 4)
    dist.all_reduce(grid[:, ::2])
    same(grid[:, ::2].contiguous(), sum(values(r, 24) for r in range(size)).view(6, 4))
    assert (grid[:, 1::2] == 100).all()
    grid = torch.full((4, 6), 100.0)
    outs = [torch.full((3, 2), -1.0).t() for _ in range(size)]
    dist.all_gather(outs, values(rank, 6).view(3, 2).t())
    for r, out in enumerate(outs):
        same(out, values(r, 6).view(3, 2).t())
    grid[:, 1] = values(rank, 4)
    dist.broadcast(grid[:, 1], src=1)
    same(grid[:, 1].contiguous(), values(1, 4))
    assert (grid[:, 0] == 100).all()
    sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, rank + 1.0], (7,))
    dist.all_reduce(sparse)
    expected = torch.zeros(7)
    for r in range(size):
        expected[r] += 1
        expected[5] += r + 1
    same(sparse.to_dense(), expected)


def check_messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in SIZES:
        got = torch.full((n,), -1.0)
        request = dist.isend(values(rank, n), after)
        dist.recv(got, before)
        request.wait()
        same(got, values(before, n))
        got = torch.full((n,), -1.0)
        operations = [
            dist.P2POp(dist.isend, values(rank, n), after),
            dist.P2POp(dist.irecv, got, before),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        same(got, values(before, n))
    if rank == 0:
        for tag in (8, 7):
            for r in range(1, size):
                dist.send(torch.full((3,), float(tag)), r, tag=tag)
        seen = []
        for _ in range(1, size):
            got = torch.zeros(2)
            source = dist.recv(got)
            same(got, torch.full((2,), float(source)))
            seen.append(source)
        assert sorted(seen) == list(range(1, size))
    else:
        for tag in (7, 8):
            got = torch.zeros(3)
            dist.recv(got, 0, tag=tag)
            same(got, torch.full((3,), float(tag)))
        dist.send(torch.full((2,), float(rank)), 0)


def check_objects_and_groups(rank: int, size: int) -> None:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(size)]
    words = [f"from {rank}", rank]
    dist.broadcast_object_list(words, src=1)
    assert words == ["from 1", 1]
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        tensor = values(rank, 50)
        dist.all_reduce(tensor, group=pair)
        same(tensor, values(0, 50) + values(size - 1, 50))
        dist.destroy_process_group(pair)
    works = [dist.all_reduce(t := values(rank + i, 40_000), async_op=True) for i in range(5)]
    tensors = [values(rank + i, 40_000) for i in range(5)]
    works += [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in works:
        work.wait()
    same(t, sum(values(r + 4, 40_000) for r in range(size)))
    for i, t in enumerate(tensors):
        same(t, sum(values(r + i, 40_000) for r in range(size)))
    future = dist.all_reduce(own := values(rank, 9), async_op=True).get_future()
    future.wait()
    same(future.value()[0], sum(values(r, 9) for r in range(size)))
    assert future.value()[0].data_ptr() == own.data_ptr()
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in (tensors := [values(rank + i, 100) for i in range(3)]):
            dist.all_reduce(t)
    manager.wait()
    for i, t in enumerate(tensors):
        same(t, sum(values(r + i, 100) for r in range(size)))
    import torch.distributed._functional_collectives as functional

    result = functional.all_reduce(values(rank, 12), "sum", dist.group.WORLD)
    same(functional.wait_tensor(result), sum(values(r, 12) for r in range(size)))


def everything(store: str, host: str = "", shared: bool = True) -> bool:
    if host:
        os.environ["PSPLUS_HOST_ID"] = f"{host}{os.environ['RANK']}"
    rank, size = begin(store, 60.0)
    inner = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert dist.get_backend() == "psplus"
    if hasattr(inner, "wrapped_pg"):
        inner = inner.wrapped_pg
    assert inner.shares_memory == shared
    check_reductions(rank, size)
    check_moves(rank, size)
    check_layouts(rank, size)
    if shared:  # Gloo's sends wait for their receives
        check_messages(rank, size)
    check_objects_and_groups(rank, size)
    dist.destroy_process_group()
    return True


def test_every_function(workers: Callable[..., Any], ranks: int, store: str) -> None:
    assert all(workers(everything, ranks, store=store))


def test_under_detailed_debugging(workers: Callable[..., Any], store: str) -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert all(workers(small, 2, store=store, environment=environment))


def test_every_function_with_a_rank_on_each_host(
    workers: Callable[..., Any], ranks: int, store: str
) -> None:
    assert all(workers(everything, ranks, store=store, host="host", shared=False))


def small(store: str) -> bool:
    rank, size = begin(store, 60.0)
    total = values(rank, 1000)
    dist.all_reduce(total)
    same(total, sum(values(r, 1000) for r in range(size)))
    outs = [torch.zeros(5) for _ in range(size)]
    dist.all_gather(outs, values(rank, 5))
    same(outs[1], values(1, 5))
    dist.barrier()
    dist.destroy_process_group()
    return True


def train(store: str) -> list[torch.Tensor]:
    rank, size = begin(store, 60.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    alone = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    alone.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    inputs = torch.randn(4, size, 6, 8, dtype=torch.float64)
    for net, data in ((ddp, inputs[:, rank]), (alone, inputs.flatten(1, 2))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in data:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    result = [p.detach().clone() for p in model.parameters()]
    dist.destroy_process_group()
    return result


def test_ddp_trains_as_one_process_with_all_data(
    workers: Callable[..., Any], ranks: int, store: str
) -> None:
    first, *others = workers(train, ranks, store=store)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def again_and_again(store: str) -> int:
    for turn in range(20):
        rank, size = begin(f"{store}-{turn}", 60.0)
        tensor = values(rank, 100)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        same(tensor, sum(values(r, 100) for r in range(size)))
        dist.send(tensor, (rank + 1) % size) if rank == 0 else dist.recv(tensor, rank - 1)
        if turn == 0:
            dist.barrier()
        dist.destroy_process_group()
    names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if name.startswith("psplus")], names
    return len(list(Path("/proc/self/fd").iterdir()))


def test_twenty_groups_after_each_other(workers: Callable[..., Any], store: str) -> None:
    assert max(workers(again_and_again, 2, store=store)) < 60


def die_in_a_collective(store: str, victim: int) -> list[Any]:
    rank, _ = begin(store, 60.0)
    dist.all_reduce(torch.ones(10))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1_000_000))
    except dist.DistBackendError as error:
        return [str(error), time.monotonic() - begun]
    return ["no error", 0.0]


def test_a_killed_rank_is_named_by_the_others(clean_job: Path, store: str) -> None:
    processes = [
        start_worker(die_in_a_collective, rank, 3, clean_job, "killed", store=store, victim=1)
        for rank in range(3)
    ]
    ended = wait_workers(processes, clean_job, 60)
    for rank in (0, 2):
        assert ended[rank].result is not None, ended[rank].stderr
        message, seconds = ended[rank].result
        assert "rank 1" in message
        assert seconds < 1.5


def wait_in_vain(store: str) -> str:
    rank, _ = begin(store, 60.0)
    if rank == 1:
        time.sleep(3)
        return ""
    begun = time.monotonic()
    work = dist.group.WORLD.allreduce([torch.ones(3)], _options(0.5))
    with pytest.raises(dist.DistBackendError, match="rank 1") as caught:
        work.wait()
    assert 0.4 < time.monotonic() - begun < 1.5
    return str(caught.value)


def _options(seconds: float) -> Any:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=seconds)
    return options


def test_a_call_has_its_own_time_out(workers: Callable[..., Any], store: str) -> None:
    workers(wait_in_vain, 2, store=store)


@pytest.mark.parametrize(
    "program",
    [
        "import psplus, torch.distributed as d; assert 'PSPLUS' in d.Backend._plugins",
        "import torch, psplus",
        "import sys, _psplus_entry; assert 'torch' not in sys.modules\n"
        "_psplus_entry.register(); _psplus_entry.register(); assert 'psplus' not in sys.modules",
    ],
)
def test_registration_in_any_order(program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
