"""A model's buffers, such as BatchNorm's statistics, shared between workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from psplus import _C
from psplus.optim.checks import DTYPES

__all__ = ["BufferPlace", "SharedBuffers", "declare", "find_buffers"]


@dataclass(frozen=True)
class BufferPlace:
    """Where a buffer lives: modules may put another tensor in its place at any time."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now."""
        value: Tensor = getattr(self.module, self.attribute)
        return value

    @property
    def is_averaged(self) -> bool:
        """Whether the servers hold the workers' mean of it; else they hold rank 0's."""
        return self.tensor.dtype in DTYPES


def find_buffers(model: nn.Module | None) -> list[BufferPlace]:
    """The dense CPU buffers of a model that belong to its state dict, each once."""
    found: dict[int, BufferPlace] = {}
    for prefix, module in () if model is None else model.named_modules():
        for attribute, tensor in module.named_buffers(recurse=False):
            if attribute in module._non_persistent_buffers_set:
                continue
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            found.setdefault(id(tensor), BufferPlace(name, module, attribute))
    return list(found.values())


def declare(buffers: Sequence[BufferPlace]) -> list[tuple[str, str, list[int]]]:
    """Their names, dtypes and shapes as a stream wants them; integers travel as float64."""
    return [(b.name, DTYPES.get(b.tensor.dtype, "float64"), list(b.tensor.shape)) for b in buffers]


class SharedBuffers:
    """Buffers over a stream of their own.

    After each step a worker pushes how far its floating-point buffers have moved, and goes on with
    its own; the server applies 1/N of it, so that it holds the mean of the workers' buffers, which
    `pull()` takes. Under BSP it applies the mean over those that made the step. Integers, and what
    else has no mean, are rank 0's: `publish_integers()`.

    Thread safety: none; one thread steps.
    """

    def __init__(self, stream: _C.DenseStream, buffers: Sequence[BufferPlace]) -> None:
        self._stream = stream
        self._buffers = list(buffers)
        self._averaged = [b.is_averaged for b in self._buffers]
        while not stream.wait_initialised():
            stream.publish_values(self._read())
        stream.observe()
        self._take(lambda tensors: stream.pull(tensors, 0.0))

    def push(self, num_workers: int) -> None:
        """Push what has changed since the last push or pull. Once a step, on every worker.

        Version counters do not tell what has: BatchNorm moves its statistics without them.

        Args:
            num_workers: Workers that step, some of which may be about to open this stream yet.
        """
        now = self._read()
        self._stream.begin_step()
        if self._stream.write_delta(now, self._averaged) < 0:
            self._stream.snapshot(now)
        else:
            self._stream.write_nothing()  # NaN and infinities stay this worker's own
        # The server divides by the workers of this stream.
        self._stream.publish(self._stream.peek().num_workers / max(1, num_workers))

    def arrive(self) -> None:
        """Wait until own pushes are applied, and let the others step without this worker."""
        self._stream.refresh()
        self._stream.arrive()

    def meet(self) -> None:
        """Wait until all workers have arrived."""
        self._stream.barrier()

    def publish(self) -> None:
        """Make all of this worker's buffers everybody's."""
        self._stream.publish_values(self._read())
        self.pull()

    def publish_integers(self) -> None:
        """Make this worker's integers everybody's; the means stay."""
        mean = [t.clone() for t in self._read()]
        self._stream.pull_cut(mean)
        own = self._read()
        self._stream.publish_values(
            [m if a else o for m, o, a in zip(mean, own, self._averaged, strict=True)]
        )

    def pull(self) -> None:
        """Take the servers' values: means, and rank 0's integers."""
        self._stream.refresh()
        self._stream.observe()
        self._take(lambda tensors: self._stream.pull(tensors, 0.0))

    def pull_cut(self) -> None:
        """The same as one state between two batches, own pushes included; begins no snapshot."""
        tensors = self._read()
        self._stream.pull_cut(tensors)
        self._write(tensors)

    def copies(self) -> list[Tensor]:
        """Copies of all buffers, for `restore()`."""
        return [b.tensor.detach().clone() for b in self._buffers]

    def restore(self, copies: Sequence[Tensor]) -> None:
        """Put copies back. What they lack against the last push is pushed with the next."""
        with torch.no_grad():
            for buffer, value in zip(self._buffers, copies, strict=True):
                buffer.tensor.copy_(value)

    def close(self, timeout: float) -> None:
        """Leave the stream once own pushes are in."""
        self._stream.close(timeout)

    def _take(self, pull: Callable[[list[Tensor]], None]) -> None:
        tensors = self._read()
        pull(tensors)
        self._write(tensors)
        self._stream.snapshot(self._read())

    def _read(self) -> list[Tensor]:
        """The buffers themselves, and float64 copies of the integers."""
        return [
            b.tensor.detach() if a else b.tensor.detach().to(torch.float64)
            for b, a in zip(self._buffers, self._averaged, strict=True)
        ]

    def _write(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value, averaged in zip(self._buffers, tensors, self._averaged, strict=True):
                if not averaged:
                    buffer.tensor.copy_(value)
