"""Gradients that are not finite: found before anything changes."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from psplus import _C
from psplus.errors import ConfigError
from psplus.optim.checks import DTYPES
from psplus.optim.names import NamedParameter

__all__ = [
    "CheckedClosure",
    "NonFinite",
    "NonFiniteGradientError",
    "check_policy",
    "first_nonfinite",
]

NonFinite = Literal["skip", "raise", "allow"]


def check_policy(nonfinite: str) -> None:
    """Raises ConfigError for an unknown policy."""
    if nonfinite not in ("skip", "raise", "allow"):
        raise ConfigError(f"nonfinite must be 'skip', 'raise' or 'allow', got {nonfinite!r}")


def first_nonfinite(parameters: Sequence[NamedParameter]) -> str | None:
    """Name of the first parameter whose gradient has a NaN or an infinity."""
    dense, names = [], []
    for p in parameters:
        grad = p.tensor.grad
        if grad is None:
            continue
        if grad.layout is torch.strided and grad.device.type == "cpu" and grad.dtype in DTYPES:
            dense.append(grad)
            names.append(p.name)
        elif not _is_finite(grad):
            return p.name
    bad = _C.all_finite(dense)
    return names[bad] if bad >= 0 else None


def _is_finite(grad: torch.Tensor) -> bool:
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
