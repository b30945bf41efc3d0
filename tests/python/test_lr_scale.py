"""Policies against values worked out by hand."""

import math
from typing import Any

import pytest
import torch

import psplus
from psplus.lr_scale import constant, evaluate, inverse_staleness, progress_ratio, resolve


def staleness(observed: int = 0, workers: int = 4, rank: int = 0, **more: Any) -> psplus.Staleness:
    fields: dict[str, Any] = {
        "actual": -1,
        "step": 7,
        "step_vector": torch.arange(workers),
        "rates": (0.0,) * workers,
        **more,
    }
    return psplus.Staleness(observed=observed, rank=rank, num_workers=workers, **fields)


@pytest.mark.parametrize("observed", [0, 3, 1000])
def test_constant_is_one(observed: int) -> None:
    assert constant(staleness(observed)) == 1.0


@pytest.mark.parametrize(
    ("observed", "workers", "expected"),
    [(0, 4, 1.0), (2, 4, 1.0), (3, 4, 1.0), (4, 4, 0.75), (6, 4, 0.5), (300, 4, 0.01), (2, 2, 0.5)],
)
def test_inverse_staleness(observed: int, workers: int, expected: float) -> None:
    assert inverse_staleness(staleness(observed, workers)) == expected


def test_inverse_staleness_of_the_last_worker_is_not_zero() -> None:
    assert inverse_staleness(staleness(0, workers=1)) == 1.0
    assert inverse_staleness(staleness(4, workers=1)) == 0.25


@pytest.mark.parametrize(
    ("rank", "rates", "expected"),
    [
        (0, (2.0, 8.0, 4.0), 0.25),
        (1, (2.0, 8.0, 4.0), 1.0),
        (2, (2.0, 8.0, 4.0), 0.5),
        (0, (0.0, 8.0, 4.0), 1.0),  # its own rate is not known yet
        (0, (0.0, 0.0, 0.0), 1.0),
        (3, (2.0, 8.0, 4.0), 1.0),  # a late joiner that has no entry yet
    ],
)
def test_progress_ratio(rank: int, rates: tuple[float, ...], expected: float) -> None:
    assert progress_ratio(staleness(rank=rank, rates=rates)) == expected


def test_policies_go_by_name_and_callables_as_they_are() -> None:
    assert resolve("constant") is constant
    assert resolve("inverse_staleness") is inverse_staleness
    assert resolve("progress_ratio") is progress_ratio
    assert resolve(math.sqrt) is math.sqrt  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["asap", "Constant", 0.5, []])
def test_what_is_no_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(psplus.ConfigError, match=r"lr_scale.*'constant'|lr_scale must be"):
        resolve(wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, None, "much"])
def test_a_wrong_factor_is_refused_with_its_value(value: Any) -> None:
    def odd(_: psplus.Staleness) -> Any:
        return value

    with pytest.raises(psplus.ConfigError, match="policy odd returned") as error:
        evaluate(odd, staleness(rank=2))
    assert repr(value) in str(error.value)
    assert "step 7 on rank 2" in str(error.value)


@pytest.mark.parametrize("value", [0, 1, 0.25, torch.tensor(0.5)])
def test_any_finite_number_is_a_factor(value: Any) -> None:
    assert evaluate(lambda _: value, staleness()) == float(value)
