"""One step of one worker, offered to its scheme piece by piece."""

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from psplus import _C
from psplus.errors import ConfigError, Error
from psplus.lr_scale import Policy, evaluate
from psplus.optim.engine import Closure
from psplus.optim.fused import FusedOptimizer, PreparedStep
from psplus.optim.meter import StalenessMeter
from psplus.optim.names import NamedParameter
from psplus.optim.nonfinite import (
    CheckedClosure,
    GradientCheck,
    NonFinite,
    NonFiniteGradientError,
)
from psplus.optim.skipping import count_as_step, warn_of_skip
from psplus.profiling import named_range
from psplus.schemes.base import Turn
from psplus.staleness import Staleness

__all__ = ["StepTurn", "TurnState"]


class TurnState:
    """What turns share: the optimizer, its stream, and counters that outlive a turn."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[NamedParameter],
        stream: _C.DenseStream,
        policy: Policy,
        nonfinite: NonFinite,
        rank: int,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = list(parameters)
        self.tensors = [p.tensor for p in parameters]
        self.groups = [p.group for p in parameters]
        self.fused = FusedOptimizer.of(optimizer, self.tensors)
        self.stream = stream
        self.policy = policy
        self.nonfinite: NonFinite = nonfinite
        self.check = None if nonfinite == "allow" else GradientCheck(parameters)
        self.rank = rank
        self.steps = 0
        self.skipped = 0
        self.lr_scale = 1.0
        self.staleness = StalenessMeter()

    def grow(self, added: Sequence[NamedParameter]) -> None:
        """Take in parameters that the optimizer and the stream have got at their end."""
        self.stop()
        self.parameters += added
        self.tensors += [p.tensor for p in added]
        self.groups += [p.group for p in added]
        self.fused = FusedOptimizer.of(self.optimizer, self.tensors)
        self.check = None if self.nonfinite == "allow" else GradientCheck(self.parameters)

    def stop(self) -> None:
        """Look at no more gradients."""
        if self.check is not None:
            self.check.stop()


class StepTurn(Turn):
    """A turn over a stream of dense parameters."""

    def __init__(self, state: TurnState, closure: Closure | None) -> None:
        self._state = state
        self._closure = closure
        self._carried: list[bool] = []
        self._prepared: PreparedStep | None = None
        self._has_pulled = False
        self.loss: Any = None

    @override
    def compute(self) -> None:
        state = self._state
        state.stream.begin_step()
        if self._closure is not None and state.fused is not None and not state.fused.is_observed():
            # These optimizers evaluate it once, before anything but their hooks.
            with torch.enable_grad():
                self.loss = self._closure()
            self._closure = None
        if self._closure is None:
            bad = self._look_at_gradients()
            if bad is not None:
                self._skip_for_gradient(bad)
                return
            if state.fused is not None:
                self._prepared = state.fused.prepare()
        if self._prepared is None:
            self._compute_by_generic_path()

    def _compute_by_generic_path(self) -> None:
        state = self._state
        with named_range("psplus.step"):
            state.stream.snapshot(state.tensors)
            try:
                self._run_inner_step()
            except NonFiniteGradientError as found:
                self.loss = found.loss
                self._skip_for_gradient(found.name)
                return
            # A hook of the optimizer may have made one.
            self._carried = [
                carried or tensor.grad is not None
                for carried, tensor in zip(self._carried, state.tensors, strict=True)
            ]
            bad = state.stream.write_delta(state.tensors, self._carried)
        self._skipped_for_update(bad)

    @override
    def publish(self, lam: float) -> None:
        if self._prepared is not None:
            self._run_prepared(self._prepared, None)
        self._check_scaled_update(lam)
        with named_range("psplus.push"):
            self._state.stream.publish(lam)

    @override
    def wait_round(self, lag: int) -> None:
        with named_range("psplus.wait"):
            self._state.stream.wait_round(lag)

    @override
    def observe(self) -> _C.Observation:
        seen = self._state.stream.observe()
        self._state.staleness.add(seen.actual)
        return seen

    @override
    def peek(self) -> _C.Observation:
        return self._state.stream.peek()

    @override
    def scale(self, seen: _C.Observation) -> float:
        staleness = Staleness(
            observed=seen.observed,
            actual=seen.actual,
            step=seen.step,
            step_vector=torch.tensor(seen.step_vector, dtype=torch.int64),
            rank=self._state.rank,
            num_workers=seen.num_workers,
            rates=tuple(seen.rates),
        )
        self._state.lr_scale = evaluate(self._state.policy, staleness)
        return self._state.lr_scale

    def _check_scaled_update(self, lam: float) -> None:
        """Skip the step if ``lam`` makes infinities of an update that is finite."""
        state = self._state
        if abs(lam) <= 1 or state.nonfinite == "allow":
            return
        place = state.stream.first_overflow(lam)
        if place < 0:
            return
        self._skip(
            f"the update of parameter {state.parameters[place].name!r} times lr_scale {lam:g}",
            "look at lr_scale; nothing has been pushed, and pull() takes the servers' values",
        )
        if self._has_pulled:  # it has the infinities already
            state.stream.pull(state.tensors, 0.0)

    @override
    def pull(self, local_scale: float) -> None:
        self._has_pulled = True
        if self._prepared is not None and self._run_prepared(self._prepared, local_scale):
            return
        with named_range("psplus.pull"):
            self._state.stream.pull(self._state.tensors, local_scale)

    def _run_prepared(self, prepared: PreparedStep, local_scale: float | None) -> bool:
        """Take a fused step; False when its update is not finite and will not be pushed."""
        self._prepared = None
        with named_range("psplus.step"):
            bad = prepared.run(self._state.stream, local_scale)
        return not self._skipped_for_update(bad)

    def _skipped_for_update(self, place: int) -> bool:
        """Skip the step if the update of the parameter at ``place``, -1 for none, forbids it."""
        if place < 0 or self._state.nonfinite == "allow":
            return False
        self._skip(
            f"the update of parameter {self._state.parameters[place].name!r}",
            "its gradient is, so look at the optimizer's state and learning rate; nothing has "
            "been pushed, and pull() takes the servers' values",
        )
        return True

    def _run_inner_step(self) -> None:
        optimizer = self._state.optimizer
        if self._closure is None:
            loss = optimizer.step()
            self.loss = self.loss if loss is None else loss
        else:
            self.loss = optimizer.step(CheckedClosure(self._closure, self._look_at_gradients))

    def _look_at_gradients(self) -> str | None:
        """Notes which parameters the push carries; name of one with a bad gradient, or None."""
        state = self._state
        for p in state.parameters:
            if p.tensor.grad is not None and p.tensor.grad.layout is not torch.strided:
                raise ConfigError(
                    f"the gradient of parameter {p.name!r} is sparse, which this version cannot "
                    "push; build the module with sparse=False, or train with one worker"
                )
        self._carried = [t.grad is not None for t in state.tensors]
        return None if state.check is None else state.check.first_bad()

    def _skip_for_gradient(self, name: str) -> None:
        self._skip(f"the gradient of parameter {name!r}", "nothing has been changed")

    def _skip(self, what: str, advice: str) -> None:
        state = self._state
        if state.nonfinite == "raise":
            raise Error(
                f"{what} is not finite on rank {state.rank} at step {state.steps + 1}; {advice}"
            ) from None
        state.stream.write_nothing()
        state.skipped += 1
        count_as_step(state.optimizer)
        warn_of_skip(what, rank=state.rank, step=state.steps + 1)
