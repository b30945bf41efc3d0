"""A dense tensor that all workers share."""

from typing import Literal, overload

import torch
from torch import Tensor

from psplus.errors import ConfigError, Error
from psplus.kv.backing import Backing
from psplus.work import SerialQueue, Work

__all__ = ["DenseValue"]


class DenseValue:
    """A tensor by name, the sum of its initial value and everything that workers have pushed.

    Made by `KVStore.dense()`. Every operation is atomic per push: each push is applied exactly
    once, and at once everywhere. A thread's own operations take effect in the order in which it
    made them, started ones included.

    Thread safety: every method from any thread; waiting calls release the GIL.
    """

    def __init__(self, name: str, example: Tensor, backing: Backing, must_be_finite: bool) -> None:
        self.name = name
        self.shape = example.shape
        self.dtype = example.dtype
        self._backing = backing
        self._must_be_finite = must_be_finite
        self._queue = SerialQueue(f"kv-{name}")
        self._closed = False

    @overload
    def push(
        self, update: Tensor, scale: float = ..., *, async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def push(
        self, update: Tensor, scale: float = ..., *, async_op: Literal[True]
    ) -> Work[None]: ...
    def push(
        self, update: Tensor, scale: float = 1.0, *, async_op: bool = False
    ) -> Work[None] | None:
        """Add ``scale * update`` to the value, whatever the number of workers.

        Returns when the update has been published: it will be applied even if this process dies
        then, and ``update`` may be written again.

        Args:
            update: A CPU tensor of the value's shape and dtype.
            scale: Factor; applied in float32 or float64, as the servers hold the value.
            async_op: Return a `Work` at once instead; ``update`` must not change until it is done.

        Raises:
            psplus.ConfigError: For another shape, dtype or device, or a scale that is not finite.
            psplus.Error: If the update is not finite and the store does not allow that; nothing
                has been pushed.
            psplus.TimeoutError: If earlier pushes are not applied in time.
        """
        self._check(update, "update")
        if not (isinstance(scale, int | float) and abs(scale) < float("inf")):
            raise ConfigError(f"scale must be a finite number, got {scale!r}")

        def call() -> None:
            if not self._backing.push(update, float(scale), self._must_be_finite):
                raise Error(
                    f"the update of {self.name!r} holds a NaN or an infinity"
                    + (f" when scaled by {scale:g}" if abs(scale) > 1 else "")
                    + ", so nothing was pushed; make the store with nonfinite='allow' if that "
                    "is meant"
                )

        if async_op:
            return self._queue.start(call, f"push of {self.name!r}")
        self._queue.run(call)
        return None

    @overload
    def pull(
        self,
        out: Tensor | None = ...,
        *,
        consistent: bool = ...,
        async_op: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def pull(
        self, out: Tensor | None = ..., *, consistent: bool = ..., async_op: Literal[True]
    ) -> Work[Tensor]: ...
    def pull(
        self, out: Tensor | None = None, *, consistent: bool = False, async_op: bool = False
    ) -> Tensor | Work[Tensor]:
        """Read the value; all own pushes are in it.

        Args:
            out: Where to write it: a CPU tensor of the value's shape and dtype. Default: a new one.
            consistent: The value as it was between two batches of pushes. Else each chunk of
                64 KiB is, but one may hold a push that another does not hold yet.
            async_op: Return a `Work` of the tensor at once instead.

        Returns:
            ``out``, or the new tensor.

        Raises:
            psplus.ConfigError: For an ``out`` of another shape, dtype or device.
            psplus.TimeoutError: If own pushes are not applied in time.
        """
        target = torch.empty(self.shape, dtype=self.dtype) if out is None else out
        self._check(target, "out")

        def call() -> Tensor:
            self._backing.pull(target, consistent)
            return target

        if async_op:
            return self._queue.start(call, f"pull of {self.name!r}")
        return self._queue.run(call)

    def set(self, values: Tensor) -> None:
        """Replace the value, in order with all pushes; returns when that is done.

        Raises:
            psplus.ConfigError: For another shape, dtype or device.
            psplus.TimeoutError: If it is not applied in time.
        """
        self._check(values, "values")
        self._queue.run(lambda: self._backing.set(values))

    @property
    def version(self) -> int:
        """How many pushes, of all workers, are in the value."""
        return self._backing.version

    @property
    def step_vector(self) -> Tensor:
        """Pushes in the value per worker, int64, shape ``(world size,)``, indexed by rank."""
        return self._backing.step_vector

    def _check(self, tensor: Tensor, what: str) -> None:
        if self._closed:
            raise Error(f"the store of {self.name!r} has been closed")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}")
        same = tensor.shape == self.shape and tensor.dtype == self.dtype
        if not same or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ConfigError(
                f"{self.name!r} is a dense {self.dtype} tensor of shape {list(self.shape)} on the "
                f"CPU; {what} is {tensor.layout} {tensor.dtype} of shape {list(tensor.shape)} on "
                f"{tensor.device}"
            )

    def close(self, timeout: float = 5.0) -> None:
        """Flush own pushes and leave; `KVStore.close()` does it for all values. Idempotent."""
        if self._closed:
            return
        self._queue.close()
        self._closed = True
        self._backing.close(timeout)

    def __repr__(self) -> str:
        return f"DenseValue({self.name!r}, {self.dtype}, shape={list(self.shape)})"
