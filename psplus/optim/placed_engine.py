"""An optimizer that lives on servers, with the parameters."""

import logging
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from psplus.optim.blob import describe
from psplus.optim.checks import declare_parameters
from psplus.optim.engine import Closure
from psplus.optim.exclusive import exclusive
from psplus.optim.gradient_turn import GradientTurn
from psplus.optim.names import NamedParameter
from psplus.optim.placement import PlacedOptimizer
from psplus.optim.server_engine import ServerEngine
from psplus.optim.turn import StepTurn

__all__ = ["PlacedEngine"]

_log = logging.getLogger(__name__)


class PlacedEngine(ServerEngine):
    """As `ServerEngine`; workers push gradients, and the servers keep state and step."""

    def __init__(self, placed: PlacedOptimizer, *arguments: Any) -> None:
        self._placed = placed
        super().__init__(*arguments)
        placed.forget_state()

    @override
    def _publish_first_values(self) -> None:
        # Planes first: who comes later relies on them as soon as there are values.
        self._publish_state()
        super()._publish_first_values()

    def _publish_state(self) -> None:
        planes = self._placed.own_state(self._state.parameters)
        for number, tensors in enumerate(planes.tensors):
            self._stream.publish_plane(number, tensors, planes.counts)

    @override
    def _make_turn(self, closure: Closure | None) -> StepTurn:
        return GradientTurn(self._state, closure, self._placed, self._scheme)

    @override
    def _make_missing_state(self) -> None:
        """The servers have it."""

    @override
    @exclusive
    def step(self, closure: Closure | None) -> Any:
        if self._placed.has_state:
            _log.warning(
                "rank %d: optimizer state that was loaded and not published is dropped, the "
                "servers' counts; call publish() on one rank after load_state_dict()",
                self._state.rank,
            )
            self._placed.forget_state()
        return super().step(closure)

    @override
    def _append(self, added: Sequence[NamedParameter]) -> None:
        optimizer = self._state.optimizer
        planes = self._placed.add(added)
        state = self._placed.own_state(added)
        self._stream.add_extent(
            declare_parameters(added),
            describe(
                optimizer,
                optimizer.param_groups[-1:],
                added,
                None,
                self._scheme.name,
                self._state.rank,
                with_state=False,
            ),
            [p.tensor for p in added],
            planes=state.tensors[:planes],
            counts=state.counts,
        )
        for p in added:
            optimizer.state.pop(p.tensor, None)

    @override
    @exclusive
    def publish(self) -> None:
        self._check_ready("publish()")
        if self._placed.has_state:
            self._publish_state()
        super().publish()
        self._placed.forget_state()

    @override
    @exclusive
    def state_dict(self) -> dict[str, Any]:
        if self._placed.has_state:  # loaded, and not yet published
            return super().state_dict()
        self._placed.take_state(self._stream, self._state.parameters)
        try:
            return super().state_dict()
        finally:
            self._placed.forget_state()
