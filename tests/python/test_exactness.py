"""What each scheme computes, against the plain optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import OPTIMIZERS, bsp_reference, gradients_at, make_model, values_of

import psplus

STEPS = 20
Workers = Callable[..., list[Any]]


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        difference = (found[name].double() - value.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{name}: off by {difference} of {scale}"


def train_bsp(names: list[str]) -> dict[str, Any]:
    """One wrapper after the other in the same worker; each is a stream of its own."""
    results = {}
    for name in names:
        model = make_model()
        optimizer = psplus.wrap(OPTIMIZERS[name](list(model.parameters())), "bsp", model=model)
        rank = psplus.config.read().rank
        for step in range(STEPS):
            gradients_at(model, rank, step)
            optimizer.step()
        assert optimizer.step_vector.tolist() == [STEPS] * psplus.config.read().world_size
        results[name] = values_of(model)
        optimizer.close()
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_bsp_is_the_plain_optimizer_on_mean_deltas(workers: Workers, world_size: int) -> None:
    names = ["SGD", "AdamW", "Adagrad", "RMSprop"]
    first = workers(train_bsp, world_size, names=names)
    second = workers(train_bsp, world_size, names=names)
    for name in names:
        expected = bsp_reference(OPTIMIZERS[name], world_size, STEPS)
        for of_rank, again in zip(first, second, strict=True):
            assert_close(of_rank[name], expected, 1e-6)
            for parameter, value in of_rank[name].items():  # bit for bit, on all ranks and twice
                assert torch.equal(value, first[0][name][parameter])
                assert torch.equal(value, again[name][parameter])


def train_alone_through_a_server(names: list[str], pull: str) -> dict[str, Any]:
    results = {}
    session = psplus.connect(server="always")
    for name in names:
        model = make_model()
        optimizer = psplus.wrap(
            OPTIMIZERS[name](list(model.parameters())),
            "ps+",
            named_parameters=model.named_parameters(),
            session=session,
            pull=pull,
        )
        for step in range(STEPS):
            gradients_at(model, 0, step)
            optimizer.step()
        optimizer.synchronize()
        results[name] = values_of(model)
        optimizer.close()
    session.close()
    return results


@pytest.mark.parametrize("pull", ["mapped", "buffered"])
def test_one_worker_through_a_server_is_the_plain_optimizer(workers: Workers, pull: str) -> None:
    (found,) = workers(train_alone_through_a_server, 1, names=list(OPTIMIZERS), pull=pull)
    for name, make in OPTIMIZERS.items():
        model = make_model()
        optimizer = make(list(model.parameters()))
        for step in range(STEPS):
            gradients_at(model, 0, step)
            optimizer.step()
        assert_close(found[name], values_of(model), 1e-6)


def train_dtype(dtype: str) -> dict[str, Any]:
    kind: torch.dtype = getattr(torch, dtype)
    model = make_model(dtype=kind)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.05), "bsp", model=model)
    rank = psplus.config.read().rank
    for step in range(STEPS):
        gradients_at(model, rank, step)
        optimizer.step()
    optimizer.close()
    return values_of(model)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-7), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
def test_dtypes_follow_a_float64_reference(workers: Workers, dtype: str, tolerance: float) -> None:
    """float64 is not rounded to float32 anywhere; 16-bit ones stay within their own rounding."""
    found = workers(train_dtype, 2, dtype=dtype)
    models = [make_model(dtype=torch.float64) for _ in range(2)]
    if dtype != "float64":  # the same starting point, rounded as the model's
        for model in models:
            model.to(getattr(torch, dtype)).to(torch.float64)
    for step in range(STEPS):
        before = values_of(models[0])
        for rank, model in enumerate(models):
            gradients_at(model, rank, step)
        with torch.no_grad():
            for model in models:
                for name, p in model.named_parameters():
                    grads = [dict(m.named_parameters())[name].grad for m in models]
                    p.copy_(before[name] - 0.05 * torch.stack(grads).mean(0))
    for of_rank in found:
        assert all(value.dtype == getattr(torch, dtype) for value in of_rank.values())
        assert_close(of_rank, values_of(models[0]), tolerance)
