"""Operations that go on while their caller does something else."""

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, TypeVar

import torch

from psplus.errors import TimeoutError as PSPlusTimeoutError

__all__ = ["SerialQueue", "Work"]

T = TypeVar("T")


class Work(Generic[T]):
    """An operation under way. It keeps the tensors that it reads and writes alive.

    Thread safety: every method from any thread.
    """

    def __init__(self, future: "Future[T]", what: str) -> None:
        self._future = future
        self._what = what

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Longest wait in seconds; the operation goes on after it. Default: until the
                operation itself has ended, which has a time-out of its own.

        Returns:
            What the operation returns.

        Raises:
            psplus.TimeoutError: If it has not ended after ``timeout`` seconds.
            psplus.Error: What the operation itself raised.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            if self._future.done():  # by now, or it is the operation's own error
                return self._future.result()
            raise PSPlusTimeoutError(
                f"{self._what} has not ended after {timeout} s; it goes on"
            ) from None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def future(self) -> "torch.futures.Future[T]":
        """A torch future of the result, for callbacks and ``torch.futures.collect_all``."""
        result: torch.futures.Future[T] = torch.futures.Future()

        def pass_on(ended: "Future[T]") -> None:
            error = ended.exception()
            if error is None:
                result.set_result(ended.result())
            else:
                result.set_exception(error)  # type: ignore[arg-type] # torch declares T

        self._future.add_done_callback(pass_on)
        return result

    def __await__(self) -> Generator[Any, None, T]:
        # Shielded: a cancelled task stops waiting, the operation goes on.
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def __repr__(self) -> str:
        return f"Work({self._what}, {'done' if self.done() else 'under way'})"


class SerialQueue:
    """Runs calls one at a time; those of one thread in the order in which it made them.

    Thread safety: every method from any thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Lock()  # held by the call that runs
        self._lock = threading.Lock()  # guards what follows
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` after all that have been started, and return what it returns."""
        self.drain()
        with self._running:
            return call()

    def start(self, call: Callable[[], T], what: str) -> Work[T]:
        """Run ``call`` on the queue's thread after all that have been started."""

        def serially() -> T:
            with self._running:
                return call()

        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, f"psplus-{self._name}")
            future = self._executor.submit(serially)
            self._last = future
        return Work(future, what)

    def drain(self) -> None:
        """Wait until what has been started has ended, well or not."""
        with self._lock:
            last = self._last
        if last is not None:
            last.exception()

    def close(self) -> None:
        """`drain()`, and end the thread. What is started afterwards begins another."""
        with self._lock:
            executor, self._executor, self._last = self._executor, None, None
        if executor is not None:
            executor.shutdown(wait=True)
