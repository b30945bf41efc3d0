"""Limits that the system sets processes: named, with how to raise them, and nothing is left."""

import contextlib
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psplus

Workers = Callable[..., list[Any]]

USER = 54321  # nobody's id: root's processes are not counted against RLIMIT_NPROC


def wrap(count: int = 2) -> str:
    """What `psplus.wrap()` of ``count`` float32 values raises, or nothing."""
    parameter = nn.Parameter(torch.zeros(count))
    session = psplus.connect(server="always", timeout=20.0)
    try:
        psplus.wrap(torch.optim.SGD([parameter], lr=0.1), "asp", session=session).close()
    except psplus.Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


def left_over() -> list[str]:
    """Directories of jobs."""
    folder = Path(tempfile.gettempdir()) / f"psplus-{os.geteuid()}"
    return [str(path) for path in folder.glob("*")] if folder.exists() else []


def write_little(size: int, count: int) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    told = wrap(count)
    psplus.connect().close()
    deadline = time.monotonic() + 5.0
    while left_over() and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"told": told, "left": left_over()}


@pytest.mark.parametrize(
    ("size", "count", "where"),
    [(1 << 16, 2, "could not be started: "), (8 << 20, 4 << 20, "")],
    ids=["server", "shard"],
)
def test_file_size(workers: Workers, size: int, count: int, where: str) -> None:
    (found,) = workers(write_little, 1, size=size, count=count)
    assert f"{where}posix_fallocate failed for psplus-" in found["told"]
    assert f"may have {size} bytes (RLIMIT_FSIZE); raise it with `ulimit -f un" in found["told"]
    assert found["left"] == []


def open_few(most: int) -> list[str]:
    """What comes of it when this process may open 0, 1, ... ``most - 1`` files more."""
    wrap()  # what a first call imports and opens
    psplus.connect().close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    told = []
    for _ in range(most):
        told.append(wrap())
        with contextlib.suppress(psplus.Error):  # the same, when it is the session that failed
            psplus.connect().close()
        os.close(taken.pop())
    return told


def test_open_files(workers: Workers) -> None:
    (told,) = workers(open_few, 1, most=24)
    assert told[-1] == ""
    refused = [text for text in told if text]
    assert len(refused) > 4
    for text in refused:
        assert "256 open files (RLIMIT_NOFILE); raise it with `ulimit -n`" in text, text


def wrap_with_a_low_soft_limit() -> list[Any]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    told = [wrap() for _ in range(20)]  # two descriptors each, at least
    return [*told, resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)]


def test_the_soft_limit_on_open_files_is_raised(workers: Workers) -> None:
    (told,) = workers(wrap_with_a_low_soft_limit, 1)
    assert told == [""] * 20 + [True]


def start_few(more: int, server: str) -> dict[str, Any]:
    """What a user is told who may have ``more`` processes and threads beside this one's."""
    os.environ["PSPLUS_SERVER"] = server
    psplus.wrap(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))  # imports what a user may not read
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            limit = 0
            os.setresuid(USER, USER, USER)
            limit = len(list(Path("/proc/self/task").iterdir())) + more
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
            os.write(there, json.dumps([limit, wrap(), left_over()]).encode())
        except BaseException as error:
            os.write(there, json.dumps([limit, repr(error), []]).encode())
        os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    with os.fdopen(here) as pipe:
        limit, told, left = json.loads(pipe.read())
    return {"limit": limit, "told": told, "left": left}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without processes")
@pytest.mark.parametrize(
    ("more", "what"),
    [
        (0, "psplus's thread could not be started"),
        (1, "psplus-server could not be started"),
        (2, "psplus-server could not be started"),  # the process, but not the one that it forks
    ],
)
def test_processes(workers: Workers, clean_job: Path, more: int, what: str) -> None:
    server = clean_job / "psplus-server"
    shutil.copy(psplus.config.server_path(), server)
    clean_job.chmod(0o777)
    (found,) = workers(start_few, 1, more=more, server=str(server))
    assert what in found["told"]
    assert f"may have {found['limit']} processes and threads (RLIMIT_NPROC)" in found["told"]
    assert "`ulimit -u`" in found["told"]
    assert found["left"] == []
