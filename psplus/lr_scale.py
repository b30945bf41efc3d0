"""Policies that scale an update by its staleness before it is pushed.

A policy is any callable ``(Staleness) -> float``; its value multiplies the update, on the server
and in the worker's own view. The ones below go by name too: ``lr_scale="inverse_staleness"``.
"""

import inspect
import math
from collections.abc import Callable

from psplus.errors import ConfigError
from psplus.staleness import Staleness

__all__ = ["Policy", "constant", "inverse_staleness", "progress_ratio"]

Policy = Callable[[Staleness], float]


def constant(staleness: Staleness) -> float:  # noqa: ARG001 - it looks at nothing
    """1 for every update."""
    return 1.0


def inverse_staleness(staleness: Staleness) -> float:
    """min(1, (N - 1) / tau): tau is the observed staleness, N the number of workers.

    An update of a worker that keeps pace (tau <= N - 1) counts in full; older ones are damped in
    proportion to their age, after Zhang et al., "Staleness-aware Async-SGD" (arXiv:1511.05950).
    A single remaining worker is treated as one of two, so that its updates never vanish.
    """
    fresh = max(staleness.num_workers - 1, 1)
    return 1.0 if staleness.observed <= fresh else fresh / staleness.observed


def progress_ratio(staleness: Staleness) -> float:
    """r_i / max r over the workers' push rates r: damps stragglers and nobody else.

    Rates cover each worker's last 16 pushes, so a late joiner is judged by its recent progress.
    1 while this worker's rate is unknown.
    """
    own = staleness.rates[staleness.rank] if staleness.rank < len(staleness.rates) else 0.0
    return own / max(staleness.rates) if own > 0.0 else 1.0


_BY_NAME: dict[str, Policy] = {
    "constant": constant,
    "inverse_staleness": inverse_staleness,
    "progress_ratio": progress_ratio,
}


def resolve(policy: str | Policy) -> Policy:
    """The policy behind a name or a callable.

    Raises:
        ConfigError: For an unknown name or something that cannot be called.
    """
    if isinstance(policy, str):
        if policy not in _BY_NAME:
            raise ConfigError(
                f"lr_scale={policy!r} is not a policy of this version; "
                f"choose one of {', '.join(map(repr, _BY_NAME))} or pass a callable"
            )
        return _BY_NAME[policy]
    if not callable(policy):
        raise ConfigError(
            f"lr_scale must be a policy's name or a callable (Staleness) -> float, got {policy!r}"
        )
    try:
        inspect.signature(policy).bind(None)
    except TypeError:
        raise ConfigError(
            f"lr_scale={policy!r} cannot be called with one Staleness; pass a callable "
            "(Staleness) -> float"
        ) from None
    except ValueError:
        pass  # a builtin that does not tell what it takes: its first call will
    return policy


def evaluate(policy: Policy, staleness: Staleness) -> float:
    """The policy's factor for one update.

    Raises:
        ConfigError: If the factor is not a finite number >= 0.
    """
    value = policy(staleness)
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0.0):
        name = getattr(policy, "__name__", repr(policy))
        raise ConfigError(
            f"lr_scale policy {name} returned {value!r} at step {staleness.step} on rank "
            f"{staleness.rank}; it must return a finite number >= 0"
        )
    return factor
