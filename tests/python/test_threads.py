"""Calls of several threads of one worker."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from problems import gradients_at, make_model
from test_errors import step, wrapped
from workers import wait_for_file

import psplus

Workers = Callable[..., list[Any]]


def step_on_two_threads() -> str:
    model = make_model()
    optimizer = wrapped(model)
    entered, go_on = threading.Event(), threading.Event()

    def closure() -> float:
        entered.set()
        assert go_on.wait(20)
        gradients_at(model, 0, 0)
        return 0.0

    thread = threading.Thread(target=optimizer.step, args=(closure,))
    thread.start()
    assert entered.wait(20)
    calls = [optimizer.step, optimizer.pull, optimizer.publish, optimizer.synchronize]
    for call in [*calls, optimizer.evaluation().__enter__]:
        with pytest.raises(psplus.Error, match="another thread") as caught:
            call()
    go_on.set()
    thread.join()
    step(model, optimizer, 1)
    assert optimizer.stats.pushes == 2
    return str(caught.value)


def test_a_second_thread_is_refused(workers: Workers) -> None:
    (message,) = workers(step_on_two_threads, 1)
    assert "let one thread make them" in message


def close_while_another_thread_waits(meeting: str) -> list[Any]:
    """Rank 1 attaches and never wraps; rank 0 waits for it on a thread, and closes on another."""
    done = Path(meeting) / "done"
    if psplus.config.read().rank == 1:
        psplus.connect(server="always").attach(straggler_timeout=60.0)
        wait_for_file(done)
        return []
    told: list[str] = []
    waits = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if "waits for others to wrap their optimizers; rank 1 is missing" in record.getMessage():
            waits.set()
        return True

    logging.getLogger("psplus").addFilter(note)

    def wait() -> None:
        try:
            wrapped(make_model(), timeout=1.0, straggler_timeout=60.0)
        except psplus.Error as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(20)  # told from inside the call that close() must not wait for
    begin = time.monotonic()
    with pytest.raises(psplus.TimeoutError):
        psplus.connect().close(timeout=1.0)
    seconds = time.monotonic() - begin
    thread.join(20)
    done.touch()
    return [seconds, thread.is_alive(), *told]


def test_closing_does_not_wait_for_another_threads_call(workers: Workers, clean_job: Path) -> None:
    told, _ = workers(close_while_another_thread_waits, 2, meeting=str(clean_job))
    assert told[0] < 10.0
    assert told[1:] == [False, "this session is closed"]
