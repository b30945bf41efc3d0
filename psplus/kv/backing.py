"""Where a dense value lives: on a server, or in this process when it works alone."""

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from psplus import _C
from psplus.session import check_process

__all__ = ["Backing", "LocalBacking", "ServerBacking"]


class Backing(Protocol):
    """Carries the operations of `DenseValue` out, one at a time; that class documents them."""

    @property
    def version(self) -> int:
        """Pushes applied."""

    @property
    def step_vector(self) -> Tensor:
        """Pushes applied per rank."""

    def push(self, update: Tensor, scale: float, must_be_finite: bool) -> bool:
        """Add ``scale * update``; False, and nothing is done, if it must be finite and is not."""

    def pull(self, out: Tensor, consistent: bool) -> None:
        """Write the value into ``out``."""

    def set(self, values: Tensor) -> None:
        """Replace the value."""

    def close(self, timeout: float) -> None:
        """Flush and leave."""


class LocalBacking(Backing):
    """One worker without a server."""

    def __init__(self, initial: Tensor) -> None:
        self._value = initial.detach().clone()
        self._pushes = 0

    @property
    @override
    def version(self) -> int:
        return self._pushes

    @property
    @override
    def step_vector(self) -> Tensor:
        return torch.tensor([self._pushes])

    @override
    def push(self, update: Tensor, scale: float, must_be_finite: bool) -> bool:
        if must_be_finite:
            pushed = update.detach() * scale if abs(scale) > 1 else update.detach()
            if not bool(torch.isfinite(pushed).all()):
                return False
        self._value.add_(update.detach(), alpha=scale)
        self._pushes += 1
        return True

    @override
    def pull(self, out: Tensor, consistent: bool) -> None:
        with torch.no_grad():
            out.copy_(self._value)

    @override
    def set(self, values: Tensor) -> None:
        self._value.copy_(values.detach())

    @override
    def close(self, timeout: float) -> None:
        pass


class ServerBacking(Backing):
    """A stream of one tensor."""

    def __init__(self, stream: _C.DenseStream, initial: Tensor) -> None:
        self._stream = stream
        while not stream.wait_initialised():
            stream.publish_values([initial])

    @property
    @override
    def version(self) -> int:
        return self._stream.total_pushes

    @property
    @override
    def step_vector(self) -> Tensor:
        return torch.tensor(self._stream.step_vector(), dtype=torch.int64)

    @override
    def push(self, update: Tensor, scale: float, must_be_finite: bool) -> bool:
        check_process()
        return self._stream.push_sum([update], scale, must_be_finite) < 0 or not must_be_finite

    @override
    def pull(self, out: Tensor, consistent: bool) -> None:
        check_process()
        if consistent:
            self._stream.pull_cut([out])
            return
        self._stream.refresh()
        self._stream.observe()
        self._stream.pull([out], 0.0)

    @override
    def set(self, values: Tensor) -> None:
        check_process()
        self._stream.publish_values([values])

    @override
    def close(self, timeout: float) -> None:
        check_process()
        self._stream.close(timeout)
