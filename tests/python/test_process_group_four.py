"""Four ranks on one host: all collectives, dtypes and reductions, and what Gloo does not do."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process_groups import begin
from torch.distributed import ReduceOp

pytestmark = pytest.mark.cluster

SIZE = 4
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool]
LENGTH = 1003  # neither a whole number of vectors nor of ranks
ROOT = 2


@pytest.fixture
def store(clean_job: Path) -> str:
    return str(clean_job / "store")


def small(rank: int, n: int = LENGTH) -> torch.Tensor:
    """1, 2 or 3: the product of four fits every dtype. Differs between ranks and neighbours."""
    return (torch.arange(n) * (rank + 1) + rank * rank) % 3 + 1


def convert(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole + 1).double()).to(dtype)
    return (whole > 1) if dtype == torch.bool else whole.to(dtype)


def operations(dtype: torch.dtype) -> Iterator[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]]:
    """Reductions of a dtype, with what they mean for whole numbers (complex128) stacked by rank."""
    if dtype == torch.bool:
        yield from [
            (ReduceOp.SUM, lambda stack: stack.any(0)),
            (ReduceOp.MAX, lambda stack: stack.any(0)),
            (ReduceOp.BOR, lambda stack: stack.any(0)),
            (ReduceOp.PRODUCT, lambda stack: stack.all(0)),
            (ReduceOp.MIN, lambda stack: stack.all(0)),
            (ReduceOp.BAND, lambda stack: stack.all(0)),
            (ReduceOp.BXOR, lambda stack: stack.sum(0) % 2 == 1),
        ]
        return
    yield ReduceOp.SUM, lambda stack: stack.sum(0)
    if dtype.is_complex or dtype.is_floating_point:
        yield ReduceOp.AVG, lambda stack: stack.sum(0) / SIZE
    else:
        yield ReduceOp.AVG, lambda stack: stack.sum(0) // SIZE
        yield ReduceOp.BAND, lambda stack: fold(torch.bitwise_and, stack)
        yield ReduceOp.BOR, lambda stack: fold(torch.bitwise_or, stack)
        yield ReduceOp.BXOR, lambda stack: fold(torch.bitwise_xor, stack)
    if not dtype.is_complex:  # torch itself refuses these for complex numbers
        yield ReduceOp.PRODUCT, lambda stack: stack.prod(0)
        yield ReduceOp.MIN, lambda stack: stack.amin(0)
        yield ReduceOp.MAX, lambda stack: stack.amax(0)


def fold(combine: Callable[..., torch.Tensor], stack: torch.Tensor) -> torch.Tensor:
    result = stack[0]
    for other in stack[1:]:
        result = combine(result, other)
    return result


def expect(actual: torch.Tensor, expected: torch.Tensor, *what: Any) -> None:
    assert actual.dtype == expected.dtype, what
    if actual.dtype in UNSIGNED:
        actual, expected = actual.to(torch.int64), expected.to(torch.int64)
    assert torch.equal(actual, expected), (*what, actual, expected)


def reference(rank: int, meaning: Callable[..., torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What the reduction of all ranks' tensors gives, computed in a wider dtype."""
    wide = torch.complex128 if dtype.is_complex else torch.int64
    if dtype.is_floating_point:
        wide = torch.float64
    if dtype == torch.bool:
        wide = torch.bool
    return meaning(torch.stack([convert(small(r + rank), wide) for r in range(SIZE)])).to(dtype)


def reduce_everything(store: str, placement: str = "") -> bool:
    rank, size = begin(store, placement=placement)
    assert size == SIZE
    for dtype in DTYPES:
        own = convert(small(rank), dtype)
        parts = [convert(small(rank + r), dtype) for r in range(SIZE)]  # part r goes to rank r
        for op, meaning in operations(dtype):
            what = (dtype, op)
            total, mine = reference(0, meaning, dtype), reference(rank, meaning, dtype)
            tensor = own.clone()
            dist.all_reduce(tensor, op)
            expect(tensor, total, "all_reduce", *what)
            tensor = own.clone()
            dist.reduce(tensor, ROOT, op)
            if rank == ROOT:
                expect(tensor, total, "reduce", *what)
            tensor = torch.zeros_like(own)
            dist.reduce_scatter(tensor, parts, op)
            expect(tensor, mine, "reduce_scatter", *what)
            tensor = torch.zeros_like(own)
            dist.reduce_scatter_tensor(tensor, torch.cat(parts), op)
            expect(tensor, mine, "reduce_scatter_tensor", *what)
            tensors = [own.clone(), own[:7].clone()]
            with dist._coalescing_manager(async_ops=True) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor, op)
            manager.wait()
            expect(tensors[0], total, "coalesced all_reduce", *what)
            expect(tensors[1], total[:7], "coalesced all_reduce", *what)
    for dtype in FLOATS:
        tensor = convert(small(rank), dtype)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        expect(tensor, (sum(small(r) for r in range(SIZE)) * 0.5).to(dtype), "premul_sum", dtype)
    dist.destroy_process_group()
    return True


def test_every_reduction_of_every_dtype(workers: Callable[..., Any], store: str) -> None:
    assert all(workers(reduce_everything, SIZE, store=store))


def move_everything(store: str, placement: str = "") -> bool:
    rank, _ = begin(store, placement=placement)
    after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
    for dtype in DTYPES:
        mine = [convert(small(r), dtype) for r in range(SIZE)]  # rank r's tensor
        cross = [convert(small(rank + r + 1), dtype) for r in range(SIZE)]  # from here to rank r
        to_me = [convert(small(r + rank + 1), dtype) for r in range(SIZE)]

        def blank(dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(LENGTH, dtype=dtype)

        tensor = mine[rank].clone()
        dist.broadcast(tensor, ROOT)
        expect(tensor, mine[ROOT], "broadcast")
        outs = [blank() for _ in range(SIZE)]
        dist.all_gather(outs, mine[rank])
        whole = torch.zeros(SIZE * LENGTH, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine[rank])
        gathered = [blank() for _ in range(SIZE)] if rank == ROOT else None
        dist.gather(mine[rank], gathered, ROOT)
        for r in range(SIZE):
            expect(outs[r], mine[r], "all_gather", r)
            expect(whole.chunk(SIZE)[r], mine[r], "all_gather_into_tensor", r)
            if gathered:
                expect(gathered[r], mine[r], "gather", r)
        tensor = blank()
        dist.scatter(tensor, cross if rank == ROOT else None, ROOT)
        expect(tensor, convert(small(ROOT + rank + 1), dtype), "scatter")
        outs = [blank() for _ in range(SIZE)]
        dist.all_to_all(outs, cross)
        whole = torch.zeros(SIZE * LENGTH, dtype=dtype)
        dist.all_to_all_single(whole, torch.cat(cross))
        for r in range(SIZE):
            expect(outs[r], to_me[r], "all_to_all", r)
            expect(whole.chunk(SIZE)[r], to_me[r], "all_to_all_single", r)
        tensor = blank()
        for request in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine[rank], after),
                dist.P2POp(dist.irecv, tensor, before),
            ]
        ):
            request.wait()
        expect(tensor, mine[before], "send and recv")
    uneven = [torch.zeros(r, 3) for r in range(SIZE)]  # rank 0 has nothing
    dist.all_gather(uneven, torch.full((rank, 3), float(rank)))
    for r in range(SIZE):
        expect(uneven[r], torch.full((r, 3), float(r)), "uneven all_gather")
    dist.destroy_process_group()
    return True


def test_every_move_of_every_dtype(workers: Callable[..., Any], store: str) -> None:
    assert all(workers(move_everything, SIZE, store=store))


def island(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sheet of marks, and a transposed view of every third column that holds ``values``."""
    sheet = torch.full((values.shape[1], 3 * values.shape[0]), -7.0)
    view = sheet[:, 1::3].t()
    view.copy_(values)
    return sheet, view


def untouched(sheet: torch.Tensor) -> None:
    assert (sheet[:, 0::3] == -7).all()
    assert (sheet[:, 2::3] == -7).all()


def what_gloo_does_not_do(store: str, placement: str = "") -> bool:
    rank, _ = begin(store, placement=placement)
    grids = [small(r, 35).view(5, 7).float() + 10 * r for r in range(SIZE)]
    total = sum(grids)

    def fresh(values: torch.Tensor = grids[rank]) -> tuple[torch.Tensor, torch.Tensor]:
        return island(values)

    sheet, view = fresh()
    dist.all_reduce(view)
    expect(view.contiguous(), total, "all_reduce")
    untouched(sheet)
    sheet, view = fresh()
    dist.reduce(view, ROOT, ReduceOp.AVG)
    expect(view.contiguous(), total / SIZE if rank == ROOT else grids[rank], "reduce")
    untouched(sheet)
    sheet, view = fresh()
    dist.broadcast(view, ROOT)
    expect(view.contiguous(), grids[ROOT], "broadcast")
    untouched(sheet)
    pairs = [fresh(torch.zeros(5, 7)) for _ in range(SIZE)]
    dist.all_gather([view for _, view in pairs], fresh()[1])
    for r, (sheet, view) in enumerate(pairs):
        expect(view.contiguous(), grids[r], "all_gather")
        untouched(sheet)
    pairs = [fresh(torch.zeros(5, 7)) for _ in range(SIZE)]
    dist.all_to_all([view for _, view in pairs], [fresh(grids[rank] + r)[1] for r in range(SIZE)])
    for r, (sheet, view) in enumerate(pairs):
        expect(view.contiguous(), grids[r] + rank, "all_to_all")
        untouched(sheet)
    for op, divisor in [(ReduceOp.SUM, 1), (ReduceOp.AVG, SIZE)]:
        sheet, view = fresh(torch.zeros(5, 7))
        dist.reduce_scatter(view, [fresh(grids[rank] * (r + 1))[1] for r in range(SIZE)], op)
        expect(view.contiguous(), total * (rank + 1) / divisor, "reduce_scatter", op)
        untouched(sheet)
    pairs = [fresh(torch.zeros(5, 7)) for _ in range(SIZE)]
    outs = [view for _, view in pairs] if rank == ROOT else None
    dist.gather(fresh()[1], outs, ROOT)
    if rank == ROOT:
        for r, (sheet, view) in enumerate(pairs):
            expect(view.contiguous(), grids[r], "gather")
            untouched(sheet)
    sheet, view = fresh(torch.zeros(5, 7))
    dist.scatter(view, [fresh(g)[1] for g in grids] if rank == ROOT else None, ROOT)
    expect(view.contiguous(), grids[rank], "scatter")
    untouched(sheet)
    if not placement:  # between hosts sends and receives are Gloo's
        after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
        request = dist.isend(fresh()[1], after)
        sheet, view = fresh(torch.zeros(5, 7))
        dist.recv(view, before)
        request.wait()
        expect(view.contiguous(), grids[before], "recv")
        untouched(sheet)
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    expected = channels_last.clone()
    dist.broadcast(expected, 0)
    theirs = channels_last.contiguous() if rank else channels_last  # layouts differ between ranks
    dist.broadcast(theirs, 0)
    expect(theirs.contiguous(), expected.contiguous(), "channels_last")
    of_numpy = torch.from_numpy(np.arange(6.0).reshape(2, 3).T + 10 * rank)
    dist.all_reduce(of_numpy)
    total = sum(np.arange(6.0).reshape(2, 3).T + 10 * r for r in range(SIZE))
    expect(of_numpy, torch.tensor(total), "transposed array of numpy")
    every_second = torch.linspace(0, 5, 6)[::2] + rank
    dist.broadcast(every_second, ROOT)
    expect(every_second, torch.tensor([0.0, 2.0, 4.0]) + ROOT, "every second element")
    for dtype in INTEGERS[1:]:
        values = torch.tensor([-7, -1, 0, 3], dtype=dtype) - rank
        mean = torch.div(sum(torch.tensor([-7, -1, 0, 3]) - r for r in range(SIZE)), SIZE)
        dist.all_reduce(values, ReduceOp.AVG)
        expect(values, mean.trunc().to(dtype), "AVG truncates toward zero", dtype)
    dist.destroy_process_group()
    return True


def test_c28_layouts_that_gloo_gets_wrong(workers: Callable[..., Any], store: str) -> None:
    assert all(workers(what_gloo_does_not_do, SIZE, store=store))


def time_outs_of_pairs(store: str) -> bool:
    rank, _ = begin(store)
    group = dist.group.WORLD
    pairs = [dist.new_group([0, 1], timeout=timedelta(seconds=0.5)), dist.new_group([2, 3])]
    peer = rank ^ 1
    if rank == 0:  # nothing comes; only this receive may fail
        group.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            dist.recv(torch.zeros(3), 1)
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            dist.all_reduce(torch.ones(3), group=pairs[0])
        group.set_timeout(timedelta(seconds=30))
    got = torch.zeros(3)
    if rank in (2, 3):
        request = dist.isend(torch.full((3,), float(rank)), peer)
        dist.recv(got, peer)
        request.wait()
        expect(got, torch.full((3,), float(peer)), "an unrelated pair")
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=pairs[1])
        expect(tensor, torch.full((3,), 5.0), "an unrelated group")
    dist.barrier()
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    expect(tensor, torch.full((3,), 6.0), "all ranks, after one's receive timed out")
    request = dist.isend(torch.full((3,), float(rank)), peer)
    dist.recv(got, peer)
    request.wait()
    expect(got, torch.full((3,), float(peer)), "the pair itself")
    dist.barrier()
    dist.destroy_process_group()
    return True


def split_groups(store: str, hosts: bool) -> bool:
    if hosts:
        os.environ["PSPLUS_HOST_ID"] = f"host-{int(os.environ['RANK']) // 2}"
    rank, _ = begin(store)
    world = dist.group.WORLD
    cpu = torch.device("cpu")
    assert world._get_backend(cpu).supports_splitting
    assert world._get_backend(cpu).shares_memory != hosts
    for _ in range(2):  # the same ranks again must not find the first one's memory
        for ranks in ([0, 1], [0, 2, 3], [2, 3]):
            if rank not in ranks:
                continue
            group = world.split_group(ranks, timeout=timedelta(seconds=20))
            assert (group.rank(), group.size()) == (ranks.index(rank), len(ranks))
            backend = group._get_backend(cpu)
            assert backend.shares_memory == (not hosts or len(ranks) == 2)
            assert backend.options.global_ranks_in_group == ranks
            assert backend.options._timeout == timedelta(seconds=20)
            tensor = small(rank)
            group.allreduce(tensor).wait()
            expect(tensor, sum(small(r) for r in ranks), "a split group")
            group.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("hosts", [False, True])
def test_split_groups(workers: Callable[..., Any], store: str, hosts: bool) -> None:
    assert all(workers(split_groups, SIZE, store=store, hosts=hosts))


def everywhere(tensor: torch.Tensor, value: int) -> bool:
    """Piece by piece: a comparison of all would take the memory of several tensors."""
    return all(bool((piece == value).all()) for piece in tensor.split(2**26))


def more_than_two_gigabytes(store: str) -> bool:
    rank, _ = begin(store, 200.0)
    n = 2**31 + 5
    tensor = torch.full((n,), rank + 1, dtype=torch.uint8)
    tensor[-1] = 10 * rank + 7
    dist.all_reduce(tensor)
    assert everywhere(tensor[:-1], 3)
    assert tensor[-1] == 24
    tensor.fill_(rank + 1)
    dist.broadcast(tensor, 1)
    assert everywhere(tensor, 2)
    tensor.fill_(rank + 5)
    if rank == 0:
        tensor[-1] = 11
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        assert everywhere(tensor[:-1], 5)
        assert tensor[-1] == 11
    dist.destroy_process_group()
    return True


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_c36_tensors_over_two_gigabytes(workers: Callable[..., Any], store: str) -> None:
    assert all(workers(more_than_two_gigabytes, 2, store=store, limit=380.0))


def test_a_time_out_leaves_others_alone(workers: Callable[..., Any], store: str) -> None:
    assert all(workers(time_outs_of_pairs, SIZE, store=store))
