"""Schemes: options, the order of events in a step, and what they compute over a real server."""

import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import psplus
from psplus.schemes import ASP, BSP, SSP, PSPlus, Scheme
from psplus.schemes.resolve import resolve

Workers = Callable[..., list[Any]]
NO_OPTIONS: dict[str, Any] = {"staleness_bound": None, "lr_scale": None, "local_scale": None}


def resolved(scheme: Any, **options: Any) -> Scheme:
    return resolve(scheme, **{**NO_OPTIONS, **options})


def test_names_and_options() -> None:
    assert resolved("bsp") == BSP()
    assert resolved("asp") == ASP(lr_scale="constant")
    assert resolved("ssp", staleness_bound=3) == SSP(3)
    assert resolved("ps+") == PSPlus("inverse_staleness", local_scale=1.0, staleness_bound=None)
    options = {"staleness_bound": 2, "lr_scale": "progress_ratio", "local_scale": 0.0}
    assert resolved("ps+", **options) == PSPlus("progress_ratio", 0.0, 2)
    assert resolved(ASP("progress_ratio")).policy is psplus.lr_scale.progress_ratio


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("hpsgd", {}, "'hpsgd' is not in this version, which has 'bsp', 'ssp', 'asp', 'ps\\+'"),
        ("local-sgd", {}, "'local-sgd' is not in this version"),
        ("PS+", {}, "'PS\\+' is not in this version"),
        ("ssp", {}, "needs staleness_bound"),
        ("ssp", {"staleness_bound": -1}, "staleness_bound must be .* got -1"),
        ("ssp", {"staleness_bound": 1.5}, "staleness_bound must be .* got 1.5"),
        ("ssp", {"staleness_bound": 1, "local_scale": 1.0}, "'ssp' takes no local_scale"),
        ("bsp", {"lr_scale": "constant"}, "'bsp' takes no lr_scale"),
        ("bsp", {"staleness_bound": 1}, "'bsp' takes no staleness_bound"),
        ("asp", {"staleness_bound": 1}, "'asp' takes no staleness_bound"),
        ("ps+", {"local_scale": float("nan")}, "local_scale must be"),
        ("ps+", {"local_scale": -1}, "local_scale must be"),
        ("ps+", {"local_scale": 1e40}, "from 0 to 3.4e.38, which float32 can hold, got 1e.40"),
        ("ps+", {"local_scale": 10**400}, "local_scale must be"),
        ("ps+", {"local_scale": True}, "local_scale must be"),
        ("ps+", {"lr_scale": lambda: 1.0}, "cannot be called with one Staleness"),
        ("ps+", {"lr_scale": lambda a, b: 1.0}, "cannot be called with one Staleness"),
        ("ps+", {"lr_scale": "asap"}, "'asap' is not a policy"),
        (PSPlus(), {"local_scale": 1.0}, "local_scale given beside a scheme object"),
        (PSPlus, {}, "object of psplus.schemes"),
        (3, {}, "object of psplus.schemes"),
    ],
)
def test_wrong_options_are_refused(scheme: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(psplus.ConfigError, match=message):
        resolved(scheme, **options)


class RecordedTurn:
    """Notes what a scheme asks for; the policy's factor is 0.5."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def scale(self, seen: Any) -> float:
        return 0.5

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            self.events.append((name, *arguments))
            return SimpleNamespace()

        return note


AFTER_THE_ROUND_TRIP = [
    ("compute",),
    ("peek",),
    ("publish", 0.5),
    ("wait_round", 0),
    ("observe",),
    ("pull", 0.0),
]


@pytest.mark.parametrize(
    ("scheme", "events"),
    [
        (BSP(), AFTER_THE_ROUND_TRIP),
        (SSP(2), AFTER_THE_ROUND_TRIP),
        (ASP(), AFTER_THE_ROUND_TRIP),
        (
            PSPlus(local_scale=0.25),
            [("compute",), ("wait_round", 0), ("observe",), ("pull", 0.125), ("publish", 0.5)],
        ),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_the_order_of_a_step(scheme: Any, events: list[Any]) -> None:
    turn = RecordedTurn()
    scheme.step(turn)
    assert turn.events == events


def unit() -> nn.Linear:
    """A layer whose two parameters begin at 0."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    return layer


def push(layer: nn.Module, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    for p in layer.parameters():
        p.grad = torch.full_like(p, gradient)
    optimizer.step()


def value(layer: nn.Module) -> float:
    """The one value that all elements have."""
    elements = torch.cat([p.detach().reshape(-1) for p in layer.parameters()])
    assert (elements == elements[0]).all(), elements
    return elements[0].item()


def ps_plus_alone(pull: str) -> dict[str, list[float]]:
    """x after each step, learning rate 1, gradient 1: W falls by lambda a step."""
    found = {}
    session = psplus.connect(server="always")
    for name, options in {
        "plain": {},
        "published form": {"local_scale": 0.0},
        "half": {"lr_scale": lambda _: 0.5},
        "double local": {"lr_scale": lambda _: 0.5, "local_scale": 2.0},
    }.items():
        layer = unit()
        optimizer = psplus.wrap(
            torch.optim.SGD(layer.parameters(), lr=1.0), session=session, pull=pull, **options
        )
        found[name] = []
        for _ in range(3):
            push(layer, optimizer, 1.0)
            found[name].append(value(layer))
        optimizer.synchronize()
        found[name].append(value(layer))
        assert optimizer.stats.lr_scale == (0.5 if "lr_scale" in options else 1.0)
        assert optimizer.stats.pushes == optimizer.stats.step == 3
        optimizer.close()
    return found


@pytest.mark.parametrize("pull", ["mapped", "buffered"])
def test_ps_plus_recurrence(workers: Workers, pull: str) -> None:
    (found,) = workers(ps_plus_alone, 1, pull=pull)
    assert found == {
        "plain": [-1.0, -2.0, -3.0, -3.0],
        "published form": [0.0, -1.0, -2.0, -3.0],
        "half": [-0.5, -1.0, -1.5, -1.5],
        "double local": [-1.0, -1.5, -2.0, -1.5],
    }


def gate(scheme: str, bound: int | None) -> dict[str, Any]:
    """Rank 0 steps as fast as it can; rank 1 takes 0.1 s a step. Greatest lead of rank 0."""
    layer = unit()
    options = {} if bound is None else {"staleness_bound": bound}
    optimizer = psplus.wrap(torch.optim.SGD(layer.parameters(), lr=1.0), scheme, **options)
    rank = psplus.config.read().rank
    lead = 0
    for _ in range(10):
        if rank == 1:
            time.sleep(0.1)
        push(layer, optimizer, 1.0)
        vector = optimizer.step_vector
        lead = max(lead, int(vector[0] - vector[1]))
    began = time.monotonic()
    optimizer.synchronize()
    waited = time.monotonic() - began
    final = value(layer)
    optimizer.close()
    return {"lead": lead, "waited": waited, "final": final}


@pytest.mark.parametrize(
    ("scheme", "bound"), [("ssp", 0), ("ssp", 2), ("ps+", 2), ("asp", None), ("ps+", None)]
)
def test_how_far_ahead_a_fast_worker_gets(workers: Workers, scheme: str, bound: int | None) -> None:
    fast, slow = workers(gate, 2, scheme=scheme, bound=bound)
    if bound is None:
        assert fast["lead"] >= 8
        assert fast["waited"] > 0.5  # it had nothing left to do but to wait for the other
    else:
        assert fast["lead"] <= bound + 1
    scaled = scheme == "ps+"  # its default policy may damp the slow worker's stale updates
    for found in (fast, slow):
        assert found["final"] == fast["final"]
        assert found["final"] == -10.0 or (scaled and -10.0 < found["final"] <= -5.0)


def what_policies_see() -> list[dict[str, Any]]:
    rank = psplus.config.read().rank
    seen: list[psplus.Staleness] = []

    def policy(staleness: psplus.Staleness) -> float:
        seen.append(staleness)
        return 1.0

    layer = unit()
    optimizer = psplus.wrap(torch.optim.SGD(layer.parameters(), lr=1.0), "ps+", lr_scale=policy)
    for _ in range(30):
        time.sleep(0.002)
        push(layer, optimizer, 1.0)
    optimizer.synchronize()
    stats = optimizer.stats
    optimizer.close()
    assert stats.staleness_max >= stats.staleness_mean > 0
    assert stats.bytes_pushed >= 30 * 8 * 4
    assert stats.bytes_pulled >= 30 * 8 * 4
    assert {s.rank for s in seen} == {rank}
    return [
        {
            "observed": s.observed,
            "actual": s.actual,
            "step": s.step,
            "vector": s.step_vector,
            "workers": s.num_workers,
            "rates": list(s.rates),
        }
        for s in seen
    ]


def test_what_policies_see(workers: Workers) -> None:
    for rank, seen in enumerate(workers(what_policies_see, 2)):
        assert [s["step"] for s in seen] == list(range(1, 31))
        assert {s["workers"] for s in seen} == {2}
        assert seen[0]["actual"] == -1
        assert all(s["actual"] >= 0 for s in seen[1:])
        assert all(s["vector"].dtype == torch.int64 and len(s["vector"]) == 2 for s in seen)
        # A snapshot for step k is taken after own push k - 1 was applied.
        assert all(int(s["vector"][rank]) >= s["step"] - 1 for s in seen)
        foreign = [int(s["vector"][1 - rank]) for s in seen]
        assert [s["observed"] for s in seen[1:]] == [b - a for a, b in pairwise(foreign)]
        assert all(rate > 0 for rate in seen[-1]["rates"])
