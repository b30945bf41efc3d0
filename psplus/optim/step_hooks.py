"""Hooks around a step, called as torch calls them (``torch.optim.Optimizer.profile_hook_step``)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from psplus.optim.engine import Closure

__all__ = ["StepCall"]


class StepCall:
    """One call of an optimizer's ``step()`` with the arguments that its hooks see and may replace.

    Args:
        optimizer: Whose step it is; the first argument, as in torch.
        closure: The second one, if there is any.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> None:
        self._optimizer = optimizer
        self._args: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
        self._kwargs: dict[str, Any] = {}

    def run_pre_hooks(self, hooks: Iterable[Callable[..., Any]]) -> Closure | None:
        """Call ``hooks``; the closure that the step is to evaluate.

        Raises:
            RuntimeError: If a hook returns neither None nor ``(new_args, new_kwargs)``.
        """
        for hook in list(hooks):
            result = hook(self._optimizer, self._args, self._kwargs)
            if result is None:
                continue
            if not isinstance(result, tuple) or len(result) != 2:
                raise RuntimeError(
                    f"a step pre-hook must return None or (new_args, new_kwargs), got {result!r}"
                )
            self._args, self._kwargs = result
        return _closure_of(*self._args, **self._kwargs)

    def run_post_hooks(self, hooks: Iterable[Callable[..., Any]]) -> None:
        """Call ``hooks`` with the arguments that the step was called with."""
        for hook in list(hooks):
            hook(self._optimizer, self._args, self._kwargs)


def _closure_of(_: torch.optim.Optimizer, closure: Closure | None = None) -> Closure | None:
    return closure
