"""Gradients that are not finite: found before anything changes."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from psplus import _C
from psplus.errors import ConfigError
from psplus.optim.names import NamedParameter

__all__ = [
    "CheckedClosure",
    "GradientCheck",
    "NonFinite",
    "NonFiniteGradientError",
    "check_policy",
]

NonFinite = Literal["skip", "raise", "allow"]


def check_policy(nonfinite: str) -> None:
    """Raises ConfigError for an unknown policy."""
    if nonfinite not in ("skip", "raise", "allow"):
        raise ConfigError(f"nonfinite must be 'skip', 'raise' or 'allow', got {nonfinite!r}")


class GradientCheck:
    """Finds gradients that are not finite.

    Backward passes are watched, so that a gradient is looked at while it is in cache; one that was
    made or changed otherwise is looked at when asked for.
    """

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self._parameters = list(parameters)
        self._watch = _C.GradientWatch([p.tensor for p in self._parameters])

    def first_bad(self) -> str | None:
        """Name of the first parameter whose gradient has a NaN or an infinity."""
        place = self._watch.first_nonfinite()
        if place == _UNREADABLE:
            return next((p.name for p in self._parameters if not _is_finite(p.tensor.grad)), None)
        return self._parameters[place].name if place >= 0 else None

    def stop(self) -> None:
        """Watch no more. Idempotent."""
        self._watch.stop()

    def __getstate__(self) -> list[NamedParameter]:
        return self._parameters

    def __setstate__(self, parameters: list[NamedParameter]) -> None:
        GradientCheck.__init__(self, parameters)


_UNREADABLE = -2  # see _C.GradientWatch


def _is_finite(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return True
    values = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
    return bool(torch.isfinite(values).all())


class NonFiniteGradientError(Exception):
    """Leaves an optimizer's step from inside its closure, before it has changed anything."""

    def __init__(self, name: str, loss: Any) -> None:
        super().__init__(name)
        self.name = name
        self.loss = loss


class CheckedClosure:
    """A closure whose first evaluation is followed by a check of the gradients.

    Optimizers evaluate their closure before they change a parameter or their state, so what the
    check raises leaves both as they were. Later evaluations (LBFGS, line searches) are the
    optimizer's own affair.
    """

    def __init__(self, closure: Callable[[], Any], check: Callable[[], str | None]) -> None:
        self._closure = closure
        self._check = check
        self._checked = False

    def __call__(self) -> Any:
        """The loss; raises NonFiniteGradientError after the first evaluation."""
        with torch.enable_grad():
            loss = self._closure()
        if not self._checked:
            self._checked = True
            bad = self._check()
            if bad is not None:
                raise NonFiniteGradientError(bad, loss)
        return loss
