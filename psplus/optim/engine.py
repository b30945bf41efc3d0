"""What stands behind a wrapped optimizer: the plain one, or a stream to a server."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from typing import Any, Protocol

import torch
from typing_extensions import override

from psplus.errors import Error
from psplus.optim.names import NamedParameter, held_by
from psplus.optim.nonfinite import (
    CheckedClosure,
    GradientCheck,
    NonFinite,
    NonFiniteGradientError,
)
from psplus.optim.skipping import count_as_step, warn_of_skip
from psplus.stats import Stats

__all__ = ["Closure", "Engine", "LocalEngine"]

Closure = Callable[[], Any]


class Engine(Protocol):
    """Carries the operations of `DistributedOptimizer` out; that class documents them."""

    uses_server: bool

    @property
    def closed(self) -> bool:
        """Whether `close()` has been called."""

    @property
    def description(self) -> str:
        """Scheme and place among the workers, in a few words."""

    @property
    def stats(self) -> Stats:
        """Counters so far."""

    @property
    def step_vector(self) -> torch.Tensor:
        """Pushes applied per rank."""

    def step(self, closure: Closure | None) -> Any:
        """Step and exchange."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Give the inner optimizer a group more, whose parameters are shared too."""

    def state_dict(self) -> dict[str, Any]:
        """Of the inner optimizer, with the state wherever it is."""

    def synchronize(self) -> None:
        """Same parameters everywhere."""

    def evaluation(self) -> AbstractContextManager[None]:
        """One cut inside the block."""

    def pull(self) -> None:
        """Take the servers' values."""

    def publish(self) -> None:
        """Give the servers own values."""

    def close(self, timeout: float) -> None:
        """Flush and leave. Idempotent."""


class LocalEngine(Engine):
    """One worker without a server: the inner optimizer runs as it is."""

    uses_server = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[NamedParameter],
        nonfinite: NonFinite,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._nonfinite: NonFinite = nonfinite
        self._check = None if nonfinite == "allow" else GradientCheck(parameters)
        self._steps = 0
        self._skipped = 0
        self._closed = False

    @property
    @override
    def closed(self) -> bool:
        return self._closed

    @property
    @override
    def description(self) -> str:
        return "one worker, no server"

    @property
    @override
    def stats(self) -> Stats:
        return Stats(
            step=self._steps,
            pushes=0,
            skipped_steps=self._skipped,
            staleness_last=-1,
            staleness_mean=0.0,
            staleness_max=0,
            lr_scale=1.0,
            wait_seconds=0.0,
            bytes_pushed=0,
            bytes_pulled=0,
            retries=0,
            num_workers=1,
            server_restarts=0,
        )

    @property
    @override
    def step_vector(self) -> torch.Tensor:
        return torch.tensor([self._steps])

    @override
    def step(self, closure: Closure | None) -> Any:
        self._check_open()
        loss = self._run(closure)
        self._steps += 1
        return loss

    @override
    def add_param_group(self, group: dict[str, Any]) -> None:
        self._check_open()
        self._optimizer.add_param_group(group)

    def _run(self, closure: Closure | None) -> Any:
        if self._nonfinite == "allow":
            return self._optimizer.step() if closure is None else self._optimizer.step(closure)
        if closure is None:
            bad = self._first_nonfinite()
            return self._skip(bad, None) if bad is not None else self._optimizer.step()
        try:
            return self._optimizer.step(CheckedClosure(closure, self._first_nonfinite))
        except NonFiniteGradientError as found:
            return self._skip(found.name, found.loss)

    def _skip(self, name: str, loss: Any) -> Any:
        if self._nonfinite == "raise":
            raise Error(
                f"the gradient of parameter {name!r} is not finite at step {self._steps + 1}; "
                "nothing has been changed"
            ) from None
        self._skipped += 1
        count_as_step(self._optimizer)
        warn_of_skip(f"the gradient of parameter {name!r}", rank=0, step=self._steps + 1)
        return loss

    def _first_nonfinite(self) -> str | None:
        if self._check is None:
            return None
        if self._optimizer_has_changed():
            self._parameters = _renumbered(self._optimizer, self._parameters)
            self._check.stop()
            self._check = GradientCheck(self._parameters)
        return self._check.first_bad()

    def _optimizer_has_changed(self) -> bool:
        held = held_by(self._optimizer)
        known = [p.tensor for p in self._parameters]
        return len(held) != len(known) or not all(map(is_, held, known))

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    @override
    def synchronize(self) -> None:
        self._check_open()

    @contextmanager
    @override
    def evaluation(self) -> Iterator[None]:
        self._check_open()
        yield

    @override
    def pull(self) -> None:
        self._check_open()

    @override
    def publish(self) -> None:
        self._check_open()

    @override
    def close(self, timeout: float) -> None:
        self._closed = True
        if self._check is not None:
            self._check.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise Error("this optimizer has been closed; wrap the inner one again to go on")


def _renumbered(
    optimizer: torch.optim.Optimizer, known: Sequence[NamedParameter]
) -> list[NamedParameter]:
    """All parameters of the optimizer; those that came since the start are named by group.index."""
    names = {id(p.tensor): p.name for p in known}
    return [
        NamedParameter(names.get(id(tensor), f"{g}.{i}"), tensor, g)
        for g, group in enumerate(optimizer.param_groups)
        for i, tensor in enumerate(group["params"])
    ]
