"""`psplus.launch`: results in rank order, the first failure, and nothing left running."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import psplus


def is_running(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(is_running(p) for p in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


def test_results_in_rank_order(capfd: pytest.CaptureFixture[str]) -> None:
    outside = 7

    def work(factor: int) -> tuple[int, int]:
        rank = int(os.environ["RANK"])
        time.sleep(0.2 * (2 - rank))  # the last rank is the first to end
        print("hello from", rank)
        return rank * factor, outside

    assert psplus.launch(work, 3, 10) == [(0, 7), (10, 7), (20, 7)]
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"[{rank}] hello from {rank}" for rank in range(3)
    ]


def test_workers_train_together() -> None:
    def train() -> tuple[list[int], torch.Tensor]:
        torch.manual_seed(int(os.environ["RANK"]))  # rank 0's values count
        model = torch.nn.Linear(4, 2)
        with psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "bsp", model=model) as o:
            for _ in range(5):
                o.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                o.step()
            return o.step_vector.tolist(), model.weight.detach().clone()

    (first, weight), (second, other) = psplus.launch(train, 2)
    assert first == second == [5, 5]
    assert torch.equal(weight, other)


def test_the_first_failure_is_told_and_ends_the_others(clean_job: Path) -> None:
    ranks = clean_job / "ranks"
    ranks.mkdir()

    def fail_on_one() -> None:
        rank = os.environ["RANK"]
        (ranks / rank).write_text(str(os.getpid()), encoding="ascii")
        if rank == "1":
            while len(list(ranks.iterdir())) < 3:
                time.sleep(0.01)
            raise ValueError("a tensor of the wrong size")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(psplus.Error) as caught:
        psplus.launch(fail_on_one, 3)
    assert time.monotonic() - began < 20
    assert "worker 1 failed" in str(caught.value)
    assert "ValueError: a tensor of the wrong size" in str(caught.value)
    assert "fail_on_one" in str(caught.value)  # its traceback
    wait_until_gone([int(path.read_text(encoding="ascii")) for path in ranks.iterdir()])


@pytest.mark.parametrize(
    ("how", "told"),
    [("kill", "worker 0 was ended by SIGKILL"), ("exit", "ended with status 3 before")],
)
def test_a_worker_that_ends_without_a_word(how: str, told: str) -> None:
    def end() -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)

    with pytest.raises(psplus.Error, match=told):
        psplus.launch(end, 1)


@pytest.mark.parametrize("nprocs", [0, -1, 2.0, True, "2"])
def test_wrong_numbers_are_refused(nprocs: Any) -> None:
    with pytest.raises(psplus.ConfigError, match="nprocs"):
        psplus.launch(print, nprocs)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(psplus.ConfigError, match="runs a function, got None"):
        psplus.launch(None, 1)


def test_what_cannot_be_pickled_is_refused() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(psplus.ConfigError, match="cannot be pickled"):
        psplus.launch(lambda: lock, 1)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "death"])
def test_nothing_outlives_the_caller(clean_job: Path, ending: signal.Signals) -> None:
    script = clean_job / "caller.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib, signal, sys, time
            import psplus

            # A shell's background job begins with this signal ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def work(folder):
                pathlib.Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
                time.sleep(60)

            psplus.launch(work, 2, sys.argv[1])
            """
        ),
        encoding="utf-8",
    )
    ranks = clean_job / "ranks"
    ranks.mkdir()
    caller = subprocess.Popen(
        [sys.executable, str(script), str(ranks)],
        env={**os.environ, "PYTHONPATH": str(Path(psplus.__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 40
    while not all((ranks / str(r)).exists() and (ranks / str(r)).read_text() for r in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    caller.send_signal(ending)
    _, errors = caller.communicate(timeout=20)
    if ending is signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    wait_until_gone([int(path.read_text(encoding="ascii")) for path in ranks.iterdir()])
