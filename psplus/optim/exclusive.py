"""Calls that one thread at a time may be in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

from psplus.errors import Error

__all__ = ["Exclusive", "exclusive"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="Exclusive")


class Exclusive:
    """Has methods that exclude each other; a closure may call them again on its own thread."""

    def __init__(self) -> None:
        self._lock = RLock()

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Inside the block other threads' calls are refused.

        Waiting instead would make the order of steps, and so the result, a matter of chance.

        Raises:
            Error: If another thread is in a call already, before anything has changed.
        """
        if not self._lock.acquire(blocking=False):
            raise Error(
                f"{call}() while another thread of this process is in a call of this "
                "optimizer; let one thread make them, or hold a lock around each"
            )
        try:
            yield
        finally:
            self._lock.release()


def exclusive(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Refuse a call while another thread is in one."""

    @wraps(method)
    def guarded(self: _S, /, *arguments: _P.args, **keywords: _P.kwargs) -> _R:
        with self._alone(method.__name__):
            return method(self, *arguments, **keywords)

    return guarded
