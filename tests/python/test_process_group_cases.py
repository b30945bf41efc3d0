"""What went wrong for users of other collectives; a test is named after its case."""

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from process_groups import begin
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers import start_worker, wait_workers

import psplus

pytestmark = pytest.mark.cluster

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


@pytest.fixture
def store(clean_job: Path) -> str:
    return str(clean_job / "store")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    optimizer: torch.optim.Optimizer, model: nn.Module, batches: list[torch.Tensor]
) -> list[torch.Tensor]:
    """A step a batch; losses are means over rows, so that DDP's mean is that of all rows."""
    for batch in batches:
        optimizer.zero_grad()
        model(batch).abs().square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def halves(store: str) -> dict[str, Any]:
    rank, size = begin(store)
    sums = {}
    for dtype in (torch.bfloat16, torch.float16):
        # One large value and small ones that are lost if each addition rounds to 16 bits.
        ours = torch.full((1000,), 256.0 if rank == 0 else 0.75, dtype=dtype)
        dist.all_reduce(ours)
        sums[str(dtype)] = ours
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    rows = torch.randn(10, size * 4, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    ddp = DistributedDataParallel(model)
    found = train(sgd(ddp), ddp, [batch[rank * 4 : rank * 4 + 4] for batch in rows])
    expected = train(sgd(reference), reference, list(rows.float()))
    dist.destroy_process_group()
    return {"sums": sums, "found": found, "expected": expected}


def test_c30_bf16_and_fp16(workers: Callable[..., Any], store: str) -> None:
    of_rank = workers(halves, 3, store=store)
    for found in of_rank:
        # 257.5 is between 256 and 258 in bfloat16, and exact in float16.
        assert (found["sums"]["torch.bfloat16"] == 258.0).all()
        assert (found["sums"]["torch.float16"] == 257.5).all()
        for ours, first, reference in zip(
            found["found"], of_rank[0]["found"], found["expected"], strict=True
        ):
            assert ours.dtype == torch.bfloat16
            assert torch.equal(ours, first)
            assert torch.allclose(ours.float(), reference, atol=0.02)


class Fourier(nn.Module):
    """A spectral layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(rows).narrow(1, 0, 5) @ self.weight


def complex_parameters(store: str) -> dict[str, Any]:
    rank, size = begin(store)
    ours = torch.complex(torch.arange(9.0) + rank, torch.arange(9.0) * (rank + 1))
    dist.all_reduce(ours)
    torch.manual_seed(0)
    model = Fourier()
    reference = copy.deepcopy(model)
    rows = torch.randn(10, size * 4, 8, generator=torch.Generator().manual_seed(1)) / 8
    ddp = DistributedDataParallel(model)
    found = train(sgd(ddp), ddp, [batch[rank * 4 : rank * 4 + 4] for batch in rows])
    expected = train(sgd(reference), reference, list(rows))
    dist.destroy_process_group()
    return {"sum": ours, "found": found, "expected": expected}


def test_c31_complex_parameters(workers: Callable[..., Any], store: str) -> None:
    for found in workers(complex_parameters, 2, store=store):
        assert torch.equal(
            found["sum"], torch.complex(2 * torch.arange(9.0) + 1, 3 * torch.arange(9.0))
        )
        (ours,), (reference,) = found["found"], found["expected"]
        assert ours.dtype == torch.complex64
        assert (ours - reference).abs().max() <= 1e-6 * reference.abs().max()


def every_dtype(store: str) -> bool:
    rank, size = begin(store)
    for dtype in DTYPES:
        values = torch.stack([torch.arange(100) + r for r in range(size)]).to(dtype)
        if dtype == torch.float64:
            values += 2.0**-40
            assert (values[0, 1] - 1).item() == 2.0**-40
        elif dtype == torch.int64:
            values += 2**62
        for root in range(size):
            tensor = values[rank].clone()
            dist.broadcast(tensor, src=root)
            assert torch.equal(tensor, values[root]), dtype
        gathered = [torch.zeros(100, dtype=dtype) for _ in range(size)]
        dist.all_gather(gathered, values[rank])
        assert torch.equal(torch.stack(gathered), values), dtype
    dist.destroy_process_group()
    return True


def test_c32_every_dtype_exact(workers: Callable[..., Any], store: str) -> None:
    assert workers(every_dtype, 3, store=store) == [True] * 3


def die_before_the_first_collective(store: str) -> tuple[str, float]:
    rank, _ = begin(store, seconds=2.0)
    group = dist.new_group([0, 1])
    if rank == 0:
        os._exit(86)
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(3), group=group)
    return str(caught.value), time.monotonic() - begun


def test_c64_peer_dead_before_the_first_collective(clean_job: Path, store: str) -> None:
    processes = [
        start_worker(die_before_the_first_collective, rank, 2, clean_job, "dead", store=store)
        for rank in range(2)
    ]
    ended = wait_workers(processes, clean_job, 30)
    assert ended[0].status == 86
    assert ended[1].status == 0, ended[1].stderr
    message, seconds = ended[1].result
    assert "rank 0" in message
    assert seconds < 4.0


def be_rank(rank: int, size: int, store: str, marks: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    begin(store)
    ours = torch.full((10,), float(rank + 1))
    dist.all_reduce(ours)
    assert (ours == 3.0).all()
    model = nn.Linear(3, 2)
    optimizer = psplus.wrap(sgd(model), "bsp", model=model)
    train(optimizer, model, [torch.randn(4, 3)] * 3)
    optimizer.close()
    dist.destroy_process_group()
    (Path(marks) / f"{rank}").touch()


def train_then_fork(store: str, marks: str) -> bool:
    """A model trained in the parent, whose threads forked children do not have."""
    torch.set_num_threads(2)
    model = nn.Linear(64, 64)
    train(sgd(model), model, [torch.randn(512, 64)] * 3)
    mp.start_processes(be_rank, (2, store, marks), nprocs=2, start_method="fork")
    return True


def test_c69_fork_after_training_in_the_parent(
    workers: Callable[..., Any], clean_job: Path, store: str
) -> None:
    assert workers(train_then_fork, 1, store=store, marks=str(clean_job)) == [True]
    assert (clean_job / "0").exists()
    assert (clean_job / "1").exists()
