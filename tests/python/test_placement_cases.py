"""Cases of others that concern servers which step."""

import ctypes
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from placed import PLACED, assert_close
from problems import loss_at, make_model, values_of
from torch import nn
from workers import wait_for_file

import psplus
from psplus.optim.gradient_turn import GradientTurn

Workers = Callable[..., list[Any]]


def losses(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[float]:
    """Fifty steps on one batch."""
    found = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = loss_at(model, 0, 0)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def regress(name: str, server: str) -> list[float]:
    model = make_model(dtype=torch.float64)
    session = psplus.connect(server=server)
    optimizer = psplus.wrap(
        PLACED[name](list(model.parameters())),
        "asp",
        model=model,
        session=session,
        placement="server",
    )
    found = losses(optimizer, model)
    optimizer.close()
    session.close()
    return found


@pytest.mark.parametrize("server", ["auto", "always"])
def test_c23_one_worker_with_an_optimizer_on_the_server(workers: Workers, server: str) -> None:
    (found,) = workers(regress, 1, name="momentum", server=server)
    model = make_model(dtype=torch.float64)
    expected = losses(PLACED["momentum"](list(model.parameters())), model)
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[-1] < 0.5 * found[0]


def poison_slots(value: float) -> int:
    """Write NaN wherever a double of this value stands in memory shared with the server."""
    old, new = struct.pack("d", value), struct.pack("d", math.nan)
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if "memfd:psplus" not in line or not rights.startswith("rw"):
            continue
        begin, end = (int(address, 16) for address in span.split("-"))
        memory = (ctypes.c_char * (end - begin)).from_address(begin)
        for match in re.finditer(re.escape(old), memory.raw):
            memory[match.start() : match.start() + 8] = new  # type: ignore[assignment]
            found += 1
    return found


def push_a_bad_rate(meeting: str) -> tuple[int, str]:
    """Rank 1: what no check of its own has seen, as from a worker with damaged memory."""
    model = make_model(dtype=torch.float64)
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), "asp", model=model, placement="server"
    )
    optimizer.param_groups[0]["lr"] = 0.123456789  # wrap() gave it rank 0's
    loss_at(model, 1, 0).backward()
    optimizer.step()
    publish = GradientTurn.publish
    poisoned = 0

    def publish_poisoned(turn: GradientTurn, lam: float) -> None:
        nonlocal poisoned
        poisoned += poison_slots(0.123456789)
        publish(turn, lam)

    wait_for_file(Path(meeting) / "trains")

    def go_on() -> None:
        for _ in range(1000):
            optimizer.step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientTurn, "publish", publish_poisoned)
        with pytest.raises(psplus.Error) as caught:
            go_on()
    (Path(meeting) / "expelled").touch()
    return poisoned, str(caught.value)


def train_beside(meeting: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Rank 0: the same server serves it, before and after."""
    model = make_model(dtype=torch.float64)
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), "asp", model=model, placement="server"
    )
    server = [optimizer.stats.server_restarts]
    while not (Path(meeting) / "expelled").exists():
        optimizer.zero_grad()
        loss_at(model, 0, 0).backward()
        optimizer.step()
        (Path(meeting) / "trains").touch()
    while optimizer.stats.num_workers == 2:
        optimizer.step()
    pushes = optimizer.stats.pushes
    for _ in range(5):
        optimizer.step()
    server += [optimizer.stats.server_restarts, optimizer.stats.pushes - pushes]
    values = values_of(model)
    optimizer.close()
    return server, values


def meet(meeting: str) -> Any:
    rank = psplus.config.read().rank
    return push_a_bad_rate(meeting) if rank == 1 else train_beside(meeting)


def test_c27_an_update_that_fails_on_the_server(workers: Workers, clean_job: Path) -> None:
    (server, values), (poisoned, message) = workers(meet, 2, meeting=str(clean_job))
    assert poisoned
    assert re.search(r"options of parameter '0\.weight'.*not finite", message), message
    assert server == [0, 0, 5]
    assert all(bool(v.isfinite().all()) for v in values.values())


def grow(scheme: str, bound: int | None) -> dict[str, torch.Tensor]:
    """Both add the second layer to the optimizer, at different steps."""
    rank = psplus.config.read().rank
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = psplus.wrap(
        torch.optim.SGD(model[0].parameters(), lr=0.5),
        scheme,
        model=model,
        staleness_bound=bound,
        placement="server",
        lr_scale="constant",
    )
    for step in range(20):
        if step == 4 + 3 * rank:
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.25})
        for p in model.parameters():
            p.grad = torch.full_like(p, 8 * step + rank)
        optimizer.step()
    optimizer.synchronize()
    result = values_of(model)
    optimizer.close()
    return result


@pytest.mark.parametrize(("scheme", "bound"), [("asp", None), ("ssp", 2)])
def test_groups_added_at_different_steps(workers: Workers, scheme: str, bound: int | None) -> None:
    first = -0.25 * sum(8 * step + rank for rank in range(2) for step in range(20))
    second = -0.125 * sum(8 * step + rank for rank in range(2) for step in range(4 + 3 * rank, 20))
    expected = {
        f"{layer}.{name}": torch.full(shape, value, dtype=torch.float64)
        for layer, value, width in ((0, first, 3), (1, second, 2))
        for name, shape in (("weight", (2, width)), ("bias", (2,)))
    }
    for found in workers(grow, 2, scheme=scheme, bound=bound):
        assert_close(found, expected, 0.0)
