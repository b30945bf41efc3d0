"""Buffers: the mean over all workers where workers meet, each worker's own in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psplus

Workers = Callable[..., list[Any]]
STEPS = 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * rank + step)) + rank


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def share(scheme: str, steps: list[int]) -> dict[str, Any]:
    """``steps[rank]`` steps at a learning rate of zero: only buffers move."""
    rank = psplus.config.read().rank
    model = make_model()
    if rank == 1:
        model[1].running_mean.fill_(77.0)  # rank 0's values count
        model.mask.fill_(True)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.0), scheme, model=model)
    optimizer.synchronize()  # nobody has moved them yet
    found = {"start": buffers_of(model)}
    for step in range(steps[rank]):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()
        model.scratch.fill_(rank)
    found["own"] = buffers_of(model)
    optimizer.synchronize()
    found["shared"] = buffers_of(model)
    optimizer.synchronize()
    found["again"] = buffers_of(model)
    with torch.no_grad():
        model(batch(rank, 50))
    moved = buffers_of(model)
    optimizer.zero_grad()
    model(batch(rank, 51)).sum().backward()
    moved = buffers_of(model)
    optimizer.step()
    optimizer.synchronize()
    found["moved"], found["later"] = moved, buffers_of(model)
    with optimizer.evaluation():
        found["evaluation"] = buffers_of(model)
        model[1].running_mean.fill_(-1.0)
    found["after"] = buffers_of(model)
    optimizer.close()
    return found


def mean_of(found: list[dict[str, Any]], when: str, name: str) -> torch.Tensor:
    return torch.stack([f[when][name] for f in found]).mean(0)


@pytest.mark.parametrize(
    ("scheme", "steps"),
    [("ps+", [STEPS] * 3), ("ps+", [2, 0, STEPS]), ("asp", [STEPS] * 2), ("bsp", [STEPS] * 3)],
)
def test_workers_meet_at_the_mean(workers: Workers, scheme: str, steps: list[int]) -> None:
    found = workers(share, len(steps), scheme=scheme, steps=steps)
    start = buffers_of(make_model())
    for of_rank in found:
        for name, value in start.items():
            assert torch.equal(of_rank["start"][name], value)
    for name in ("1.running_mean", "1.running_var"):
        for when, then in (("own", "shared"), ("moved", "later")):
            expected = mean_of(found, when, name)
            for of_rank in found:
                torch.testing.assert_close(of_rank[then][name], expected, rtol=1e-5, atol=1e-6)
                assert torch.equal(of_rank[then][name], found[0][then][name])
        for of_rank in found:
            assert torch.equal(of_rank["again"][name], of_rank["shared"][name])
            assert torch.equal(of_rank["evaluation"][name], of_rank["later"][name])
            assert torch.equal(of_rank["after"][name], of_rank["later"][name])
    for rank, of_rank in enumerate(found):
        counted = of_rank["shared"]["1.num_batches_tracked"]
        assert counted.item() == steps[0]  # rank 0's
        assert counted.dtype == torch.int64
        assert torch.equal(of_rank["shared"]["mask"], start["mask"])
        own = float(rank) if steps[rank] else 0.0  # not in the state dict: nobody else's affair
        assert torch.equal(of_rank["shared"]["scratch"], torch.full((2,), own))


def evaluate_alone() -> dict[str, Any]:
    """Rank 0 evaluates while rank 1 waits elsewhere: both have pushed their buffers."""
    rank = psplus.config.read().rank
    model = make_model()
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.0), "bsp", model=model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()
    own = buffers_of(model)
    found: dict[str, Any] = {"own": own}
    if rank == 0:
        with optimizer.evaluation():
            found["evaluation"] = buffers_of(model)
        assert all(torch.equal(own[name], b) for name, b in buffers_of(model).items())
    optimizer.synchronize()
    if rank == 0:
        model[1].running_mean.fill_(5.0)
        optimizer.publish()
    optimizer.synchronize()
    found["published"] = buffers_of(model)
    optimizer.close()
    return found


def test_evaluation_and_publish(workers: Workers) -> None:
    found = workers(evaluate_alone, 2)
    expected = mean_of(found, "own", "1.running_var")
    torch.testing.assert_close(
        found[0]["evaluation"]["1.running_var"], expected, rtol=1e-5, atol=1e-6
    )
    for of_rank in found:
        assert torch.equal(of_rank["published"]["1.running_mean"], torch.full((4,), 5.0))


def share_unevenly(steps: list[int]) -> dict[str, torch.Tensor]:
    """What buffers are after ``steps[rank]`` steps and twice as many, with a meeting in between."""
    rank = psplus.config.read().rank
    model = make_model()
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.0), "bsp", model=model)
    for _ in range(2):
        for step in range(steps[rank]):
            optimizer.zero_grad()
            model(batch(rank, step)).sum().backward()
            optimizer.step()
        optimizer.synchronize()
    shared = buffers_of(model)
    optimizer.close()
    return shared


@pytest.mark.parametrize("steps", [[2, 8], [3, 2], [1, 0, 4]])
def test_bsp_moves_buffers_by_the_mean_of_those_that_step(
    workers: Workers, steps: list[int]
) -> None:
    found = workers(share_unevenly, len(steps), steps=steps)
    models = [make_model() for _ in steps]
    shared = models[0][1].running_mean.double()
    for _ in range(2):
        for model in models:
            model[1].running_mean.copy_(shared)
        for step in range(max(steps)):
            moved = []
            for rank, model in enumerate(models):
                if step < steps[rank]:
                    before = model[1].running_mean.double()
                    model(batch(rank, step))
                    moved.append(model[1].running_mean.double() - before)
            shared = shared + torch.stack(moved).mean(0)
    for of_rank in found:
        torch.testing.assert_close(of_rank["1.running_mean"], shared.float(), rtol=1e-5, atol=1e-6)
