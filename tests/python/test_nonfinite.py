"""Gradients that are not finite are found however they came, and none that is finite."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import values_of
from torch import nn

import psplus
from psplus.optim.names import NamedParameter
from psplus.optim.nonfinite import GradientCheck

Workers = Callable[..., list[Any]]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def checked(*parameters: nn.Parameter) -> GradientCheck:
    return GradientCheck([NamedParameter(f"p{i}", p, 0) for i, p in enumerate(parameters)])


def parameter(dtype: torch.dtype = torch.float32, size: int = 1000) -> nn.Parameter:
    return nn.Parameter(torch.ones(size, dtype=dtype))


def backward(p: nn.Parameter, scale: float, at: int = 0) -> None:
    factor = torch.ones_like(p.detach())
    factor[at] = scale
    loss = (p * factor).sum()
    (loss.real if loss.is_complex() else loss).backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_found_after_a_backward_pass(dtype: torch.dtype, bad: float) -> None:
    good, other = parameter(dtype), parameter(dtype, 17)
    check = checked(good, other)
    assert check.first_bad() is None  # no gradient yet
    backward(good, 3.0)
    backward(other, bad, at=16)
    assert check.first_bad() == "p1"
    other.grad = None
    assert check.first_bad() is None
    backward(other, 2.0)
    assert check.first_bad() is None


def test_found_when_accumulated_or_written_by_hand() -> None:
    p = parameter()
    check = checked(p)
    for _ in range(3):
        backward(p, 1.0)
    assert check.first_bad() is None
    backward(p, float("inf"))
    backward(p, -float("inf"))  # inf - inf
    assert check.first_bad() == "p0"
    p.grad.zero_()  # moves the version counter
    assert check.first_bad() is None
    p.grad[5] = float("nan")
    assert check.first_bad() == "p0"
    p.grad = torch.ones_like(p)
    assert check.first_bad() is None
    p.grad = torch.full_like(p, float("nan"))
    assert check.first_bad() == "p0"
    p.grad.data.nan_to_num_()  # moves no counter: what was bad is looked at again
    assert check.first_bad() is None


def test_a_new_gradient_at_an_old_address_is_looked_at() -> None:
    p = parameter(size=64)
    check = checked(p)
    for turn in range(200):  # memory is handed out again and again
        p.grad = None
        p.grad = torch.full_like(p, float("nan") if turn % 2 else 1.0)
        assert check.first_bad() == ("p0" if turn % 2 else None)


def test_odd_gradients() -> None:
    transposed = nn.Parameter(torch.ones(4, 5))
    transposed.grad = torch.ones(5, 4).t()
    strided = nn.Parameter(torch.ones(4))
    strided.grad = torch.ones(8)[::2]
    sparse = nn.Embedding(10, 3, sparse=True)
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    check = checked(transposed, strided, sparse.weight, frozen)
    sparse(torch.tensor([1, 1, 4])).sum().backward()
    assert check.first_bad() is None
    sparse.weight.grad._values()[1, 2] = float("nan")
    assert check.first_bad() == "p2"
    sparse.weight.grad = None
    strided.grad[3] = float("inf")
    assert check.first_bad() == "p1"
    transposed.grad[3, 4] = float("nan")
    assert check.first_bad() == "p0"


def test_stopped_copied_and_pickled() -> None:
    p = parameter()
    check = checked(p)
    twin = pickle.loads(pickle.dumps(check))
    other = copy.deepcopy(check)
    check.stop()
    check.stop()
    backward(p, float("nan"))
    assert check.first_bad() is None  # it looks no more
    assert twin.first_bad() is None  # it has a parameter of its own
    assert other.first_bad() is None


def test_a_model_outlives_its_check() -> None:
    p = parameter()
    check = checked(p)
    backward(p, 1.0)
    del check
    backward(p, 1.0)
    assert p.grad[1].item() == 2.0


def overflow(momentum: float, scheme: str) -> dict[str, Any]:
    """Finite gradients, an update that is not: nothing of it reaches the server or stays."""
    session = psplus.connect(server="always")
    p = nn.Parameter(torch.ones(100))
    optimizer = psplus.wrap(
        torch.optim.SGD([p], lr=1e30, momentum=momentum), scheme, session=session
    )
    p.grad = torch.full_like(p, 1e20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.state.clear()
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.synchronize()
    found = {"value": p.detach().clone(), "warned": [str(w.message) for w in caught]}
    found["skipped"] = optimizer.stats.skipped_steps
    session.close()
    return found


@pytest.mark.parametrize("scheme", ["ps+", "asp"])
def test_an_update_that_overflows_is_not_pushed(workers: Workers, scheme: str) -> None:
    (found,) = workers(overflow, 1, momentum=0.9, scheme=scheme)
    assert found["skipped"] == 1
    assert "update of parameter '0.0'" in found["warned"][0]
    assert torch.equal(found["value"], torch.full((100,), 0.5))


def scale_into_infinity(scheme: str, make: str) -> dict[str, Any]:
    """Rank 0 alone; the factor of the second step makes infinities of updates that are finite."""
    model = nn.Linear(3, 2)
    plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if make == "generic":
        plain = torch.optim.RMSprop(model.parameters(), lr=1.0)
    factors = iter([1.0, 1e39, 1.0])
    optimizer = psplus.wrap(
        plain,
        scheme,
        model=model,
        session=psplus.connect(server="always"),
        lr_scale=lambda _: next(factors),
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = values_of(model)
    with pytest.warns(RuntimeWarning, match=r"'weight' times lr_scale 1e\+39 is not finite"):
        optimizer.step()
    found = {"skipped": optimizer.stats.skipped_steps, "unchanged": values_of(model)}
    optimizer.pull()
    found["pulled"] = values_of(model)
    optimizer.step()
    found["finite"] = all(p.isfinite().all() for p in model.parameters())
    return {**found, "before": before}


@pytest.mark.parametrize("make", ["fused", "generic"])
@pytest.mark.parametrize("scheme", ["ps+", "asp"])
def test_a_factor_that_makes_infinities_skips_the_step(
    workers: Workers, scheme: str, make: str
) -> None:
    (found,) = workers(scale_into_infinity, 1, scheme=scheme, make=make)
    assert found["skipped"] == 1
    assert found["finite"]
    for name, value in found["before"].items():
        assert torch.equal(found["unchanged"][name], value)
        assert torch.equal(found["pulled"][name], value)


def push_into_infinity(server: str) -> None:
    with psplus.KVStore(session=psplus.connect(server=server)) as kv:
        value = kv.dense("w", torch.zeros(4))
        with pytest.raises(psplus.Error, match=r"infinity when scaled by 1e\+30, so nothing"):
            value.push(torch.full((4,), 1e20), scale=1e30)
        value.push(torch.full((4,), 2.0), scale=3.0)
        assert torch.equal(value.pull(), torch.full((4,), 6.0))


@pytest.mark.parametrize("server", ["always", "auto"])
def test_a_scale_that_makes_infinities_pushes_nothing(workers: Workers, server: str) -> None:
    workers(push_into_infinity, 1, server=server)
