"""Run a function of a test module in N worker processes, as a launcher would.

As a program: ``python workers.py FILE FUNCTION RESULT KEYWORDS`` is `call`.
"""

import faulthandler
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fork_server import ForkedWorker, ForkServer

Worker = ForkedWorker | subprocess.Popen[str]

REPOSITORY = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Ended:
    """How one worker ended."""

    rank: int
    status: int
    result: Any
    stderr: str


def start_worker(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    job: str,
    environment: Mapping[str, str] | None = None,
    **keywords: Any,
) -> Worker:
    """Start one worker; its result goes to ``folder/<rank>.pt``, its output to files beside it.

    With an ``environment`` it is an interpreter of its own, which sees that from its start.
    """
    variables = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "PSPLUS_JOB": job,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "python")]),
        **(environment or {}),
    }
    task = [
        sys.modules[function.__module__].__file__ or "",
        function.__name__,
        str(folder / f"{rank}.pt"),
        json.dumps(keywords),
    ]
    out, err = folder / f"{rank}.out", folder / f"{rank}.err"
    if environment is None:
        return ForkServer.get().fork(task, variables, out, err)
    with out.open("w", encoding="utf-8") as stdout, err.open("w", encoding="utf-8") as stderr:
        return subprocess.Popen(
            [sys.executable, __file__, *task],
            env=variables,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )


def wait_workers(processes: Sequence[Worker], folder: Path, limit: float) -> list[Ended]:
    """Wait until all have ended; who has not after ``limit`` seconds is killed, and that fails."""
    import torch

    deadline = time.monotonic() + limit
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
            process.send_signal(signal.SIGUSR1)  # it says where it hangs; see `call`
            time.sleep(1.0)
            process.kill()
            process.wait()
    ended = []
    for rank, process in enumerate(processes):
        stderr = (folder / f"{rank}.err").read_text(encoding="utf-8")
        saved = folder / f"{rank}.pt"
        result = torch.load(saved, weights_only=True) if saved.exists() else None
        ended.append(Ended(rank, process.returncode, result, stderr))
    if late:
        told = "\n".join(f"--- rank {e.rank}\n{e.stderr}" for e in ended)
        raise AssertionError(f"ranks {late} had not ended after {limit:.0f} s\n{told}")
    return ended


def run_workers(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *,
    limit: float = 60.0,
    environment: Mapping[str, str] | None = None,
    **keywords: Any,
) -> list[Any]:
    """Run ``function(**keywords)`` in ``world_size`` processes; its results in rank order.

    Keywords must survive JSON, results ``torch.save`` and ``torch.load(weights_only=True)``.

    Raises:
        AssertionError: If a worker fails or takes longer than ``limit`` seconds in all.
    """
    job = secrets.token_hex(8)
    processes = [
        start_worker(function, rank, world_size, folder, job, environment, **keywords)
        for rank in range(world_size)
    ]
    ended = wait_workers(processes, folder, limit)
    failed = [e for e in ended if e.status != 0]
    if failed:
        raise AssertionError(
            "\n".join(f"--- rank {e.rank} ended with {e.status}\n{e.stderr}" for e in failed)
        )
    return [e.result for e in ended]


def run_lives(
    stay: Callable[..., Any],
    die: Callable[..., Any],
    come_back: Callable[..., Any],
    folder: Path,
    **keywords: Any,
) -> tuple[Any, Any, str]:
    """Rank 0 stays while rank 1 dies by SIGKILL and comes back in a second life.

    ``stay`` and ``come_back`` are given ``meeting``, a folder for files that tell of each other;
    ``come_back`` also the ``keywords``.

    Returns:
        What ``stay`` and ``come_back`` returned, and what the latter wrote to stderr.
    """
    job = secrets.token_hex(8)
    folders = [folder / name for name in ("first", "second")]
    for of_life in folders:
        of_life.mkdir()
    meeting = str(folder)
    lives = [
        start_worker(stay, 0, 2, folders[0], job, meeting=meeting),
        start_worker(die, 1, 2, folders[0], job),
        start_worker(come_back, 1, 2, folders[1], job, meeting=meeting, **keywords),
    ]
    told = folders[1] / "1.err"
    try:
        assert lives[1].wait(30) == -signal.SIGKILL
        assert lives[2].wait(60) == 0, told.read_text()
        assert lives[0].wait(30) == 0, (folders[0] / "0.err").read_text()
    finally:
        for process in lives:
            process.kill()
            process.wait()
    import torch

    stayed = torch.load(folders[0] / "0.pt", weights_only=True)
    returned = torch.load(folders[1] / "1.pt", weights_only=True)
    return stayed, returned, told.read_text()


def wait_for_file(path: Path) -> None:
    """Wait until another worker has made a file."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.01)


def stop_process(pid: int) -> None:
    """Stop a process and wait until each of its threads stands, which a busy machine delays."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"process {pid} does not stop"
            time.sleep(0.01)


def run_program(
    *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as a user would; ``options`` are those of ``subprocess.run``."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )


def call(file: str, function: str, result: str, keywords: str) -> None:
    """Call ``function`` of ``file`` with ``keywords`` (JSON); what it returns is saved."""
    import torch

    # Not dump_traceback_later: an interpreter forked from this one would wait for its thread.
    faulthandler.register(signal.SIGUSR1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    returned = getattr(module, function)(**json.loads(keywords))
    torch.save(returned, result + ".new")
    Path(result + ".new").replace(result)


if __name__ == "__main__":
    call(*sys.argv[1:])
