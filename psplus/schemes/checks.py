"""Checks of the schemes' options."""

import math

from psplus.errors import ConfigError

__all__ = ["check_bound", "check_local_scale"]


def check_bound(bound: int) -> None:
    """Raises ConfigError unless ``bound`` is a whole number of steps from 0 to 2^40."""
    if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound <= 1 << 40:
        raise ConfigError(
            f"staleness_bound must be a whole number of steps from 0 to 2^40, got {bound!r}"
        )


def check_local_scale(local_scale: float) -> None:
    """Raises ConfigError unless ``local_scale`` is a finite number >= 0."""
    if (
        isinstance(local_scale, bool)
        or not isinstance(local_scale, int | float)
        or not (math.isfinite(local_scale) and local_scale >= 0)
    ):
        raise ConfigError(f"local_scale must be a finite number >= 0, got {local_scale!r}")
