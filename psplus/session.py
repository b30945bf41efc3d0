"""This process's attachment to the server of its host."""

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from psplus import _C, config
from psplus.errors import ConfigError, Error

__all__ = ["Session", "connect"]

_log = logging.getLogger(__name__)

ServerMode = Literal["auto", "always"]

LONGEST_TIMEOUT = 1e9  # 31 years; the native clock's range ends soon after


class _Attachment:
    """The one native session of this process, made when first needed.

    Thread safety: every member is guarded by ``lock``.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.native: _C.Session | None = None
        self.job: config.JobConfig | None = None
        self.pid = os.getpid()
        self.opening = threading.Lock()  # held while streams are opened
        self.streams = 0  # opened by this process so far; the next one's ordinal
        self.came_late = False  # the first of them had values already


_attachment = _Attachment()


class Session:
    """How this process reaches its server: lazily, one attachment for all of its sessions.

    Made by `connect()`, or by `psplus.wrap()` when it is given none.
    """

    def __init__(self, server: ServerMode, timeout: float) -> None:
        self._server: ServerMode = server
        self._timeout = timeout

    @property
    def timeout(self) -> float:
        """Longest silence of the server, in seconds."""
        return self._timeout

    def uses_server(self, job: config.JobConfig) -> bool:
        """Whether parameters go through a server: several workers, or asked for."""
        return self._server == "always" or job.world_size > 1

    def attach(self, *, straggler_timeout: float) -> _C.Session:
        """The native session, starting the host's server when there is none.

        Raises:
            ConfigError: If the settings are wrong or have changed since the first attachment.
            Error: In a forked child, or if the server cannot be reached.
        """
        job = config.read()
        with _attachment.lock:
            check_process()
            if _attachment.native is not None:
                if _attachment.job != job:
                    raise ConfigError(
                        f"this process is attached as {_attachment.job}, the settings now say "
                        f"{job}; close the session before changing them"
                    )
                return _attachment.native
            directory = config.job_directory(job)
            try:
                native = _C.Session(
                    job_dir=directory,
                    server_path=config.server_path(),
                    rank=job.rank,
                    world_size=job.world_size,
                    timeout=self._timeout,
                    straggler_timeout=straggler_timeout,
                )
            except BaseException:
                with suppress(OSError):  # a server lives in it, or has written its log
                    Path(directory).rmdir()
                raise
            # Read again: a worker that runs alone has been given a name by job_directory().
            _attachment.native, _attachment.job = native, config.read()
            return native

    @contextmanager
    def opening(self) -> Iterator["Iterator[int]"]:
        """Numbers for the streams that the block opens: workers match by order of construction.

        If the block raises they are given back, so that what was refused can be corrected and
        tried again while the others wait for it.
        """
        with _attachment.opening:
            first = _attachment.streams
            given = 0

            def ordinals() -> Iterator[int]:
                nonlocal given
                while True:
                    given += 1
                    yield first + given - 1

            yield ordinals()
            with _attachment.lock:
                _attachment.streams = first + given

    def came_late(self, ordinal: int, stream: _C.DenseStream) -> bool:
        """Whether this process joined a job that was under way.

        The first stream tells: a job's later ones take the first registrant's values and wait for
        nobody, so that values lie there already is nothing special for them.
        """
        with _attachment.lock:
            if ordinal == 0:
                _attachment.came_late = stream.rejoined
            return _attachment.came_late and stream.rejoined

    def close(self, timeout: float = 5.0) -> None:
        """Flush and detach every optimizer of this process from the server. Idempotent.

        What is wrapped afterwards counts as this worker's first again.
        """
        check_timeout("timeout", timeout)
        with _attachment.lock:
            check_process()
            native, _attachment.native, _attachment.job = _attachment.native, None, None
            _attachment.streams = 0  # the next attachment is a new worker
        if native is not None:
            native.close(timeout)

    def __repr__(self) -> str:
        state = "attached" if _attachment.native is not None else "not attached"
        return f"psplus.Session(server={self._server!r}, {state})"


def connect(
    server: ServerMode = "auto",
    servers: str | None = None,
    secret: bytes | None = None,
    timeout: float = 60.0,
) -> Session:
    """Describe how this process reaches its server; the first user of the session attaches.

    Args:
        server: ``"auto"``: a server only when there are several workers; ``"always"``: one worker
            uses a server too.
        servers: Addresses of other hosts' servers: not supported in this version.
        secret: The job's secret between hosts: not supported in this version.
        timeout: Longest silence of the server, in seconds.

    Raises:
        ConfigError: For a wrong argument.
    """
    if server not in ("auto", "always"):
        raise ConfigError(f"server must be 'auto' or 'always', got {server!r}")
    for name, value in (("servers", servers), ("secret", secret)):
        if value is not None:
            raise ConfigError(f"{name} is for several hosts, which this version does not support")
    return Session(server, check_timeout("timeout", timeout))


def check_timeout(name: str, value: float) -> float:
    """``value`` as a float.

    Raises:
        ConfigError: If it is not a finite, positive number of seconds.
    """
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 < value <= LONGEST_TIMEOUT:
        raise ConfigError(
            f"{name} must be a positive number of seconds, {LONGEST_TIMEOUT:.0e} at most, "
            f"got {value!r}"
        )
    return float(value)


def check_process() -> None:
    """Refuse to go on in a child forked from the process that attached.

    Raises:
        Error: In such a child: its parent's session, memory and thread are not its own.
    """
    if os.getpid() != _attachment.pid:
        raise Error(
            f"process {os.getpid()} was forked from worker process {_attachment.pid}; a session "
            "does not survive fork(): start workers with spawn, torchrun or a fresh interpreter"
        )


def _adopt_fork() -> None:
    # A child of a process that never attached may use psplus as its own.
    if _attachment.native is None:
        _attachment.pid = os.getpid()
        _attachment.lock, _attachment.opening = threading.Lock(), threading.Lock()


@atexit.register
def _close_at_exit() -> None:
    if os.getpid() == _attachment.pid and _attachment.native is not None:
        native, _attachment.native = _attachment.native, None
        try:
            native.close()
        except Error as error:
            _log.warning("the last pushes of this process may be lost: %s", error)


os.register_at_fork(after_in_child=_adopt_fork)
