"""Groups that are added while servers and workers die, stop and come back."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_add_param_group import step_with_ones
from torch import nn
from workers import run_lives, stop_process, wait_for_file

import psplus
from psplus.session import _attachment

Workers = Callable[..., list[Any]]


def the_server_is_killed(pull: str) -> dict[str, Any]:
    """Its server dies around each addition; no push is lost or applied twice."""
    rank = psplus.config.read().rank
    first = nn.Parameter(torch.zeros(3))
    plain = torch.optim.SGD([first], lr=1.0)
    optimizer = psplus.wrap(plain, "asp", pull=pull)
    native = _attachment.native
    assert native is not None
    added = []
    for round_ in range(3):
        for _ in range(5):
            step_with_ones(optimizer)
        if rank == 0:
            os.kill(native.server_pid, signal.SIGKILL)
        added.append(nn.Parameter(torch.full((50_000,), 10.0 * (rank + 1))))
        optimizer.add_param_group({"params": [added[-1]]})
        if rank == round_ % 2:
            os.kill(native.server_pid, signal.SIGKILL)
        for _ in range(5):
            step_with_ones(optimizer)
    optimizer.synchronize()
    optimizer.close()
    return {"first": first.detach().clone(), "added": [p.detach().clone() for p in added]}


@pytest.mark.parametrize("pull", ["mapped", "buffered"])
def test_a_killed_server_loses_nothing(workers: Workers, pull: str) -> None:
    found = workers(the_server_is_killed, 2, pull=pull)
    for of_rank in found:
        assert torch.equal(of_rank["first"], torch.full((3,), -30.0))
        for number, value in enumerate(of_rank["added"]):
            steps = 5.0 + 10.0 * (2 - number)
            first_values = {10.0 - steps, 20.0 - steps}  # of whoever came first
            assert value[0].item() in first_values
            assert torch.equal(value, torch.full((50_000,), value[0].item()))
            assert torch.equal(value, found[0]["added"][number])


def beside_a_stopped_worker(meeting: str) -> float:
    first, added = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    plain = torch.optim.SGD([first], lr=1.0)
    optimizer = psplus.wrap(plain, "asp", timeout=3.0)
    here = Path(meeting)
    if psplus.config.read().rank == 1:
        (here / "pid.new").write_text(str(os.getpid()))
        (here / "pid.new").replace(here / "pid")
        wait_for_file(here / "done")
    else:
        wait_for_file(here / "pid")
        other = int((here / "pid").read_text())
        stop_process(other)
        try:
            with pytest.raises(psplus.TimeoutError, match="rank 1 gives no sign of life"):
                optimizer.add_param_group({"params": [added]})
        finally:
            os.kill(other, signal.SIGCONT)
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [added]})
        step_with_ones(optimizer)
        (here / "done").touch()
    optimizer.synchronize()
    optimizer.close()
    return added[0].item()


def test_a_stopped_worker_is_named(workers: Workers, clean_job: Path) -> None:
    assert workers(beside_a_stopped_worker, 2, meeting=str(clean_job)) == [-0.5, 0.0]


def two_groups(value: float, momentum: float) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.full((3,), value)) for _ in range(3)]
    plain = torch.optim.SGD(params[:1], lr=1.0, momentum=momentum)
    optimizer = psplus.wrap(plain, "asp")
    optimizer.add_param_group({"params": params[1:2], "lr": 0.5 * (1 + value)})
    optimizer.add_param_group({"params": params[2:], "lr": 0.25})
    return params, optimizer


def stay(meeting: str) -> list[float]:
    """Rank 0: trains before, while and after rank 1 is away."""
    params, optimizer = two_groups(0.0, 0.0)
    while int(optimizer.step_vector[1]) < 3 or optimizer.stats.num_workers == 2:
        step_with_ones(optimizer)
    for _ in range(4):
        step_with_ones(optimizer)
    values = [p[0].item() for p in params]
    (Path(meeting) / "alone").touch()
    wait_for_file(Path(meeting) / "back")
    optimizer.synchronize()
    values += [p[0].item() for p in params]
    optimizer.close()
    return values


def die() -> None:
    """Rank 1: pushes three times over all groups, then is killed."""
    _, optimizer = two_groups(0.0, 0.0)
    for _ in range(3):
        step_with_ones(optimizer)
    os.kill(os.getpid(), signal.SIGKILL)


def come_back(meeting: str) -> dict[str, Any]:
    wait_for_file(Path(meeting) / "alone")
    params, optimizer = two_groups(1000.0, 0.0)
    found = [p[0].item() for p in params]
    rates = [group["lr"] for group in optimizer.param_groups]
    step_with_ones(optimizer)
    (Path(meeting) / "back").touch()
    optimizer.synchronize()
    found += [p[0].item() for p in params]
    optimizer.close()
    return {"values": found, "rates": rates}


def test_who_comes_back_finds_the_groups_with_their_values(clean_job: Path) -> None:
    stayed, returned, _ = run_lives(stay, die, come_back, clean_job)
    assert returned["rates"] == [1.0, 0.5, 0.25]
    assert returned["values"][:3] == stayed[:3]
    assert returned["values"][3:] == stayed[3:]
    for before, after, rate in zip(stayed[:3], stayed[3:], returned["rates"], strict=True):
        assert after == before - rate / 2
