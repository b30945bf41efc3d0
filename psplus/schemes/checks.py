"""Checks of the schemes' options."""

import torch

from psplus.errors import ConfigError

__all__ = ["check_bound", "check_local_scale"]

_LARGEST = torch.finfo(torch.float32).max


def check_bound(bound: int) -> None:
    """Raises ConfigError unless ``bound`` is a whole number of steps from 0 to 2^40."""
    if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound <= 1 << 40:
        raise ConfigError(
            f"staleness_bound must be a whole number of steps from 0 to 2^40, got {bound!r}"
        )


def check_local_scale(local_scale: float) -> None:
    """Raises ConfigError unless ``local_scale`` is a number >= 0 that float32 can hold."""
    if (
        isinstance(local_scale, bool)
        or not isinstance(local_scale, int | float)
        or not 0 <= local_scale <= _LARGEST
    ):
        raise ConfigError(
            f"local_scale must be a number from 0 to {_LARGEST:.1e}, which float32 can hold, got "
            f"{local_scale!r}; 1 is the scheme's own"
        )
