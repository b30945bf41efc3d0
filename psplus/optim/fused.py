"""Which optimizers step by the fused kernels, and how their state gets there.

A fused step reads gradient, state and the servers' values once and writes state, update and
parameter once. It computes what the optimizer's own step computes, to rounding, on the optimizer's
own state and hyper-parameters; whatever it cannot take goes the generic way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from psplus import _C
from psplus.optim.skipping import count_as_step

__all__ = ["FusedOptimizer", "Options", "options_for"]

_Group = dict[str, Any]
_Columns = tuple[list[Tensor], list[Tensor], list[list[Tensor | None]], list[Tensor]]
"""Parameters with a gradient, their gradients, columns of state, step counters."""


def _sgd_options(group: _Group) -> _C.SgdOptions:
    return _C.SgdOptions(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )


def _adam_options(group: _Group) -> _C.AdamOptions:
    beta1, beta2 = group["betas"]
    return _C.AdamOptions(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _adagrad_options(group: _Group) -> _C.AdagradOptions:
    return _C.AdagradOptions(
        lr=float(group["lr"]),
        lr_decay=float(group["lr_decay"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=group["maximize"],
    )


# The optimizers' own _init_group() makes state that is missing exactly as their own step would.


def _sgd_columns(optimizer: Any, group: _Group) -> _Columns:
    params: list[Tensor] = []
    gradients: list[Tensor] = []
    buffers: list[Tensor | None] = []
    optimizer._init_group(group, params, gradients, buffers)
    return params, gradients, [buffers] if group["momentum"] != 0 else [], []


def _adam_columns(optimizer: Any, group: _Group) -> _Columns:
    params: list[Tensor] = []
    gradients: list[Tensor] = []
    first: list[Tensor | None] = []
    second: list[Tensor | None] = []
    largest: list[Tensor | None] = []
    steps: list[Tensor] = []
    optimizer._init_group(group, params, gradients, first, second, largest, steps)
    return params, gradients, [first, second, *([largest] if group["amsgrad"] else [])], steps


def _adagrad_columns(optimizer: Any, group: _Group) -> _Columns:
    params: list[Tensor] = []
    gradients: list[Tensor] = []
    sums: list[Tensor | None] = []
    steps: list[Tensor] = []
    optimizer._init_group(group, params, gradients, sums, steps)
    return params, gradients, [sums], steps


Options = _C.SgdOptions | _C.AdamOptions | _C.AdagradOptions
_Options = Callable[[_Group], Options]
_KINDS: dict[type, tuple[_Options, Callable[[Any, _Group], _Columns]]] = {
    torch.optim.SGD: (_sgd_options, _sgd_columns),
    torch.optim.Adam: (_adam_options, _adam_columns),
    torch.optim.AdamW: (_adam_options, _adam_columns),
    torch.optim.Adagrad: (_adagrad_options, _adagrad_columns),
}


def options_for(optimizer: torch.optim.Optimizer) -> _Options:
    """What reads the hyper-parameters of a group of an optimizer that the kernels can step."""
    return _KINDS[type(optimizer)][0]


class FusedOptimizer:
    """An optimizer whose steps the kernels can take.

    A subclass of those classes may compute anything, and is none of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._places = {id(p): i for i, p in enumerate(self._parameters)}
        self._options, self._columns = _KINDS[type(optimizer)]

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
    ) -> "FusedOptimizer | None":
        """None for an optimizer without kernels."""
        return FusedOptimizer(optimizer, parameters) if type(optimizer) in _KINDS else None

    def prepare(self) -> "PreparedStep | None":
        """The step with the gradients at hand, or None if it must go the generic way."""
        if self.is_observed() or any(_is_special(g) for g in self._optimizer.param_groups):
            return None
        groups = []
        for group in self._optimizer.param_groups:
            params, gradients, states, steps = self._columns(self._optimizer, group)
            groups.append(
                _C.StepGroup(
                    options=self._options(group),
                    indices=[self._places[id(p)] for p in params],
                    gradients=gradients,
                    states=states,
                    steps=steps,
                )
            )
        native = _C.FusedStep.prepare(self._parameters, groups)
        return None if native is None else PreparedStep(native, self._optimizer, self._parameters)

    def is_observed(self) -> bool:
        """Whether somebody relies on the optimizer's own step() being called."""
        optimizer = self._optimizer
        own_step = vars(optimizer).get("step")
        return bool(
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or (own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"))
        )


def _is_special(group: _Group) -> bool:
    return bool(group.get("differentiable") or group.get("capturable"))


class PreparedStep:
    """One step, ready to be taken."""

    def __init__(
        self,
        native: _C.FusedStep,
        optimizer: torch.optim.Optimizer,
        parameters: list[Tensor],
    ) -> None:
        self._native = native
        self._optimizer = optimizer
        self._parameters = parameters

    def run(self, stream: _C.DenseStream, local_scale: float | None) -> int:
        """Step into the next push slot; pull too if there is a ``local_scale``.

        Returns the place of the first parameter whose update is not finite, -1 if all are.
        """
        bad = self._native.run(stream, local_scale)
        for place, buffer in self._native.made:
            self._optimizer.state[self._parameters[place]]["momentum_buffer"] = buffer
        count_as_step(self._optimizer)
        return bad
