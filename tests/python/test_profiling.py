"""The ranges that torch.profiler shows, and that nobody pays for without it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import gradients_at, make_model

import psplus
from psplus import profiling

Workers = Callable[..., list[Any]]
STEPS = 3

# Optimizers with and without kernels of their own.
PATHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.SGD(p, lr=0.01),
    "generic": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def train(path: str, scheme: str) -> dict[str, Any]:
    """The ranges of a few steps and of the calls around them, with a profiler and without."""
    made: list[str] = []

    class Counted(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            made.append(name)
            super().__init__(name)

    profiling.record_function = Counted  # type: ignore[misc]
    rank = psplus.config.read().rank
    model = make_model()
    optimizer = psplus.wrap(PATHS[path](model.parameters()), scheme, model=model)

    def work() -> None:
        for step in range(STEPS):
            gradients_at(model, rank, step)
            optimizer.step()
        optimizer.synchronize()
        with optimizer.evaluation():
            torch.ones(2) + 1
        optimizer.publish()

    work()
    without = list(made)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    optimizer.close()
    seen = Counter(e.name for e in profile.events() if e.name.startswith("psplus."))
    inside = {
        child.name
        for event in profile.events()
        if event.name == "psplus.evaluation"
        for child in event.cpu_children
    }
    return {"without": without, "made": Counter(made), "seen": seen, "inside": list(inside)}


def expected(path: str, scheme: str) -> dict[str, int]:
    # synchronize() waits and pulls once, evaluation() pulls once.
    waits, pulls = STEPS + 1, STEPS + 2
    if path == "fused" and scheme == "ps+":
        pulls -= STEPS  # the step's own kernel reads the servers' values
    return {
        "psplus.step": STEPS,
        "psplus.wait": waits,
        "psplus.push": STEPS,
        "psplus.pull": pulls,
        "psplus.synchronize": 1,
        "psplus.evaluation": 1,
        "psplus.publish": 1,
    }


@pytest.mark.parametrize("scheme", ["ps+", "asp"])
@pytest.mark.parametrize("path", PATHS)
def test_a_profiler_sees_ranges_and_nobody_else_makes_them(
    workers: Workers, path: str, scheme: str
) -> None:
    for found in workers(train, 2, path=path, scheme=scheme):
        assert found["without"] == []
        assert found["seen"] == expected(path, scheme)
        assert found["made"] == found["seen"]  # all go through named_range()
        assert {"psplus.pull", "aten::add"} <= set(found["inside"])
