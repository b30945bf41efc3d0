"""Steps that change nothing because a value is not finite."""

import sys
import warnings

import torch

__all__ = ["count_as_step", "level_of_caller", "warn_of_skip"]


def count_as_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell a scheduler that was made before wrapping that step() has been called.

    It watches the inner optimizer's step(), which a skipped step does not reach, and would warn
    that the scheduler runs ahead of the optimizer.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def warn_of_skip(what: str, *, rank: int, step: int) -> None:
    """Warn, at the line of the user that called step(), that a step was skipped."""
    warnings.warn(
        f"rank {rank} skipped step {step}: {what} is not finite; nothing was changed or pushed",
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )


def level_of_caller() -> int:
    """For a warning at the line of the user that called into psplus: its ``stacklevel``."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("psplus.", "torch.", "contextlib")
    ):
        level, frame = level + 1, frame.f_back
    return level
