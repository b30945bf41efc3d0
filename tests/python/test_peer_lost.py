"""Servers that die and cannot be replaced, and workers that a server has given up."""

import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import gradients_at, make_model
from torch import nn
from workers import wait_for_file

import psplus

Workers = Callable[..., list[Any]]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients_at(model, 0, 0)
    optimizer.step()


def start_no_server(path: str) -> dict[str, Any]:
    os.environ["PSPLUS_SERVER"] = path
    model = make_model()
    session = psplus.connect(server="always", timeout=2.0)
    began = time.monotonic()
    with pytest.raises(psplus.Error) as caught:
        psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "asp", session=session)
    seconds = time.monotonic() - began
    left = (Path(tempfile.gettempdir()) / f"psplus-{os.geteuid()}").glob("*/*")
    return {
        "kind": type(caught.value).__name__,
        "message": str(caught.value),
        "at once": seconds < 1.5,
        "left": [path.name for path in left],
    }


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/bin/true", "/bin/true ended with status 0 at once, which psplus-server does not"),
        ("/bin/false", "/bin/false ended with status 1 at once, which psplus-server does not"),
        ("text", "text: Exec format error; reinstall psplus, or set PSPLUS_SERVER to the"),
        ("not executable", "not executable; correct PSPLUS_SERVER"),
        ("missing", "no server executable at {folder}/missing; correct PSPLUS_SERVER"),
        ("folder", "no server executable at {folder}/folder; correct PSPLUS_SERVER"),
    ],
)
def test_a_program_that_is_no_server_is_refused_at_once(
    workers: Workers, clean_job: Path, program: str, said: str
) -> None:
    path = clean_job / program
    if program == "folder":
        path.mkdir()
    elif program in ("text", "not executable"):
        path.write_text("This is no program.\n")
        path.chmod(0o700 if program == "text" else 0o600)
    (found,) = workers(start_no_server, 1, path=str(path))
    assert found["kind"] == "ConfigError"
    assert said.format(folder=clean_job) in found["message"]
    assert found["at once"]
    assert found["left"] == []
    if "ended" in said:
        assert f"(rank 0 on host {socket.gethostname()})" in found["message"]


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        ("kill -SEGV $$", "PeerLost", "was ended by signal 11 (Segmentation fault) as it started"),
        ("exec sleep 60", "TimeoutError", "was started and does not begin to serve"),
        ("exit 80", "PeerLost", "the server was killed or crashed as it started; tried for 2 s"),
        (
            'echo "no memory left" >> "$2/server.log"; exit 80',
            "PeerLost",
            "; its log ends:\n  no memory left",
        ),
    ],
    ids=["crashes", "hangs", "is gone", "leaves a log"],
)
def test_a_server_that_does_not_come_up_is_told_with_its_log(
    workers: Workers, clean_job: Path, script: str, kind: str, said: str
) -> None:
    program = clean_job / "server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    (found,) = workers(start_no_server, 1, path=str(program))
    assert found["kind"] == kind
    assert said in found["message"]
    assert "server.log" not in found["message"]  # which may be gone by the time it is read
    assert found["left"] == (["server.log"] if "log" in script else [])


def lose_the_server(executable: str, broken: bool) -> dict[str, Any]:
    """The server dies and no other can be started."""
    model = make_model()
    session = psplus.connect(server="always", timeout=2.0)
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), "asp", session=session, timeout=2.0
    )
    step(model, optimizer)
    native = session.attach(straggler_timeout=10.0)
    Path(executable).unlink()
    if broken:
        shutil.copy("/bin/false", executable)
    server = native.server_pid
    os.kill(server, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(psplus.Error) as caught:
        step(model, optimizer)
    return {
        "server": server,
        "seconds": time.monotonic() - began,
        "kind": type(caught.value).__name__,
        "message": str(caught.value),
    }


@pytest.mark.parametrize("broken", [True, False], ids=["broken", "missing"])
def test_a_server_that_cannot_be_replaced(workers: Workers, clean_job: Path, broken: bool) -> None:
    executable = clean_job / "psplus-server"
    shutil.copy(psplus.config.server_path(), executable)
    (found,) = workers(
        lose_the_server,
        1,
        environment={"PSPLUS_SERVER": str(executable)},
        executable=str(executable),
        broken=broken,
    )
    assert found["kind"] == "ConfigError"
    assert f"(process {found['server']}) was killed or crashed" in found["message"]
    said = "ended with status 1 at once" if broken else "No such file or directory"
    assert re.search(f"{executable}.* {said}", found["message"])
    assert f"rank 0 on host {socket.gethostname()}" in found["message"]
    assert "its log ends:" in found["message"]
    assert found["seconds"] < 5.0


F_OFD_SETLKW = 38
WRITE_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def lose_a_server_that_cannot_be_ended() -> str:
    """A file lock stands for a server that SIGKILL does not end: one that waits for a dead disk.

    The lock is that on the control segment, which whoever holds it may still write.
    """
    model = make_model()
    session = psplus.connect(server="always", timeout=6.0)  # a server tries for 5 s
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), "asp", session=session, timeout=6.0
    )
    step(model, optimizer)
    native = session.attach(straggler_timeout=10.0)
    control = os.open(find_control_segment(), os.O_RDWR)
    holder = threading.Thread(target=fcntl.fcntl, args=(control, F_OFD_SETLKW, WRITE_LOCK))
    holder.start()  # it gets the lock when the server dies
    time.sleep(0.2)
    assert holder.is_alive()
    os.kill(native.server_pid, signal.SIGKILL)
    holder.join()
    with pytest.raises(psplus.PeerLost) as caught:
        step(model, optimizer)
    with pytest.raises(psplus.PeerLost):
        optimizer.pull()
    return str(caught.value)


def find_control_segment() -> str:
    """Its descriptor in this process: the one that the server has locked."""
    held = {
        line.split()[-3].rpartition(":")[2]
        for line in Path("/proc/locks").read_text().splitlines()
        if " OFDLCK " in line
    }
    for entry in Path("/proc/self/fd").iterdir():
        is_memory = str(entry.readlink()).startswith("/memfd:")
        if is_memory and str(entry.stat().st_ino) in held:
            return str(entry)
    raise AssertionError("no segment of this process is locked")


def test_values_that_never_come_since_their_holder_cannot_be_ended(workers: Workers) -> None:
    (message,) = workers(lose_a_server_that_cannot_be_ended, 1)
    assert "was killed or crashed, and none replaces it" in message
    assert "the previous server still holds its segments and cannot be ended" in message
    assert "; tried for 6 s (rank 0 on host" in message


def freeze(meeting: str) -> str:
    """Rank 1 stands still while its server is replaced, for longer than a server waits."""
    model = make_model()
    session = psplus.connect(server="always", timeout=10.0)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "asp", session=session)
    step(model, optimizer)
    (Path(meeting) / "frozen").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)

    def go_on() -> None:
        for _ in range(1000):
            step(model, optimizer)
            time.sleep(0.01)

    with pytest.raises(psplus.Error) as caught:
        go_on()
    return str(caught.value)


def go_on_without(meeting: str) -> int:
    """Rank 0 kills the server, replaces it and trains on alone."""
    model = make_model()
    session = psplus.connect(server="always", timeout=10.0)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "asp", session=session)
    native = session.attach(straggler_timeout=10.0)
    frozen = Path(meeting) / "frozen"
    wait_for_file(frozen)
    status = Path("/proc") / frozen.read_text() / "stat"
    while status.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    os.kill(native.server_pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while optimizer.stats.num_workers == 2:
        assert time.monotonic() < deadline
        step(model, optimizer)
        time.sleep(0.01)
    os.kill(int(frozen.read_text()), signal.SIGCONT)
    for _ in range(10):
        step(model, optimizer)
    pushes = optimizer.stats.pushes
    optimizer.close()
    return pushes


def meet(meeting: str) -> Any:
    return freeze(meeting) if os.environ["RANK"] == "1" else go_on_without(meeting)


def test_a_worker_that_was_given_up_is_told_so(workers: Workers, clean_job: Path) -> None:
    pushes, message = workers(meet, 2, meeting=str(clean_job))
    assert pushes >= 10
    # By the thread that talks to the server, or by a push that was first to notice.
    assert re.search(r"this worker was expelled while|server expelled this worker", message)
