"""Workers forked from a process that has imported torch and psplus already.

Importing takes two to four seconds of processor time a worker, which is most of what these tests
would do. A forked worker ends as any interpreter does, with its exit handlers. A test of what
happens at import, or of variables that are read then, starts an interpreter instead.

As a program: ``python fork_server.py DESCRIPTOR`` serves on a socket.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


class ForkedWorker:
    """A worker with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        # The server waits for its child only when it is asked to: until then the id is its own.
        self._ended = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, as ``Popen.returncode`` says it.

        Raises:
            subprocess.TimeoutExpired: If it runs on after ``timeout`` seconds.
        """
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            self.returncode = self._server.ask({"wait": self.pid})
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        self._replies = self._socket.makefile("r", encoding="utf-8")

    @classmethod
    @functools.cache
    def get(cls) -> "ForkServer":
        """The one of this process; it ends with it."""
        return cls()

    def ask(self, request: dict[str, Any]) -> int:
        """Send one request; its answer is a number."""
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            reply = self._replies.readline()
        if not reply:
            raise RuntimeError(f"the fork server has ended with {self._process.wait()}")
        return int(reply)

    def fork(self, task: list[str], env: dict[str, str], out: Path, err: Path) -> ForkedWorker:
        """Start a worker: `workers.call` with ``task``, under ``env``, with its output in files."""
        request = {"task": task, "env": env, "out": str(out), "err": str(err)}
        return ForkedWorker(self, self.ask({"fork": request}))


def serve(requests: socket.socket) -> list[str] | None:
    """Fork until the asking side has gone; returns None then, and the task in each child."""
    with requests, requests.makefile("r", encoding="utf-8") as lines:
        while line := lines.readline():
            request = json.loads(line)
            if "wait" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            else:
                fork = request["fork"]
                if (answer := os.fork()) == 0:
                    become_worker(**{key: fork[key] for key in ("env", "out", "err")})
                    return list(fork["task"])
            requests.sendall(f"{answer}\n".encode())
    return None


def become_worker(env: dict[str, str], out: str, err: str) -> None:
    """Take the environment and the output files that the worker shall have."""
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None


def main() -> None:
    """Import once, then serve."""
    import torch._dynamo  # noqa: F401 - an optimizer's construction imports it, which takes seconds
    import workers

    import psplus  # noqa: F401

    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads run; a fork would lose all but one"
    task = serve(socket.socket(fileno=int(sys.argv[1])))
    if task is not None:
        workers.call(*task)


if __name__ == "__main__":
    main()
