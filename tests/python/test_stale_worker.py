"""One worker whose updates are always twenty versions old."""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workers import REPOSITORY

import psplus

Workers = Callable[..., list[Any]]

DELAY = 20  # versions
ROUNDS = 20


def least_squares() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits as features with a bias, and as one-hot targets: a loss of constant curvature."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    from digits import load_data

    images, labels, test_images, test_labels = load_data()

    def with_bias(x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones(len(x), 1)], 1)

    targets = nn.functional.one_hot(labels, 10).float()
    return with_bias(images), targets, with_bias(test_images), test_labels


def train(lr_scale: str, meeting: Path) -> dict[str, float]:
    """Rank 0 steps freely; each gradient of rank 1 waits until rank 0 has made `DELAY` steps.

    Rank 0 waits for the end of each step of rank 1, told by a file in ``meeting``: a push that is
    in says nothing about the pull that comes after it.
    """
    rank = psplus.config.read().rank
    x, y, test_x, test_labels = least_squares()
    x, y = x[rank::2], y[rank::2]
    w = nn.Parameter(torch.zeros(x.shape[1], 10))
    # Each of two workers moves by lr / 2. Times the greatest curvature that is 1.5: a step on a
    # fresh gradient halves the error, one on an old gradient makes it half as large again.
    curvature = torch.linalg.eigvalsh(x.T @ x / len(x)).max().item()
    optimizer = psplus.wrap(torch.optim.SGD([w], lr=2 * 1.5 / curvature), "asp", lr_scale=lr_scale)

    def wait_until(true: Callable[[], bool]) -> None:
        while not true():
            time.sleep(0.0002)

    def made_by_0(steps: int) -> bool:
        return int(optimizer.step_vector[0]) >= steps

    optimizer.synchronize()  # both have the first values before the first step
    for step in range(ROUNDS * (DELAY if rank == 0 else 1)):
        optimizer.zero_grad()
        ((x @ w - y).square().sum() / (2 * len(x))).backward()
        if rank == 1:
            wait_until(partial(made_by_0, (step + 1) * DELAY))
        optimizer.step()
        if rank == 1:
            (meeting / f"{lr_scale}-{step + 1}").touch()
        elif (step + 1) % DELAY == 0:
            wait_until((meeting / f"{lr_scale}-{(step + 1) // DELAY}").exists)
    staleness = optimizer.stats.staleness_max
    optimizer.synchronize()
    with torch.no_grad():
        loss = ((x @ w - y).square().sum() / (2 * len(x))).item()
        accuracy = (test_x @ w).argmax(1).eq(test_labels).double().mean().item()
    optimizer.close()
    return {"staleness": float(staleness), "loss": loss, "accuracy": accuracy}


def both_ways(meeting: str) -> list[dict[str, float]]:
    return [train(policy, Path(meeting)) for policy in ("constant", "inverse_staleness")]


def test_c61_damping_by_staleness_saves_a_run_that_diverges(
    workers: Workers, clean_job: Path
) -> None:
    for rank, (constant, damped) in enumerate(workers(both_ways, 2, meeting=str(clean_job))):
        if rank == 1:
            assert constant["staleness"] >= DELAY
        assert not constant["loss"] < 100.0, constant  # it began at 0.5
        assert constant["accuracy"] < 0.5, constant
        assert math.isfinite(damped["loss"])
        assert damped["loss"] < 0.5
        assert damped["accuracy"] >= 0.9, damped
