"""The key-value store."""

from types import TracebackType
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Self

from psplus import config
from psplus.errors import ConfigError, Error
from psplus.kv.backing import Backing, LocalBacking, ServerBacking
from psplus.kv.dense import DenseValue
from psplus.optim.checks import DTYPES
from psplus.session import Session, check_timeout, connect

__all__ = ["KVStore"]


class KVStore:
    """Values that all workers of a job share by name.

        kv = psplus.KVStore()
        w = kv.dense("w", torch.zeros(1000))
        w.push(update)           # W += update
        w.pull(out=mine)

    Needs no process group: rank and number of workers come from the launcher's variables, as for
    `psplus.wrap()`. A worker alone keeps its values in its own memory.

    Thread safety: values may be used from any thread, and must be declared from one.
    """

    def __init__(
        self,
        session: Session | None = None,
        *,
        nonfinite: Literal["raise", "allow"] = "raise",
        timeout: float = 60.0,
        straggler_timeout: float = 1800.0,
    ) -> None:
        """Describe the store; the first value attaches to the host's server.

        Args:
            session: From `connect()`; by default a server is used when there are several workers.
            nonfinite: What a push of a NaN or an infinity does: ``"raise"`` before anything is
                pushed, or ``"allow"``.
            timeout: Longest silence of those waited for, in seconds.
            straggler_timeout: Longest wait for a live but slow worker, in seconds.

        Raises:
            psplus.ConfigError: For a wrong argument.
        """
        if nonfinite not in ("raise", "allow"):
            raise ConfigError(f"nonfinite must be 'raise' or 'allow', got {nonfinite!r}")
        self._must_be_finite = nonfinite == "raise"
        self._timeout = check_timeout("timeout", timeout)
        self._straggler_timeout = check_timeout("straggler_timeout", straggler_timeout)
        self._session = connect(timeout=self._timeout) if session is None else session
        if not isinstance(self._session, Session):
            raise TypeError(f"session must come from psplus.connect(), got {session!r}")
        self._values: dict[str, DenseValue] = {}
        self._closed = False

    def dense(self, name: str, tensor: Tensor) -> DenseValue:
        """Declare a dense value; every worker declares the same ones in the same order.

        The first value of a job waits for all workers and begins as rank 0's ``tensor``; later
        ones, and those that the servers hold already, begin as they were declared first.

        Args:
            name: What errors call it, and what workers must agree on.
            tensor: Initial value: a dense floating-point or complex CPU tensor; it is copied.

        Raises:
            psplus.ConfigError: For a tensor that servers cannot hold, or a name declared twice.
            psplus.LayoutMismatch: If workers disagree on name, shape or dtype.
            psplus.TimeoutError: If workers do not come; the message says who is missing.
        """
        if self._closed:
            raise Error("this store has been closed")
        if name in self._values:
            raise ConfigError(f"{name!r} has been declared in this store already; use another name")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"the value of {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"{name!r} is {tensor.dtype}; servers hold {', '.join(DTYPES.values())}"
            )
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name!r} is {tensor.layout} on {tensor.device}; this version takes dense CPU "
                "tensors"
            )
        if tensor.numel() == 0:
            raise ConfigError(f"{name!r} has no elements: there is nothing to share")
        value = DenseValue(name, tensor, self._back(name, tensor), self._must_be_finite)
        self._values[name] = value
        return value

    def _back(self, name: str, tensor: Tensor) -> Backing:
        if not self._session.uses_server(config.read()):
            return LocalBacking(tensor)
        native = self._session.attach(straggler_timeout=self._straggler_timeout)
        with self._session.opening() as ordinals:
            stream = native.open_stream(
                ordinal=next(ordinals),
                mode="async",
                bound=None,
                buffered=False,
                params=[(name, DTYPES[tensor.dtype], list(tensor.shape))],
                blob=None,
                timeout=self._timeout,
                straggler_timeout=self._straggler_timeout,
            )
            return ServerBacking(stream, tensor)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for what has been started, flush own pushes and leave. Idempotent.

        Args:
            timeout: Longest time to flush one value's pushes, in seconds.
        """
        check_timeout("timeout", timeout)
        self._closed = True
        for value in self._values.values():
            value.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"KVStore({', '.join(self._values) or 'empty'})"
