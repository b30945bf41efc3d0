"""State of an optimizer that servers hold: loaded, published, saved, found by who comes back."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from placed import PLACED, assert_close, state_of, train
from problems import gradients_at, make_model, values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from workers import run_lives, wait_for_file

import psplus

STEPS = 12
Workers = Callable[..., list[Any]]


def resume(names: list[str], how: str) -> dict[str, Any]:
    """Half of the steps by the plain optimizer, the other half on servers, then as a plain one."""
    results = {}
    rank = psplus.config.read().rank
    for name in names:
        model = make_model(dtype=torch.float64)
        plain = PLACED[name](list(model.parameters()))
        train(plain, model, range(5))
        saved, values = state_of(plain), values_of(model)
        if how == "publish":
            model = make_model(seed=7, dtype=torch.float64)
            plain = PLACED[name](list(model.parameters()))
        optimizer = psplus.wrap(plain, "asp", model=model, placement="server")
        if how == "publish":
            if rank == 0:
                gradients_at(model, 0, 99)
                optimizer.step()  # so that the servers have other state
                optimizer.load_state_dict(saved)
                model.load_state_dict(values)
                assert_close(state_of(optimizer), saved, 0.0)
                optimizer.publish()
            optimizer.synchronize()
        assert_close(values_of(model), values, 1e-15)
        found = state_of(optimizer)  # on both ranks
        assert_close(found["state"], saved["state"], 1e-15)
        results[name] = found["state"]
        optimizer.synchronize()
        if rank == 0:
            # One of two workers steps at half the rate.
            for group in optimizer.param_groups:
                group["lr"] = 2 * saved["param_groups"][0]["lr"]
            for step in range(5, STEPS):
                gradients_at(model, 0, step)
                optimizer.step()
            reference = make_model(dtype=torch.float64)
            reference.load_state_dict(values)
            again = PLACED[name](list(reference.parameters()))
            again.load_state_dict(saved)
            for step in range(5, STEPS):
                gradients_at(reference, 0, step)
                again.step()
            assert_close(values_of(model), values_of(reference), 1e-12, name)
            assert_close(state_of(optimizer)["state"], state_of(again)["state"], 1e-12, name)
        optimizer.synchronize()
        optimizer.close()
    return results


@pytest.mark.parametrize("how", ["wrap", "publish"])
def test_loaded_state_is_what_the_servers_begin_with(workers: Workers, how: str) -> None:
    names = ["momentum", "AMSGrad", "AdamW", "Adagrad"]
    zero, one = workers(resume, 2, names=names, how=how)
    for name in names:
        assert_close(one[name], zero[name], 0.0)


def push_ones(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def wrap_linear(value: float, **options: float) -> tuple[nn.Linear, psplus.DistributedOptimizer]:
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    inner = torch.optim.SGD(model.parameters(), momentum=0.5, **options)
    return model, psplus.wrap(inner, "asp", model=model, placement="server")


def stay(meeting: str) -> dict[str, Any]:
    """Rank 0: trains while rank 1 is away."""
    model, optimizer = wrap_linear(0.0, lr=1.0)
    while int(optimizer.step_vector[1]) < 3:
        push_ones(model, optimizer)
    while optimizer.stats.num_workers == 2:
        push_ones(model, optimizer)
    push_ones(model, optimizer)
    found = state_of(optimizer)
    (Path(meeting) / "alone").touch()
    wait_for_file(Path(meeting) / "back")
    optimizer.synchronize()
    optimizer.close()
    return {"state": found, "values": values_of(model)}


def die() -> None:
    """Rank 1: pushes three times, then is killed."""
    model, optimizer = wrap_linear(7.0, lr=1.0)
    for _ in range(3):
        push_ones(model, optimizer)
    os.kill(os.getpid(), signal.SIGKILL)


def come_back(meeting: str) -> dict[str, Any]:
    """Rank 1 again, with values and options of its own."""
    wait_for_file(Path(meeting) / "alone")
    model, optimizer = wrap_linear(1000.0, lr=0.125)
    found = {"state": state_of(optimizer), "values": values_of(model)}
    (Path(meeting) / "back").touch()
    optimizer.synchronize()
    optimizer.close()
    return found


def test_who_comes_back_takes_the_servers_state(clean_job: Path) -> None:
    stayed, returned, told = run_lives(stay, die, come_back, clean_job)
    assert_close(returned, stayed, 0.0)
    assert returned["state"]["param_groups"][0]["lr"] == 1.0
    buffer = returned["state"]["state"][0]["momentum_buffer"]
    assert buffer[0, 0].item() > 1.5  # of more steps than its own
    assert "publish()" in told


def drop_loaded_state(caplog_lines: list[str]) -> list[Any]:
    handler = logging.Handler()
    handler.emit = lambda record: caplog_lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psplus").addHandler(handler)
    model, optimizer = wrap_linear(0.0, lr=1.0)
    push_ones(model, optimizer)
    loaded = state_of(optimizer)
    loaded["state"][0]["momentum_buffer"].fill_(99.0)
    optimizer.load_state_dict(loaded)
    push_ones(model, optimizer)
    push_ones(model, optimizer)
    buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
    optimizer.synchronize()
    optimizer.close()
    return [buffer, caplog_lines]


def test_loaded_state_that_is_not_published_is_dropped_with_a_warning(workers: Workers) -> None:
    for buffer, lines in workers(drop_loaded_state, 2, caplog_lines=[]):
        assert buffer.max().item() < 2.0
        (line,) = lines
        assert "call publish() on one rank after load_state_dict()" in line


def checkpoint() -> dict[str, Any]:
    """torch's distributed checkpoint, which steps an optimizer that has no state."""
    model = make_model()
    optimizer = psplus.wrap(
        PLACED["AdamW"](list(model.parameters())),
        "asp",
        model=model,
        session=psplus.connect(server="always"),
        placement="server",
    )
    gradients_at(model, 0, 0)
    optimizer.step()
    plain = state_of(optimizer)["state"]
    values = values_of(model)
    for p in model.parameters():
        p.grad = None
    found = get_optimizer_state_dict(model, optimizer)
    steps = optimizer.stats.step
    by_name = {name: plain[i] for i, (name, _) in enumerate(model.named_parameters())}
    assert_close(found["state"], by_name, 0.0)
    gradients_at(model, 0, 1)
    optimizer.step()
    set_optimizer_state_dict(model, optimizer, found)
    model.load_state_dict(values)
    optimizer.publish()
    assert_close(state_of(optimizer)["state"], plain, 0.0)
    optimizer.close()
    return {"steps": steps}


def test_distributed_checkpoint_saves_and_loads_the_servers_state(workers: Workers) -> None:
    (found,) = workers(checkpoint, 1)
    assert found == {"steps": 1}
