"""What trains on top of the process group "psplus": DDP, FSDP2, DTensor, compiled steps."""

import shutil
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from process_groups import begin
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.cluster

STEPS = 4


@pytest.fixture
def store(clean_job: Path) -> str:
    return str(clean_job / "store")


class Net(nn.Module):
    """Takes its second branch only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 40)
        self.second = nn.Linear(8, 40)
        self.last = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        hidden = self.first(x)
        if both:
            hidden = hidden + self.second(x)
        return self.last(hidden.tanh())


def make_net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def batches(size: int) -> torch.Tensor:
    return torch.randn(STEPS, size, 6, 8, dtype=torch.float64, generator=torch.manual_seed(2))


def descend(net: nn.Module, data: torch.Tensor, **call: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        net(batch, **call).square().mean().backward()
        optimizer.step()


def alone(size: int, **call: Any) -> list[torch.Tensor]:
    """The weights that one process reaches with everybody's data."""
    net = make_net()
    descend(net, batches(size).flatten(1, 2), **call)
    return [p.detach() for p in net.parameters()]


def agree(net: nn.Module, expected: list[torch.Tensor], tolerance: float = 1e-9) -> None:
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=tolerance, atol=tolerance)


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(make_net(), bucket_cap_mb=0.001, **options)


def ddp_in_every_way(store: str) -> bool:
    warnings.simplefilter("ignore")  # torch's advice on unused parameters
    rank, size = begin(store)
    own, whole = batches(size)[:, rank], alone(size)
    for options in (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        net = wrapped(**options)
        descend(net, own)
        agree(net, whole)
    net = wrapped(find_unused_parameters=True)
    descend(net, own, both=False)
    agree(net, alone(size, both=False))

    for hook, tolerance in [
        (default_hooks.allreduce_hook, 1e-9),
        (default_hooks.fp16_compress_hook, 2e-3),
        (average_by_a_chain, 1e-9),
    ]:
        # The chain's collectives come in the same order everywhere only if there is one bucket.
        net = wrapped() if hook is not average_by_a_chain else DistributedDataParallel(make_net())
        net.register_comm_hook(None, hook)
        descend(net, own)
        agree(net, whole, tolerance)

    net = wrapped()  # two batches for each exchange
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reference = make_net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for first, second in ((0, 1), (2, 3)):
        optimizer.zero_grad()
        with net.no_sync():
            net(own[first]).square().mean().backward()
        net(own[second]).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        for turn in (first, second):
            reference(batches(size)[turn].flatten(0, 1)).square().mean().backward()
        plain.step()
    agree(net, [p.detach() for p in reference.parameters()])

    net = wrapped()  # ranks with unequal numbers of batches
    with Join([net], divide_by_initial_world_size=False):
        for batch in own[: STEPS - rank]:
            net.zero_grad()
            net(batch).square().mean().backward()
    dist.barrier()
    dist.destroy_process_group()
    return True


def average_by_a_chain(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook whose callback itself communicates."""
    size = dist.get_world_size()
    whole = bucket.buffer()
    part = torch.zeros(-(-whole.numel() // size), dtype=whole.dtype)
    padded = torch.cat([whole, whole.new_zeros(part.numel() * size - whole.numel())])
    work = dist.reduce_scatter_single(part, padded, dist.ReduceOp.AVG, async_op=True)

    def collect(_: Any) -> torch.Tensor:
        dist.all_gather_single(padded, part, async_op=True).wait()
        return whole.copy_(padded[: whole.numel()])

    return work.get_future().then(collect)


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_ddp_with_its_options(workers: Callable[..., Any], store: str, debug: str) -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": debug}
    assert all(workers(ddp_in_every_way, 2, store=store, environment=environment))


def sharded_training(store: str) -> bool:
    rank, size = begin(store)
    whole = alone(size)
    own = batches(size)[:, rank]
    flat = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for mesh in (flat, square):  # FSDP, HSDP
        net = make_net()
        for layer in (net.first, net.second, net.last, net):
            fully_shard(layer, mesh=mesh)
        descend(net, own)
        for ours, theirs in zip(net.parameters(), whole, strict=True):
            torch.testing.assert_close(ours.full_tensor().detach(), theirs)

    full = torch.arange(7 * 12, dtype=torch.float64).view(7, 12)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        tensor = distribute_tensor(full, flat, placements)
        torch.testing.assert_close(tensor.full_tensor(), full)
        torch.testing.assert_close(tensor.redistribute(flat, [Shard(1)]).full_tensor(), full)
        product = tensor @ distribute_tensor(full.t().contiguous(), flat, [Shard(0)])
        torch.testing.assert_close(product.full_tensor(), full @ full.t())
    grid = distribute_tensor(full, square, [Shard(0), Shard(1)])
    torch.testing.assert_close(grid.sum().full_tensor(), full.sum())
    dist.destroy_process_group()
    return True


def test_fsdp_hsdp_and_dtensor(workers: Callable[..., Any], store: str) -> None:
    assert all(workers(sharded_training, 4, store=store, limit=100.0))


def functional_collectives(store: str) -> bool:
    rank, size = begin(store)
    group = dist.group.WORLD
    own = torch.arange(6.0) + 10 * rank
    everybody = [torch.arange(6.0) + 10 * r for r in range(size)]
    total = sum(everybody)

    def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(functional.wait_tensor(actual), expected), (actual, expected)

    same(functional.all_reduce(own, "sum", group), total)
    same(functional.all_reduce(own, "avg", group), total / size)
    same(functional.all_gather_tensor(own, 0, group), torch.cat(everybody))
    same(functional.all_gather_tensor(own > 12, 0, group), torch.cat(everybody) > 12)
    same(functional.reduce_scatter_tensor(own, "sum", 0, group), total.chunk(size)[rank])
    same(functional.broadcast(own, 1, group), everybody[1])
    exchanged = functional.all_to_all_single(own, None, None, group)
    same(exchanged, torch.cat([e.chunk(size)[rank] for e in everybody]))
    for result, expected in zip(
        functional.all_reduce_coalesced([own, own[:2].clone()], "max", group),
        [everybody[-1], everybody[-1][:2]],
        strict=True,
    ):
        same(result, expected)
    for result in functional.all_gather_into_tensor_coalesced([own, own], group):
        same(result, torch.cat(everybody))
    for result in functional.reduce_scatter_tensor_coalesced([own, own], "sum", [0, 0], group):
        same(result, total.chunk(size)[rank])
    dist.destroy_process_group()
    return True


def test_functional_collectives(workers: Callable[..., Any], store: str) -> None:
    assert all(workers(functional_collectives, 2, store=store))


def compiled_step(store: str) -> bool:
    rank, size = begin(store)
    whole = alone(size)
    net = make_net()

    @torch.compile(fullgraph=True)
    def loss_and_mean(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = net(batch).square().mean()
        return loss, functional.all_reduce(loss.detach(), "avg", dist.group.WORLD)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches(size):
        optimizer.zero_grad()
        loss, mean = loss_and_mean(batch[rank])
        expected = torch.stack([net(b).square().mean().detach() for b in batch]).mean()
        torch.testing.assert_close(mean, expected)
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
    agree(net, whole)

    ddp = torch.compile(DistributedDataParallel(make_net()))
    descend(ddp, batches(size)[:, rank])
    agree(ddp, whole)
    dist.destroy_process_group()
    return True


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on the CPU")
@pytest.mark.timeout(300)
def test_compiled_steps(workers: Callable[..., Any], store: str, clean_job: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(clean_job), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    assert all(workers(compiled_step, 2, store=store, environment=environment, limit=280.0))


def objects_and_barriers(store: str) -> bool:
    rank, size = begin(store)
    after, before = (rank + 1) % size, (rank - 1) % size
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * (1000 * rank)})
    assert every == [{"rank": r, "text": "x" * (1000 * r)} for r in range(size)]
    found: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(("from", rank), found, dst=1)
    assert found is None or found == [("from", r) for r in range(size)]
    words = [f"rank {rank}", {rank}, None]
    dist.broadcast_object_list(words, src=1)
    assert words == ["rank 1", {1}, None]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"to {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"to {rank}"]
    if rank == 0:
        dist.send_object_list(["over", 2], dst=1)
    elif rank == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == ["over", 2]
    tensors = [torch.full((n,), float(rank)) for n in (1, 70_000, 5)]
    outs = [torch.zeros_like(t) for t in tensors]
    operations = [dist.P2POp(dist.isend, t, after) for t in tensors]
    operations += [dist.P2POp(dist.irecv, t, before) for t in outs]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert all((t == before).all() for t in outs)
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Rr]anks? .*[1-9].* failed to pass"):
            group.monitored_barrier(timedelta(seconds=0.3))
    dist.barrier()
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_objects_batches_and_monitored_barriers(
    workers: Callable[..., Any], store: str, debug: str
) -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": debug}
    assert all(workers(objects_and_barriers, 3, store=store, environment=environment))
