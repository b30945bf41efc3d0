"""Workers whose numbers of batches differ: what each scheme leaves, and that nobody hangs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psplus

Workers = Callable[..., list[Any]]
Found = dict[str, Any]

BATCHES = [0, 5, 12]  # of each rank in an epoch
PUSHED = 5 * 2.0 + 12 * 3.0  # in an epoch; each batch of rank r has the gradient r + 1
EPOCHS = 2
FREE, WAITING = ["asp", "ps+"], ["bsp", "ssp"]  # whether a step waits for another worker's


def my_rank() -> int:
    return psplus.config.read().rank


def wrap(scheme: str, **options: Any) -> tuple[nn.Parameter, psplus.DistributedOptimizer]:
    """A parameter of zeros under a scheme that leaves updates as they are."""
    w = nn.Parameter(torch.zeros(3))
    if scheme == "ssp":
        options["staleness_bound"] = 2
    if scheme == "ps+":
        options["lr_scale"] = "constant"
    return w, psplus.wrap(torch.optim.SGD([w], lr=1.0), scheme, **options)


def train(w: nn.Parameter, optimizer: psplus.DistributedOptimizer) -> None:
    """One epoch of this rank."""
    for _ in range(BATCHES[my_rank()]):
        w.grad = torch.full((3,), 1.0 + my_rank())
        optimizer.step()


def what_is_left(w: nn.Parameter, optimizer: psplus.DistributedOptimizer) -> Found:
    return {"w": w.tolist(), "vector": optimizer.step_vector.tolist()}


def run(calls: list[tuple[str, str]]) -> list[Any]:
    """Calls functions of this file, each with a scheme."""
    return [globals()[name](scheme) for name, scheme in calls]


def found_by(workers: Workers, calls: list[tuple[str, str]]) -> list[tuple[str, str, list[Any]]]:
    """Each call with what the ranks found; all run in one set of processes."""
    found = workers(run, len(BATCHES), calls=calls)
    return [
        (*call, list(of_ranks))
        for call, of_ranks in zip(calls, zip(*found, strict=True), strict=True)
    ]


def close_when_done(scheme: str) -> Found:
    """Who has no batch left leaves; the last one synchronizes with nobody."""
    w, optimizer = wrap(scheme)
    with optimizer:
        train(w, optimizer)
        if my_rank() == 2:
            optimizer.synchronize()
        found = what_is_left(w, optimizer)
    with pytest.raises(psplus.Error, match="after close"):
        optimizer.step()
    return found


def synchronize_at_once(scheme: str) -> Found:
    """Rank 0 has nothing to do and waits for the others, who train and close."""
    w, optimizer = wrap(scheme)
    with optimizer:
        train(w, optimizer)
        if my_rank() == 0:
            optimizer.synchronize()
        return what_is_left(w, optimizer)


def test_who_is_done_may_close(workers: Workers) -> None:
    calls = [("close_when_done", s) for s in FREE + WAITING]
    calls += [("synchronize_at_once", s) for s in FREE]
    for name, scheme, (first, middle, last) in found_by(workers, calls):
        # Each push is divided by the workers that are left then, 3 at most and 1 at least.
        knows_all = first if name == "synchronize_at_once" else last
        assert knows_all["vector"] == BATCHES
        assert PUSHED / 3 - 1e-4 <= -knows_all["w"][0] <= PUSHED + 1e-4
        assert knows_all["w"] == [knows_all["w"][0]] * 3
        # Under PS+ the last push may still be on its way when the vector is read.
        assert middle["vector"][1] in ([4, 5] if scheme == "ps+" else [5])
        if scheme == "bsp":  # means over those that step: five times both, then the last alone
            assert first == {"w": [0.0] * 3, "vector": [0, 0, 0]}
            assert middle == {"w": [-5 * 2.5] * 3, "vector": [0, 5, 5]}
            assert last["w"] == [-(5 * 2.5 + 7 * 3.0)] * 3


def epochs(scheme: str, **options: Any) -> list[Found]:
    """Each epoch ends with synchronize(), which lasts until all have had their batches."""
    w, optimizer = wrap(scheme, **options)
    found = []
    with optimizer:
        for _ in range(EPOCHS):
            train(w, optimizer)
            optimizer.synchronize()
            found.append(what_is_left(w, optimizer))
            optimizer.synchronize()  # nobody begins the next epoch before all have looked
    return found


def idle_epochs(scheme: str) -> list[Found]:
    """Who has no batch left makes empty steps, until all have made as many."""
    w, optimizer = wrap(scheme)
    found = []
    with optimizer:
        for _ in range(EPOCHS):
            train(w, optimizer)
            optimizer.zero_grad()
            for _ in range(BATCHES[my_rank()], max(BATCHES)):
                optimizer.step()
            optimizer.synchronize()
            found.append(what_is_left(w, optimizer))
            optimizer.synchronize()
        assert optimizer.stats.pushes == EPOCHS * max(BATCHES)
        assert optimizer.stats.skipped_steps == 0
    return found


def test_epochs_end_together(workers: Workers) -> None:
    calls = [("epochs", s) for s in FREE] + [("idle_epochs", s) for s in FREE + WAITING]
    for name, _, found in found_by(workers, calls):
        steps = BATCHES if name == "epochs" else [max(BATCHES)] * 3
        for epoch in range(EPOCHS):
            assert all(of_rank[epoch] == found[0][epoch] for of_rank in found)
            assert found[0][epoch]["vector"] == [n * (epoch + 1) for n in steps]
            # All pushes, a third of each.
            assert found[0][epoch]["w"] == pytest.approx([-PUSHED / 3 * (epoch + 1)] * 3)


def bounded_epochs(scheme: str) -> list[Found]:
    return epochs(scheme, staleness_bound=2)


def test_epochs_end_together_where_steps_wait(workers: Workers) -> None:
    """A worker that stands in synchronize() cannot step, so nobody waits for its step."""
    calls = [("epochs", s) for s in WAITING] + [("bounded_epochs", "ps+")]
    for _, scheme, found in found_by(workers, calls):
        # BSP: the mean over those that step; else every push divided by the three workers.
        moved = 5 * (2.0 + 3.0) / 2 + 7 * 3.0 if scheme == "bsp" else PUSHED / 3
        for epoch in range(EPOCHS):
            assert all(of_rank[epoch] == found[0][epoch] for of_rank in found)
            assert found[0][epoch]["vector"] == [n * (epoch + 1) for n in BATCHES]
            assert found[0][epoch]["w"] == pytest.approx([-moved * (epoch + 1)] * 3)
