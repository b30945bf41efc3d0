"""Servers that die and cannot be replaced, and workers that a server has given up."""

import os
import re
import shutil
import signal
import socket
import tempfile
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


def start_no_server() -> str:
    model = make_model()
    session = psplus.connect(server="always", timeout=2.0)
    with pytest.raises(psplus.PeerLost) as caught:
        psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "asp", session=session)
    assert list((Path(tempfile.gettempdir()) / f"psplus-{os.geteuid()}").iterdir()) == []
    return str(caught.value)


def test_a_program_that_is_no_server_is_named(workers: Workers) -> None:
    (message,) = workers(start_no_server, 1, environment={"PSPLUS_SERVER": "/bin/false"})
    assert "/bin/false ended with status 1" in message
    assert f"rank 0 on host {socket.gethostname()}" in message


def test_a_program_that_crashes_is_named(workers: Workers, clean_job: Path) -> None:
    crashing = clean_job / "crashing"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crashing.chmod(0o700)
    (message,) = workers(start_no_server, 1, environment={"PSPLUS_SERVER": str(crashing)})
    assert f"{crashing} was ended by signal 11 (Segmentation fault)" in message


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
    if broken:
        assert found["kind"] == "PeerLost"
        assert f"(process {found['server']}) was killed or crashed" in found["message"]
        assert f"{executable} ended with status 1 at once" in found["message"]
        assert f"rank 0 on host {socket.gethostname()}" in found["message"]
        assert "server.log" in found["message"]
    else:
        assert found["kind"] == "ConfigError"
        assert str(executable) in found["message"]
    assert found["seconds"] < 5.0


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
