"""An optimizer whose parameters live on servers."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from typing_extensions import override

from psplus import _C, _compat
from psplus.errors import ConfigError, Error
from psplus.optim.absence import AbsenceWatch
from psplus.optim.blob import adopt, describe
from psplus.optim.buffers import SharedBuffers
from psplus.optim.checks import check_for_server, check_parameters, declare_parameters
from psplus.optim.engine import Closure, Engine
from psplus.optim.exclusive import Exclusive, exclusive
from psplus.optim.guard import OutsideWrites, WriteGuard
from psplus.optim.names import NamedParameter, held_by
from psplus.optim.turn import StepTurn, TurnState
from psplus.profiling import named_range
from psplus.schemes.base import Scheme
from psplus.session import check_process
from psplus.stats import Stats

__all__ = ["ServerEngine"]

_log = logging.getLogger(__name__)


class ServerEngine(Exclusive, Engine):
    """Steps by a scheme over a stream; see `DistributedOptimizer` for what each call promises.

    Thread safety: one thread at a time; calls on others meanwhile are refused.
    """

    uses_server = True

    def __init__(
        self,
        session: _C.Session,
        state: TurnState,
        scheme: Scheme,
        came_late: bool,
        absences: AbsenceWatch,
        outside_writes: OutsideWrites,
        model: torch.nn.Module | None,
        open_buffers: Callable[[], SharedBuffers | None],
        name_group: Callable[[int], list[NamedParameter]],
    ) -> None:
        super().__init__()
        self._session = session
        self._state = state
        self._stream = state.stream
        self._scheme = scheme
        self._absences = absences
        self._outside_writes = outside_writes
        self._name_group = name_group
        self._evaluating = False
        self._closed = False
        self._left = False
        self._start(model, came_late)
        self._buffers = open_buffers()
        self._guard = WriteGuard(state.parameters)

    def _start(self, model: torch.nn.Module | None, came_late: bool) -> None:
        """Everybody begins with rank 0's values, or with those that the servers hold already."""
        state, stream = self._state, self._stream
        while not stream.wait_initialised():
            # Rank 0, or who takes its place when it dies before it has published.
            self._publish_first_values()
        if came_late:
            _log.warning(
                "rank %d: the servers already hold values, which win over this worker's own; call "
                "publish() to make its own everybody's",
                state.rank,
            )
        if stream.blob is not None and not (came_late and state.optimizer.state):
            # A worker that rejoins with a state of its own has loaded a checkpoint; what is in the
            # blob is as old as the job.
            groups = state.optimizer.param_groups
            adopt(stream.blob, state.optimizer, groups, state.parameters, model, state.rank)
        stream.observe()
        stream.pull(state.tensors, 0.0)

    def _publish_first_values(self) -> None:
        self._stream.publish_values(self._state.tensors)

    @property
    @override
    def closed(self) -> bool:
        return self._closed

    @property
    @override
    def description(self) -> str:
        return f"{self._scheme.name}, rank {self._session.rank} of {self._session.world_size}"

    @property
    @override
    def stats(self) -> Stats:
        state, stream = self._state, self._stream
        return Stats(
            step=state.steps,
            pushes=stream.steps,
            skipped_steps=state.skipped,
            staleness_last=state.staleness.last,
            staleness_mean=state.staleness.mean,
            staleness_max=state.staleness.maximum,
            lr_scale=state.lr_scale,
            wait_seconds=stream.wait_seconds,
            bytes_pushed=stream.bytes_pushed,
            bytes_pulled=stream.bytes_pulled,
            retries=stream.retries,
            num_workers=stream.peek().num_workers,
            server_restarts=self._session.server_restarts,
        )

    @property
    @override
    def step_vector(self) -> torch.Tensor:
        return torch.tensor(self._stream.step_vector(), dtype=torch.int64)

    @override
    @exclusive
    def step(self, closure: Closure | None) -> Any:
        self._check_ready("step()")
        self._check_groups()
        self._check_outside_writes()
        if not self._state.optimizer.state and _compat.is_called_to_make_state():
            self._make_missing_state()
            self._guard.record()
            return None
        turn = self._make_turn(closure)
        self._scheme.step(turn)
        if self._buffers is not None:
            self._buffers.push(self._stream.peek().num_workers)
        self._state.steps += 1
        self._absences.look()
        self._guard.record()
        return turn.loss

    def _make_missing_state(self) -> None:
        self._state.optimizer.step()

    def _make_turn(self, closure: Closure | None) -> StepTurn:
        return StepTurn(self._state, closure)

    @override
    @exclusive
    def add_param_group(self, group: dict[str, Any]) -> None:
        self._check_ready("add_param_group()")
        self._check_groups()
        state, stream = self._state, self._stream
        optimizer = state.optimizer
        # A write from outside that came before shall still be noticed at the next step.
        found = self._guard.find()
        optimizer.add_param_group(group)
        try:
            added = self._name_group(len(optimizer.param_groups) - 1)
            check_parameters(added)
            check_for_server(optimizer, added, None, self._session.world_size)
            self._append(added)
        except BaseException:
            optimizer.param_groups.pop()  # as if it had never been there: it may be tried again
            raise
        state.grow(added)
        self._guard = WriteGuard(state.parameters)
        self._guard.record(found)
        if stream.blob is not None:
            adopt(stream.blob, optimizer, optimizer.param_groups[-1:], added, None, state.rank)

    def _append(self, added: Sequence[NamedParameter]) -> None:
        optimizer = self._state.optimizer
        self._stream.add_extent(
            declare_parameters(added),
            describe(
                optimizer,
                optimizer.param_groups[-1:],
                added,
                None,
                self._scheme.name,
                self._state.rank,
            ),
            [p.tensor for p in added],
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._state.optimizer.state_dict()

    @override
    @exclusive
    def synchronize(self) -> None:
        self._check_ready("synchronize()")
        self._check_outside_writes()
        buffers = self._buffers
        with named_range("psplus.synchronize"):
            self._stream.refresh()  # own pushes are in before the others read
            if buffers is not None:
                buffers.arrive()  # before the other barrier: who still steps pushes to both
            self._stream.barrier()
            if buffers is not None:
                buffers.meet()
            self._take_values()
            if buffers is not None and self._session.rank == 0:
                buffers.publish_integers()
            self._stream.barrier()
            if buffers is not None:
                buffers.pull()
                self._stream.barrier()  # nobody moves them before all have read
        self._absences.look()

    @contextmanager
    @override
    def evaluation(self) -> Iterator[None]:
        self._check_ready("evaluation()")
        with self._alone("evaluation"), named_range("psplus.evaluation"), self._cut():
            yield

    @contextmanager
    def _cut(self) -> Iterator[None]:
        """One state of the servers inside the block, the worker's own after it."""
        tensors = self._state.tensors
        # A write from outside shall still be noticed at the next step, not be taken for our own.
        found = self._guard.find()
        with torch.no_grad():
            own = [t.detach().clone() for t in tensors]
        own_buffers = [] if self._buffers is None else self._buffers.copies()
        self._evaluating = True
        try:
            with named_range("psplus.pull"):
                self._stream.pull_cut(tensors)
                if self._buffers is not None:
                    self._buffers.pull_cut()
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)
            if self._buffers is not None:
                self._buffers.restore(own_buffers)
            self._evaluating = False
            self._guard.record(found)

    @override
    @exclusive
    def pull(self) -> None:
        self._check_ready("pull()")
        self._take_values()

    @override
    @exclusive
    def publish(self) -> None:
        self._check_ready("publish()")
        with named_range("psplus.publish"):
            self._stream.publish_values(self._state.tensors)
            if self._buffers is not None:
                self._buffers.publish()
        self._guard.record()

    @override
    def close(self, timeout: float) -> None:
        if self._left:
            return
        check_process()
        self._closed = True
        self._state.stop()
        if self._buffers is not None:
            self._buffers.close(timeout)
        self._stream.close(timeout)
        self._left = True  # not before: a close() that failed can be tried again

    def _take_values(self) -> None:
        with named_range("psplus.wait"):
            self._stream.refresh()
        self._stream.observe()
        with named_range("psplus.pull"):
            self._stream.pull(self._state.tensors, 0.0)
        self._guard.record()

    def _check_outside_writes(self) -> None:
        if self._outside_writes == "raise":
            self._guard.check()

    def _check_ready(self, call: str) -> None:
        check_process()
        if self._closed:
            raise Error(f"{call} after close(): this optimizer has left its scheme")
        if self._evaluating:
            raise Error(f"{call} inside evaluation(): leave its block first")
        if call != "step()":  # which looks at the first sign of a change
            self._guard.check_kinds()

    def _check_groups(self) -> None:
        tensors = held_by(self._state.optimizer)
        if len(tensors) != len(self._state.tensors):
            raise ConfigError(
                f"the inner optimizer holds {len(tensors)} parameters, psplus knows of "
                f"{len(self._state.tensors)}; add groups by add_param_group() of the wrapped "
                "optimizer, which shares them with the other workers"
            )
        if not all(map(is_, tensors, self._state.tensors)):
            raise ConfigError(
                "another tensor stands in the optimizer's param_groups where one of its parameters "
                "stood; close() this wrapper and wrap the optimizer again"
            )
