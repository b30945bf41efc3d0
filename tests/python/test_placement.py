"""Servers that hold the optimizer: what they compute, against the plain optimizer."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import PLACED, assert_close, state_of, train, two_groups
from problems import OptimizerMaker, gradients_at, make_model, values_of
from torch import nn

import psplus

STEPS = 12
Workers = Callable[..., list[Any]]


def train_through_a_server(names: list[str], dtype: str, pull: str) -> dict[str, Any]:
    results = {}
    session = psplus.connect(server="always")
    for name in names:
        model = make_model(dtype=getattr(torch, dtype))
        optimizer = psplus.wrap(
            two_groups(PLACED[name], model),
            "asp",
            model=model,
            session=session,
            placement="server",
            pull=pull,
        )
        train(optimizer, model, range(STEPS))
        assert not optimizer.state  # the servers have it
        results[name] = {"values": values_of(model), "state": state_of(optimizer)}
        optimizer.close()
        results[name]["state after close()"] = state_of(optimizer)
    session.close()
    return results


@pytest.mark.parametrize("pull", ["mapped", "buffered"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13)])
def test_one_worker_through_a_server_is_the_plain_optimizer(
    workers: Workers, dtype: str, tolerance: float, pull: str
) -> None:
    (found,) = workers(train_through_a_server, 1, names=list(PLACED), dtype=dtype, pull=pull)
    for name, make in PLACED.items():
        model = make_model(dtype=getattr(torch, dtype))
        optimizer = two_groups(make, model)
        train(optimizer, model, range(STEPS))
        expected = {"values": values_of(model), "state": state_of(optimizer)}
        expected["state after close()"] = expected["state"]
        assert_close(found[name], expected, tolerance, name)


def train_bfloat16() -> dict[str, Any]:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=2.0**-12, momentum=0.5),
        "asp",
        model=model,
        session=psplus.connect(server="always"),
        placement="server",
    )
    for _ in range(64):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
    optimizer.close()
    return {"weight": model.weight.detach().clone(), "buffer": buffer}


def test_servers_keep_float32_for_bfloat16_parameters(workers: Workers) -> None:
    (found,) = workers(train_bfloat16, 1)
    # Each step is far below half a unit in the last place of 1.0 in bfloat16.
    buffer, value = 0.0, 1.0
    for _ in range(64):
        buffer = 0.5 * buffer + 1.0
        value -= 2.0**-12 * buffer
    assert found["weight"].dtype == found["buffer"].dtype == torch.bfloat16
    assert torch.equal(found["weight"], torch.full((2, 3), value).to(torch.bfloat16))
    assert torch.equal(found["buffer"], torch.full((2, 3), buffer).to(torch.bfloat16))


def drop_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Rank 1 has none for a bias at odd steps; at every fourth nobody has one for another."""
    if rank == 1 and step % 2 == 1:
        model[0].bias.grad = None
    if step % 4 == 3:
        model[2].bias.grad = None


def train_bsp(names: list[str], kill: bool) -> dict[str, Any]:
    results = {}
    job = psplus.config.read()
    session = psplus.connect()
    for name in names:
        # In a job's first wrapper rank 0's values count, in later ones the first worker's.
        model = make_model(seed=job.rank if name == names[0] else 0, dtype=torch.float64)
        optimizer = psplus.wrap(
            PLACED[name](list(model.parameters())),
            "bsp",
            model=model,
            session=session,
            placement="server",
        )
        for step in range(STEPS):
            gradients_at(model, job.rank, step)
            drop_gradients(model, job.rank, step)
            if kill and job.rank == 0 and step % 4 == 2:
                os.kill(session.attach(straggler_timeout=10.0).server_pid, signal.SIGKILL)
            optimizer.step()
        optimizer.synchronize()
        results[name] = {"values": values_of(model), "state": state_of(optimizer)}
        if kill and job.rank == 0:
            attached = session.attach(straggler_timeout=10.0)
            # The other worker's successor may have served us before this session is back.
            deadline = time.monotonic() + 30.0
            while attached.server_restarts < STEPS // 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            results["restarts"] = attached.server_restarts
        optimizer.close()
    session.close()
    return results


def bsp_reference(make: OptimizerMaker, world_size: int) -> dict[str, Any]:
    """The plain optimizer on the mean gradients, absent ones being zeros."""
    model = make_model(dtype=torch.float64)
    optimizer = make(list(model.parameters()))
    for step in range(STEPS):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(world_size):
            gradients_at(model, rank, step)
            drop_gradients(model, rank, step)
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, torch.zeros_like(p)) + p.grad
        for name, p in model.named_parameters():
            p.grad = sums[name] / world_size if name in sums else None
        optimizer.step()
    return {"values": values_of(model), "state": state_of(optimizer)}


@pytest.mark.parametrize("world_size", [2, 3])
def test_bsp_is_the_plain_optimizer_on_mean_gradients(workers: Workers, world_size: int) -> None:
    found = workers(train_bsp, world_size, names=list(PLACED), kill=False)
    for name, make in PLACED.items():
        expected = bsp_reference(make, world_size)
        for of_rank in found:
            assert_close(of_rank[name], expected, 1e-12, name)


def test_state_survives_killed_servers(workers: Workers) -> None:
    found = workers(train_bsp, 2, names=["AMSGrad"], kill=True)
    expected = bsp_reference(PLACED["AMSGrad"], 2)
    for of_rank in found:
        assert_close(of_rank["AMSGrad"], expected, 1e-12)
    assert found[0]["restarts"] == 3


def train_apart() -> tuple[list[str], dict[str, Any]]:
    """Rank 1 sets another rate at steps 3 and 4."""
    rank = psplus.config.read().rank
    model = make_model(dtype=torch.float64)
    optimizer = psplus.wrap(
        PLACED["momentum"](list(model.parameters())), "bsp", model=model, placement="server"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 9.0 if rank == 1 and step in (3, 4) else 0.05
            gradients_at(model, rank, step)
            drop_gradients(model, rank, step)
            optimizer.step()
    optimizer.synchronize()
    values = values_of(model)
    optimizer.close()
    return [str(w.message) for w in caught], values


def test_bsp_steps_by_the_lowest_ranks_options_and_warns_the_others(workers: Workers) -> None:
    found = workers(train_apart, 2)
    expected = bsp_reference(PLACED["momentum"], 2)["values"]
    for _, values in found:
        assert_close(values, expected, 1e-12)
    assert found[0][0] == []
    (text,) = found[1][0]
    assert "rank 1 has other hyper-parameters at step 4 than a worker of lower rank" in text


def train_integers(scheme: str, bound: int | None) -> dict[str, Any]:
    rank = psplus.config.read().rank
    model = nn.Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5),
        scheme,
        model=model,
        staleness_bound=bound,
        placement="server",
        lr_scale="constant",
    )
    for step in range(40):
        for p in model.parameters():
            p.grad = torch.full_like(p, 8 * step + rank)
        if rank == 1 and step % 2 == 0:
            model.bias.grad = None
        optimizer.step()
    optimizer.synchronize()
    result = values_of(model)
    optimizer.close()
    return result


@pytest.mark.parametrize(("scheme", "bound"), [("asp", None), ("ssp", 1)])
def test_asynchronous_pushes_are_steps_at_a_share_of_the_rate(
    workers: Workers, scheme: str, bound: int | None
) -> None:
    found = workers(train_integers, 2, scheme=scheme, bound=bound)
    every = [8 * step + rank for rank in range(2) for step in range(40)]
    odd = [8 * step + 1 for step in range(1, 40, 2)]
    weight = -0.25 * sum(every)
    bias = -0.25 * (sum(8 * step for step in range(40)) + sum(odd))
    for of_rank in found:
        assert torch.equal(of_rank["weight"], torch.full((3, 5), weight, dtype=torch.float64))
        assert torch.equal(of_rank["bias"], torch.full((3,), bias, dtype=torch.float64))


def grow() -> list[Any]:
    rank = psplus.config.read().rank
    model = make_model(dtype=torch.float64)
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)  # no momentum, no state
    optimizer = psplus.wrap(inner, "bsp", model=model, placement="server")
    for step in range(8):
        if step == 3:
            optimizer.add_param_group(
                {"params": list(model[0].parameters()), "lr": 0.05, "momentum": 0.9}
            )
        gradients_at(model, rank, step)
        optimizer.step()
    optimizer.synchronize()
    result = [values_of(model), state_of(optimizer)]
    optimizer.close()
    return result


def test_an_added_group_keeps_state_of_its_own(workers: Workers) -> None:
    found = workers(grow, 2)
    model = make_model(dtype=torch.float64)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for step in range(8):
        if step == 3:
            optimizer.add_param_group(
                {"params": list(model[0].parameters()), "lr": 0.05, "momentum": 0.9}
            )
        sums = {}
        for rank in range(2):
            gradients_at(model, rank, step)
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] = sums.get(name, 0) + p.grad / 2
        for name, p in model.named_parameters():
            p.grad = sums[name]
        optimizer.step()
    state = {
        k: v for k, v in state_of(optimizer)["state"].items() if v["momentum_buffer"] is not None
    }
    for values, found_state in found:
        assert_close(values, values_of(model), 1e-12)
        assert_close(found_state["state"], state, 1e-12)


def run_cases() -> dict[str, Any]:
    """What one worker with a server sees of corners."""
    seen: dict[str, Any] = {}
    session = psplus.connect(server="always")
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = psplus.wrap(inner, "asp", model=model, session=session, placement="server")
    before = values_of(model)

    gradients_at(model, 0, 0)
    assert model[0].weight.grad is not None
    model[0].weight.grad[0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="is not finite"):
        optimizer.step()
    seen["unmoved"] = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    seen["skipped"] = (optimizer.stats.skipped_steps, optimizer.stats.step)

    calls.clear()
    gradients_at(model, 0, 0)
    seen["loss"] = optimizer.step(lambda: 17.0)
    seen["calls"] = list(calls)

    inner.param_groups[0]["momentum"] = 0.9
    with pytest.raises(psplus.ConfigError, match=r"'0\.weight'.* need more state than there is"):
        optimizer.step()
    inner.param_groups[0]["momentum"] = 0
    inner.param_groups[0]["lr"] = float("inf")
    with pytest.raises(psplus.ConfigError, match="have a value that is not finite"):
        optimizer.step()
    inner.param_groups[0]["lr"] = 0.1
    gradients_at(model, 0, 1)
    optimizer.step()  # the worker still counts
    seen["moved"] = not torch.equal(model[0].weight, before["0.weight"])
    optimizer.close()
    session.close()
    return seen


def test_corners_of_a_step(workers: Workers) -> None:
    (seen,) = workers(run_cases, 1)
    assert seen == {
        "unmoved": True,
        "skipped": (1, 1),
        "loss": 17.0,
        "calls": ["pre", "post"],
        "moved": True,
    }


class PullsFirst:
    """A scheme of a user's own."""

    name = "pulls first"
    mode = "async"
    staleness_bound = None
    policy = staticmethod(lambda staleness: 1.0)

    def step(self, turn: Any) -> None:
        turn.compute()
        turn.observe()
        turn.pull(1.0)
        turn.publish(1.0)


def pull_first() -> str:
    model = make_model()
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1),
        PullsFirst(),
        model=model,
        session=psplus.connect(server="always"),
        placement="server",
    )
    gradients_at(model, 0, 0)
    with pytest.raises(psplus.ConfigError) as raised:
        optimizer.step()
    optimizer.close()
    return str(raised.value)


def test_a_scheme_that_pulls_before_it_pushes_is_refused(workers: Workers) -> None:
    (text,) = workers(pull_first, 1)
    assert "scheme 'pulls first'" in text
    assert "use 'bsp', 'ssp' or 'asp'" in text


class Own(torch.optim.SGD):
    """May compute anything."""


@pytest.mark.parametrize(
    ("make", "scheme", "placement", "text"),
    [
        (torch.optim.SGD, "ps+", "server", "scheme 'ps\\+' .* use 'bsp', 'ssp' or 'asp'"),
        (torch.optim.RMSprop, "asp", "server", "takes SGD, Adam, AdamW, Adagrad, not RMSprop"),
        (Own, "asp", "server", "not Own"),
        (torch.optim.SGD, "asp", "moon", "placement must be 'worker' or 'server', got 'moon'"),
    ],
)
def test_what_servers_cannot_do_is_refused(
    make: Callable[..., torch.optim.Optimizer], scheme: str, placement: Any, text: str
) -> None:
    model = make_model()
    with pytest.raises(psplus.ConfigError, match=text):
        psplus.wrap(make(model.parameters(), lr=0.1), scheme, model=model, placement=placement)


def test_differentiable_optimizers_are_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(psplus.ConfigError, match="differentiable=True"):
        psplus.wrap(optimizer, "asp", model=model, placement="server")


def test_one_worker_without_a_server_is_the_plain_optimizer_bit_for_bit() -> None:
    for make in PLACED.values():
        models = [make_model(), make_model()]
        plain = make(list(models[0].parameters()))
        optimizer = psplus.wrap(
            make(list(models[1].parameters())), "asp", model=models[1], placement="server"
        )
        for model, one in zip(models, (plain, optimizer), strict=True):
            train(one, model, range(STEPS))
        optimizer.close()
        assert_close(values_of(models[1]), values_of(models[0]), 0.0)
        assert_close(state_of(optimizer)["state"], state_of(plain)["state"], 0.0)
