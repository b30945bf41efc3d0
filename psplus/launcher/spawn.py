"""`psplus.launch`: a function in several fresh processes, for notebooks."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from psplus.errors import ConfigError, Error

__all__ = ["launch"]

_PATIENCE = 5.0  # seconds from asking a worker to end to ending it
_LOOK = 0.05  # seconds


def launch(function: Callable[..., Any], nprocs: int, *args: Any) -> list[Any]:
    """Run ``function(*args)`` in ``nprocs`` worker processes of this host; results in rank order.

    For notebooks, where there is no torchrun. Each worker is a fresh interpreter, never a fork,
    with torchrun's variables set, so that `psplus.wrap` and ``torch.distributed`` work in it as
    they do anywhere. ``function`` and ``args`` travel by cloudpickle, so a function of a notebook
    will do; what it uses is copied, and changes to it stay in the worker. What workers print comes
    out here with the rank in front. When one fails the others are ended.

    Args:
        function: What each worker calls.
        nprocs: Number of workers, at least 1.
        args: Its arguments.

    Returns:
        What the calls returned.

    Raises:
        psplus.ConfigError: For a wrong number of workers, or what is no function or cannot be
            pickled.
        psplus.Error: If a worker fails: its traceback, or how it ended. Nothing is left running,
            also after ``KeyboardInterrupt``.
    """
    if not callable(function):
        raise ConfigError(f"launch() runs a function, got {function!r}")
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ConfigError(f"nprocs must be a whole number of at least 1, got {nprocs!r}")
    try:
        call = cloudpickle.dumps((function, args))
    except Exception as error:
        raise ConfigError(
            f"what launch() is to run cannot be pickled: {error}; make it inside the function"
        ) from error
    with tempfile.TemporaryDirectory(prefix="psplus-launch-") as folder:
        (Path(folder) / "call.pkl").write_bytes(call)
        workers = _Workers(nprocs, Path(folder))
        try:
            workers.wait()
        finally:
            workers.end()
        return workers.results()


class _Workers:
    """The worker processes and the threads that pass on what they print."""

    def __init__(self, nprocs: int, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        self._relays: list[threading.Thread] = []
        shared = {
            **os.environ,
            "WORLD_SIZE": str(nprocs),
            "LOCAL_WORLD_SIZE": str(nprocs),
            "PSPLUS_JOB": secrets.token_hex(16),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "PYTHONUNBUFFERED": "1",
            # The caller's way to find modules, a notebook's folder included.
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        }
        shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nprocs)))
        try:
            for rank in range(nprocs):
                self._start(rank, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, variables: dict[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "psplus.launcher.child", str(self._folder)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is the caller's, who then ends them
        )
        self._processes.append(process)
        relay = threading.Thread(
            target=_relay, args=(rank, process), name=f"psplus-output-{rank}", daemon=True
        )
        relay.start()
        self._relays.append(relay)

    def wait(self) -> None:
        """Until all have ended well; raises Error when one has not."""
        running = dict(enumerate(self._processes))
        while running:
            for rank, process in list(running.items()):
                status = process.poll()
                if status is None:
                    continue
                del running[rank]
                if not (self._folder / f"result.{rank}").exists():
                    raise Error(self._describe_failure(rank, status))
            time.sleep(_LOOK)

    def _describe_failure(self, rank: int, status: int) -> str:
        told = self._folder / f"failure.{rank}"
        if told.exists():
            return f"worker {rank} failed:\n{told.read_text(encoding='utf-8')}"
        if status < 0:
            return f"worker {rank} was ended by {signal.Signals(-status).name}"
        return f"worker {rank} ended with status {status} before its function returned"

    def end(self) -> None:
        """Ends those that still run, and waits until all is printed. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _PATIENCE
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for relay in self._relays:
            relay.join(timeout=1.0)  # a process that a worker left behind may hold its output
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()

    def results(self) -> list[Any]:
        """What the workers returned, in rank order."""
        return [
            cloudpickle.loads((self._folder / f"result.{rank}").read_bytes())
            for rank in range(len(self._processes))
        ]


def _relay(rank: int, process: subprocess.Popen[str]) -> None:
    output = process.stdout
    if output is None:
        return
    with output:
        for line in output:
            # One write a line, so that the lines of two workers do not mix.
            sys.stdout.write(f"[{rank}] {line if line.endswith(chr(10)) else line + chr(10)}")
            sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
