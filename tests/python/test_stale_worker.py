"""One worker whose updates are always twenty versions old."""

import math
import sys
import time
from collections.abc import Callable
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


def train(lr_scale: str) -> dict[str, float]:
    """Rank 0 steps freely; each gradient of rank 1 waits until rank 0 has made `DELAY` steps."""
    rank = psplus.config.read().rank
    x, y, test_x, test_labels = least_squares()
    x, y = x[rank::2], y[rank::2]
    w = nn.Parameter(torch.zeros(x.shape[1], 10))
    # Each of two workers moves by lr / 2. Times the greatest curvature that is 1.5: a step on a
    # fresh gradient halves the error, one on an old gradient makes it half as large again.
    curvature = torch.linalg.eigvalsh(x.T @ x / len(x)).max().item()
    optimizer = psplus.wrap(torch.optim.SGD([w], lr=2 * 1.5 / curvature), "asp", lr_scale=lr_scale)

    def wait_for(other: int, steps: int) -> None:
        while int(optimizer.step_vector[other]) < steps:
            time.sleep(0.0002)

    for step in range(ROUNDS * (DELAY if rank == 0 else 1)):
        optimizer.zero_grad()
        ((x @ w - y).square().sum() / (2 * len(x))).backward()
        if rank == 1:
            wait_for(0, (step + 1) * DELAY)
        optimizer.step()
        if rank == 0 and (step + 1) % DELAY == 0:
            wait_for(1, (step + 1) // DELAY)
    staleness = optimizer.stats.staleness_max
    optimizer.synchronize()
    with torch.no_grad():
        loss = ((x @ w - y).square().sum() / (2 * len(x))).item()
        accuracy = (test_x @ w).argmax(1).eq(test_labels).double().mean().item()
    optimizer.close()
    return {"staleness": float(staleness), "loss": loss, "accuracy": accuracy}


def both_ways() -> list[dict[str, float]]:
    return [train("constant"), train("inverse_staleness")]


def test_c61_damping_by_staleness_saves_a_run_that_diverges(workers: Workers) -> None:
    for rank, (constant, damped) in enumerate(workers(both_ways, 2)):
        if rank == 1:
            assert constant["staleness"] >= DELAY
        assert not constant["loss"] < 100.0, constant  # it began at 0.5
        assert constant["accuracy"] < 0.5, constant
        assert math.isfinite(damped["loss"])
        assert damped["loss"] < 0.5
        assert damped["accuracy"] >= 0.9, damped
