"""One step of one worker whose servers step: it pushes gradients."""

from itertools import chain

import torch
from torch.optim import optimizer as torch_optimizer
from typing_extensions import override

from psplus.optim.engine import Closure
from psplus.optim.placement import PlacedOptimizer, refusal
from psplus.optim.skipping import count_as_step
from psplus.optim.step_hooks import StepCall
from psplus.optim.turn import StepTurn, TurnState
from psplus.profiling import named_range
from psplus.schemes.base import Scheme

__all__ = ["GradientTurn"]


class GradientTurn(StepTurn):
    """A turn in which the servers take the optimizer's step."""

    def __init__(
        self,
        state: TurnState,
        closure: Closure | None,
        placed: PlacedOptimizer,
        scheme: Scheme,
    ) -> None:
        super().__init__(state, closure)
        self._placed = placed
        self._scheme = scheme
        self._has_pushed = False

    @override
    def compute(self) -> None:
        state = self._state
        state.stream.begin_step()
        optimizer = state.optimizer
        call = StepCall(optimizer, self._closure)
        closure = call.run_pre_hooks(
            chain(
                torch_optimizer._global_optimizer_pre_hooks.values(),
                optimizer._optimizer_step_pre_hooks.values(),
            )
        )
        if closure is not None:
            with torch.enable_grad():
                self.loss = closure()
        bad = self._look_at_gradients()
        if bad is not None:
            self._skip_for_gradient(bad)
            return
        with named_range("psplus.step"):
            place = state.stream.write_gradients(
                [t if t.grad is None else t.grad for t in state.tensors],
                self._carried,
                self._placed.options(),
                state.groups,
            )
        if place >= 0 and state.nonfinite != "allow":
            self._skip_for_gradient(state.parameters[place].name)
            return
        count_as_step(optimizer)
        call.run_post_hooks(
            chain(
                optimizer._optimizer_step_post_hooks.values(),
                torch_optimizer._global_optimizer_post_hooks.values(),
            )
        )

    @override
    def publish(self, lam: float) -> None:
        super().publish(lam)
        self._has_pushed = True

    @override
    def wait_round(self, lag: int) -> None:
        super().wait_round(lag)
        if self._state.stream.was_outvoted:
            self._placed.warn_of_difference(self._state.rank, self._state.steps + 1)

    @override
    def pull(self, local_scale: float) -> None:
        if not self._has_pushed:
            raise refusal(self._scheme)
        super().pull(local_scale)
