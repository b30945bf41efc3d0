"""Workers that do not agree: who is told what differs, and what the others see of it."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psplus

Workers = Callable[..., list[Any]]

SGD = torch.optim.SGD


def listen() -> list[str]:
    """The warnings that psplus logs from now on."""
    logged: list[str] = []

    class Memory(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("psplus").addHandler(Memory(level=logging.WARNING))
    return logged


def make_model(extra: int, layers: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, layers))
    model.register_buffer("extra", torch.zeros(extra))
    return model


def make_optimizer(model: nn.Module, mistake: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    cut = {"number": 4, "membership": 1}.get(mistake, 2)
    groups = [{"params": group} for group in (parameters[:cut], parameters[cut:]) if group]
    return (torch.optim.Adam if mistake == "optimizer" else SGD)(groups, lr=0.1)


def begin(mistake: str, odd: int, scheme: str, stay: int) -> dict[str, Any]:
    """Rank ``odd`` does one thing differently; who is refused ends, ``stay`` workers train on."""
    rank = psplus.config.read().rank
    mine = mistake if rank == odd else ""
    model = make_model(3 if mine == "buffer" else 2, 4 if mine == "layout" else 3)
    options: dict[str, Any] = {"placement": "server"} if mine == "placement" else {}
    if mine == "mode":
        scheme = "bsp" if scheme == "asp" else "asp"
    elif mine == "scheme":
        scheme = "ps+"
    began = time.monotonic()
    try:
        optimizer = psplus.wrap(
            make_optimizer(model, mine), scheme, model=model, timeout=3.0, **options
        )
    except psplus.Error as error:
        return {"told": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    deadline = time.monotonic() + 30
    while optimizer.stats.num_workers > stay:
        assert time.monotonic() < deadline
        step(optimizer)
        time.sleep(0.01)
    for _ in range(3):
        step(optimizer)
    optimizer.close()
    return {}


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


MISTAKES = {
    "optimizer": "ConfigError: the optimizer is 'Adam' on rank {0}, but 'SGD' on rank {1}",
    "scheme": "ConfigError: the scheme is 'ps+' on rank {0}, but 'asp' on rank {1}",
    "number": "ConfigError: the optimizer has 1 parameter group(s) on rank {0}, but 2 on rank {1}",
    "membership": "ConfigError: parameter group 0 on rank {0} differs from that on rank {1} in "
    "'0.bias'",
    "buffer": "LayoutMismatch: buffer 'extra' has shape (3,) on rank {0}, but (2,) on rank {1}",
}


def begin_and_tell(**options: Any) -> dict[str, Any]:
    """What `begin` returns, and what psplus logged meanwhile."""
    logged = listen()
    return {**begin(**options), "logged": logged}


@pytest.mark.parametrize(
    ("mistake", "world", "scheme"),
    [(mistake, 2, "asp") for mistake in MISTAKES]
    # Under BSP another scheme is another mode, which the server refuses: see below.
    + [(mistake, 3, "bsp") for mistake in MISTAKES if mistake != "scheme"],
)
def test_who_differs_is_told_and_the_others_hear_of_it(
    workers: Workers, mistake: str, world: int, scheme: str
) -> None:
    odd = world - 1
    found = workers(begin_and_tell, world, mistake=mistake, odd=odd, scheme=scheme, stay=odd)
    assert found[odd]["told"].startswith(MISTAKES[mistake].format(odd, 0))
    assert found[odd]["seconds"] < 3.0  # not the time-out
    for rank, of_rank in enumerate(found[:odd]):
        (line,) = of_rank["logged"]
        assert line.startswith(f"rank {rank}: 1 of {world} workers left, and no step has come from")
        assert f" {odd}" in line
        assert line.endswith(f"training goes on with {world - 1}")


def test_all_but_rank_0_are_told_when_rank_0_differs(workers: Workers) -> None:
    zero, *others = workers(begin_and_tell, 3, mistake="optimizer", odd=0, scheme="bsp", stay=1)
    for rank, of_rank in enumerate(others, 1):
        assert of_rank["told"].startswith(
            f"ConfigError: the optimizer is 'SGD' on rank {rank}, but 'Adam' on rank 0"
        )
    assert "no step has come from rank 1, 2" in zero["logged"][0]


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [("layout", "LayoutMismatch"), ("mode", "ConfigError"), ("placement", "ConfigError")],
)
def test_nobody_begins_without_one_that_the_server_refused(
    workers: Workers, mistake: str, kind: str
) -> None:
    """Here whoever comes first is right; a job begins when all have come, which it cannot now."""
    found = workers(begin_and_tell, 2, mistake=mistake, odd=1, scheme="asp", stay=1)
    told = [of_rank["told"] for of_rank in found]
    (other,) = [rank for rank in range(2) if "the job cannot begin" in told[rank]]
    refused = 1 - other
    name, _, reason = told[refused].partition(": ")
    assert name == kind
    assert f"rank {refused}" in reason
    assert told[other] == (
        f"{kind}: the job cannot begin, as rank {refused} was refused and has ended: {reason}"
    )
    assert max(of_rank["seconds"] for of_rank in found) < 2.0  # the time-out is three


def leave_early() -> list[str]:
    """Rank 1 makes its steps and leaves: nothing to tell of."""
    logged = listen()
    rank = psplus.config.read().rank
    model = make_model(2)
    optimizer = psplus.wrap(SGD(model.parameters(), lr=0.1), "bsp", model=model)
    for _ in range(3 if rank == 1 else 9):
        step(optimizer)
    optimizer.close()
    return logged


def test_a_worker_that_is_done_is_not_reported(workers: Workers) -> None:
    assert workers(leave_early, 2) == [[], []]
