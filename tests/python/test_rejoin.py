"""Workers that die and come back to a job that has gone on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workers import run_lives, wait_for_file

import psplus


def layer(value: float) -> nn.Linear:
    made = nn.Linear(3, 2)
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(value)
    return made


def push(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def stay(meeting: str) -> dict[str, Any]:
    """Rank 0: trains before, while and after rank 1 is away."""
    model = layer(0.0)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=1.0), "asp", model=model)
    while int(optimizer.step_vector[1]) < 3:
        push(model, optimizer)
    while optimizer.stats.num_workers == 2:
        push(model, optimizer)
    for _ in range(20):
        push(model, optimizer)
    before = model.weight[0, 0].item()
    (Path(meeting) / "alone").touch()
    wait_for_file(Path(meeting) / "back")
    optimizer.pull()
    unmoved = model.weight[0, 0].item() == before
    optimizer.synchronize()
    final = model.weight.detach().clone()
    optimizer.close()
    return {"before": before, "unmoved": unmoved, "final": final}


def die() -> None:
    """Rank 1: pushes three times, then is killed."""
    model = layer(7.0)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=1.0), "asp", model=model)
    for _ in range(3):
        push(model, optimizer)
    os.kill(os.getpid(), signal.SIGKILL)


def come_back(meeting: str, loaded_state: bool) -> dict[str, Any]:
    """Rank 1 again, with weights, a learning rate and perhaps a state of its own."""
    wait_for_file(Path(meeting) / "alone")
    model = layer(1000.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    if loaded_state:
        for p in model.parameters():
            plain.state[p]["momentum_buffer"] = torch.full_like(p, 5.0)
    optimizer = psplus.wrap(plain, "asp", model=model)
    found = {
        "values": model.weight.detach().clone(),
        "lr": optimizer.param_groups[0]["lr"],
        "buffers": [s["momentum_buffer"].clone() for s in plain.state.values()],
    }
    (Path(meeting) / "back").touch()
    optimizer.synchronize()
    found["final"] = model.weight.detach().clone()
    optimizer.close()
    return found


@pytest.mark.parametrize("loaded_state", [False, True], ids=["fresh", "checkpoint"])
def test_c24_who_comes_back_takes_the_servers_values(clean_job: Path, loaded_state: bool) -> None:
    stayed, returned, told = run_lives(stay, die, come_back, clean_job, loaded_state=loaded_state)

    # Its stale weights neither stayed with it nor reached the server.
    assert stayed["before"] < -20
    assert stayed["unmoved"]
    assert torch.equal(returned["values"], torch.full((2, 3), stayed["before"]))
    assert torch.equal(returned["final"], stayed["final"])
    assert torch.equal(stayed["final"], returned["values"])
    # Without a state it begins as the job did; with one it has loaded a checkpoint and keeps it.
    assert returned["lr"] == (0.125 if loaded_state else 1.0)
    assert len(returned["buffers"]) == (2 if loaded_state else 0)
    assert "publish()" in told
