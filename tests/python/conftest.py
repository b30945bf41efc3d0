"""Fixtures: a private temporary folder for each test, worker processes, and a look at leftovers."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import servers_of
from workers import run_workers

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
PATIENCE = 5.0  # seconds that a server may take to end after its last worker


@pytest.fixture(autouse=True)
def clean_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of the test's own, so that its job, and what is left of it, is known.

    After the test no server that served from it may live, and no job may have left a file.
    """
    for variable in list(os.environ):
        if variable.startswith("PSPLUS_") or variable in LAUNCHER_VARIABLES:
            monkeypatch.delenv(variable)
    folder = Path(tempfile.mkdtemp(prefix="psplus-test-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    try:
        assert not wait_for(lambda: servers_of(folder)), "a server outlived its workers"
    finally:
        for process in servers_of(folder):
            os.kill(process, 9)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def workers(clean_job: Path) -> Callable[..., list[Any]]:
    """``workers(function, world_size, **keywords)``: see `workers.run_workers`."""

    def run(function: Callable[..., Any], world_size: int, **keywords: Any) -> list[Any]:
        folder = Path(tempfile.mkdtemp(dir=clean_job))
        return partial(run_workers, folder=folder)(function, world_size, **keywords)

    return run


def wait_for(something_left: Callable[[], list[int]]) -> list[int]:
    """What is still left after the grace period."""
    deadline = time.monotonic() + PATIENCE
    while (left := something_left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
