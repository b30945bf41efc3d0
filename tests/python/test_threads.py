"""Calls of several threads of one worker."""

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


def wrapped(model: nn.Module, **options: Any) -> psplus.DistributedOptimizer:
    session = psplus.connect(server="always")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return psplus.wrap(optimizer, "asp", model=model, session=session, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    gradients_at(model, 0, number)
    optimizer.step()


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
    """Rank 1 never wraps; rank 0 waits for it on a thread, and closes on another."""
    done = Path(meeting) / "done"
    if psplus.config.read().rank == 1:
        psplus.connect()
        wait_for_file(done)
        return []
    told: list[str] = []

    def wait() -> None:
        try:
            wrapped(make_model(), timeout=60.0)
        except psplus.Error as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while psplus.session._attachment.native is None:
        time.sleep(0.01)
    time.sleep(0.5)
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
