"""Fused steps: what the plain optimizer computes, on the plain optimizer's own state."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import gradients_at, make_model, values_of
from typing_extensions import Self

import psplus
from psplus.optim.fused import FusedOptimizer

STEPS = 12
Workers = Callable[..., list[Any]]
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

# Every branch of the kernels and of what feeds them.
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd_decay_maximize": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "tensor_lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_amsgrad_decay": lambda p: torch.optim.Adam(
        p, lr=0.01, amsgrad=True, weight_decay=0.1, betas=(0.8, 0.99)
    ),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw_maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "adamw_groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "lr": 0.02, "weight_decay": 0.0}, {"params": p[1:]}], lr=0.01
    ),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5
    ),
}


class Counted:
    """Counts the steps that went the fused way."""

    def __init__(self) -> None:
        self.fused = 0
        self._prepare = FusedOptimizer.prepare

    def __enter__(self) -> Self:
        prepare = self._prepare

        def counting(optimizer: FusedOptimizer) -> Any:
            step = prepare(optimizer)
            self.fused += step is not None
            return step

        FusedOptimizer.prepare = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        FusedOptimizer.prepare = self._prepare  # type: ignore[method-assign]


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state_dict()["state"][i] for i in sorted(optimizer.state_dict()["state"])]


def missing(step: int) -> str:
    """A parameter without a gradient at this step, if there is one."""
    return "2.bias" if step in (0, 4) else ""


def train(make: Make, dtype: torch.dtype, steps: int, **wrap: Any) -> dict[str, Any]:
    model = make_model(dtype=dtype)
    plain = make(list(model.parameters()))
    optimizer = psplus.wrap(plain, model=model, **wrap) if wrap else plain
    versions = [p._version for p in model.parameters()]
    for step in range(steps):
        gradients_at(model, 0, step)
        if name := missing(step):
            dict(model.named_parameters())[name].grad = None
        optimizer.step()
    grown = [p._version > v for p, v in zip(model.parameters(), versions, strict=True)]
    if isinstance(optimizer, psplus.DistributedOptimizer):
        optimizer.synchronize()
        optimizer.close()
    return {"values": values_of(model), "states": states_of(plain), "grown": grown}


def train_all(dtype: str, scheme: str) -> dict[str, Any]:
    session = psplus.connect(server="always")
    results = {}
    with Counted() as counted:
        for name, make in OPTIMIZERS.items():
            results[name] = train(
                make, getattr(torch, dtype), STEPS, scheme=scheme, session=session
            )
    session.close()
    return {"results": results, "fused": counted.fused}


@pytest.mark.parametrize("scheme", ["ps+", "asp", "bsp"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13), ("bfloat16", 2e-2)]
)
def test_one_worker_is_the_plain_optimizer(
    workers: Workers, dtype: str, tolerance: float, scheme: str
) -> None:
    (found,) = workers(train_all, 1, dtype=dtype, scheme=scheme)
    assert found["fused"] == STEPS * len(OPTIMIZERS)
    for name, make in OPTIMIZERS.items():
        expected = train(make, getattr(torch, dtype), STEPS)
        for parameter, value in expected["values"].items():
            torch.testing.assert_close(
                found["results"][name]["values"][parameter],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name, parameter=parameter: f"{name}, {parameter}: {text}",
            )
        states = found["results"][name]["states"]
        assert [s.keys() for s in states] == [s.keys() for s in expected["states"]]
        for mine, theirs in zip(states, expected["states"], strict=True):
            for key, value in theirs.items():
                assert mine[key].dtype == value.dtype
                torch.testing.assert_close(mine[key], value, rtol=10 * tolerance, atol=tolerance)
        assert all(found["results"][name]["grown"])


class Watched(torch.optim.SGD):
    """A subclass may compute anything."""


def go_the_generic_way() -> dict[str, Any]:
    session = psplus.connect(server="always")
    calls = {"hook": 0}

    def count(*_: Any) -> None:
        calls["hook"] += 1

    def hooked(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(p, lr=0.05)
        optimizer.register_step_post_hook(count)
        return optimizer

    found: dict[str, Any] = {}
    for name, make in {
        "hook": hooked,
        "subclass": lambda p: Watched(p, lr=0.05),
        "differentiable": lambda p: torch.optim.SGD(p, lr=0.05, differentiable=False),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    }.items():
        with Counted() as counted:
            train(make, torch.float32, 3, scheme="ps+", session=session)
            found[name] = counted.fused
    session.close()
    return {**found, "calls": calls["hook"]}


def test_what_the_kernels_do_not_know_goes_the_generic_way(workers: Workers) -> None:
    (found,) = workers(go_the_generic_way, 1)
    assert found == {"hook": 0, "subclass": 0, "differentiable": 3, "rmsprop": 0, "calls": 3}


def mix_ways() -> dict[str, Any]:
    """Both ways in turns on one optimizer: a gradient that is not contiguous goes the generic."""
    session = psplus.connect(server="always")
    results = {}
    for name in ("momentum", "adam_amsgrad_decay", "adagrad"):
        model = make_model()
        plain = OPTIMIZERS[name](list(model.parameters()))
        optimizer = psplus.wrap(plain, "ps+", model=model, session=session)
        with Counted() as counted:
            for step in range(STEPS):
                gradients_at(model, 0, step)
                if step % 2:
                    weight = model[0].weight
                    weight.grad = weight.grad.t().contiguous().t()
                optimizer.step()
        optimizer.synchronize()
        results[name] = {"values": values_of(model), "fused": counted.fused}
        optimizer.close()
    session.close()
    return results


def test_both_ways_share_one_state(workers: Workers) -> None:
    (found,) = workers(mix_ways, 1)
    for name, result in found.items():
        assert result["fused"] == STEPS // 2
        model = make_model()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        for step in range(STEPS):
            gradients_at(model, 0, step)
            optimizer.step()
        for parameter, value in values_of(model).items():
            torch.testing.assert_close(
                result["values"][parameter], value, rtol=2e-6, atol=2e-6, msg=f"{name} {parameter}"
            )


def schedule_and_close_over() -> dict[str, Any]:
    """Schedulers made before and after wrapping both act, and a closure runs once a step."""
    session = psplus.connect(server="always")
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = psplus.wrap(plain, "ps+", model=model, session=session)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []

    def closure() -> float:
        gradients_at(model, 0, 0)
        losses.append(1.0)
        return 7.5

    with Counted() as counted, warnings.catch_warnings():
        warnings.simplefilter("error")
        returned = optimizer.step(closure)
        start = values_of(model)["0.weight"]
        before.step()
        after.step()
        optimizer.step(closure)
    moved = (start - values_of(model)["0.weight"]).norm().item()
    optimizer.close()
    session.close()
    grad = model[0].weight.grad.norm().item()
    return {"returned": returned, "calls": len(losses), "fused": counted.fused, "lr": moved / grad}


def test_schedulers_and_closures(workers: Workers) -> None:
    (found,) = workers(schedule_and_close_over, 1)
    assert found["returned"] == 7.5
    assert found["calls"] == 2
    assert found["fused"] == 2
    assert found["lr"] == pytest.approx(0.1 * 0.5 * 0.5, rel=1e-4)


def change_the_dtype_behind_its_back() -> str:
    session = psplus.connect(server="always")
    model = make_model()
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1),
        "ps+",
        model=model,
        session=session,
        outside_writes="ignore",
    )
    model.double()
    gradients_at(model, 0, 0)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    finally:
        session.close()
    return "nothing was raised"


def test_a_parameter_keeps_its_dtype(workers: Workers) -> None:
    (message,) = workers(change_the_dtype_behind_its_back, 1)
    assert "0.weight" in message
    assert "float32" in message
    assert "float64" in message


def add_integers(scheme: str, pull: str) -> dict[str, Any]:
    """Updates are integers, multiples of the number of workers: every sum is exact."""
    rank = psplus.config.read().rank
    parameter = torch.nn.Parameter(torch.zeros(3_000_000))  # past the caches
    ends: list[torch.Tensor] = []
    optimizer = psplus.wrap(
        torch.optim.SGD([parameter], lr=2.0), scheme, lr_scale="constant", pull=pull
    )
    with Counted() as counted:
        for _ in range(INTEGER_STEPS):
            parameter.grad = torch.full_like(parameter, float(rank + 1))
            optimizer.step()
            ends.append(parameter.detach()[[0, 1_500_000, -1]])
    optimizer.synchronize()
    value = parameter.detach()
    found = {
        "same": bool((value == value[0]).all()),
        "value": value[0].item(),
        "fused": counted.fused,
        "whole": all(float(e) == int(e) for end in ends for e in end),
    }
    optimizer.close()
    return found


INTEGER_STEPS = 60


@pytest.mark.parametrize(
    ("scheme", "pull"), [("ps+", "mapped"), ("ps+", "buffered"), ("asp", "mapped")]
)
def test_two_workers_lose_nothing(workers: Workers, scheme: str, pull: str) -> None:
    for found in workers(add_integers, 2, scheme=scheme, pull=pull):
        assert found["fused"] == INTEGER_STEPS
        assert found["whole"]
        assert found["same"]
        assert found["value"] == -INTEGER_STEPS * (1.0 + 2.0)
