"""Each error of this version, triggered for real."""

import builtins
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import gradients_at, make_model, values_of
from torch import nn
from workers import start_worker, wait_workers

import psplus

Workers = Callable[..., list[Any]]


def wrapped(model: nn.Module, scheme: str = "asp", **options: Any) -> psplus.DistributedOptimizer:
    session = psplus.connect(server="always")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return psplus.wrap(optimizer, scheme, model=model, session=session, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    gradients_at(model, 0, number)
    optimizer.step()


def test_the_family() -> None:
    for name in ("TimeoutError", "PeerLost", "LayoutMismatch", "AuthenticationError"):
        assert issubclass(getattr(psplus, name), psplus.Error)
    for name in ("CheckpointError", "ConfigError"):
        assert issubclass(getattr(psplus, name), psplus.Error)
    assert issubclass(psplus.TimeoutError, builtins.TimeoutError)
    assert issubclass(psplus.LayoutMismatch, ValueError)
    assert issubclass(psplus.ConfigError, ValueError)


def outside_writes() -> None:
    def by_method(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.add_(1.0)

    def behind_the_counter(p: nn.Parameter) -> None:
        p.data.mul_(2.0)

    def other_memory(p: nn.Parameter) -> None:
        p.data = p.data + 1.0

    model = make_model()
    optimizer = wrapped(model)
    for number, write in enumerate((by_method, behind_the_counter, other_memory)):
        write(model[2].weight)  # before the first step too
        before = values_of(model)
        gradients_at(model, 0, number)
        with pytest.raises(psplus.Error, match=r"'2.weight' was changed outside.*publish\(\)"):
            optimizer.step()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        optimizer.publish()
        step(model, optimizer, number)
        assert torch.allclose(model[2].weight, before["2.weight"], atol=0.5)

    other_memory(model[0].bias)
    with optimizer.evaluation():
        pass
    with pytest.raises(psplus.Error, match=r"'0.bias' was changed outside"):
        optimizer.step()
    optimizer.pull()
    step(model, optimizer)

    relaxed_model = make_model()
    relaxed = wrapped(relaxed_model, outside_writes="ignore")
    by_method(relaxed_model[0].bias)
    step(relaxed_model, relaxed)


def no_false_alarm() -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = wrapped(model)
    saved = optimizer.state_dict()
    for number in range(3):
        optimizer.load_state_dict(saved)
        with optimizer.evaluation():
            model(torch.randn(4, 6))
        model[1].running_mean.add_(1.0)
        model.requires_grad_(True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step(model, optimizer, number)
        optimizer.synchronize()
    view = model[0].weight.t().contiguous().t()  # permuted memory, and a parameter of NaNs
    odd = nn.Parameter(view.detach())
    with torch.no_grad():
        odd.fill_(float("nan"))
    odd_optimizer = psplus.wrap(
        torch.optim.SGD([odd], lr=1.0), session=psplus.connect(server="always")
    )
    odd_optimizer.step()
    odd_optimizer.step()
    assert odd.isnan().all()


def bad_gradients() -> None:
    model = make_model()
    optimizer = wrapped(model, nonfinite="raise")
    before = values_of(model)
    gradients_at(model, 0, 0)
    model[0].bias.grad[3] = float("inf")
    with pytest.raises(psplus.Error, match=r"'0.bias' is not finite on rank 0 at step 1"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    step(model, optimizer)
    assert optimizer.stats.pushes == 1

    # A finite gradient whose update is not: nothing is pushed, the servers' values are taken.
    model = make_model()
    optimizer = wrapped(model)
    optimizer.param_groups[0]["lr"] = 3e38
    gradients_at(model, 0, 0)
    model[2].weight.grad.fill_(1e10)
    before = values_of(model)
    with pytest.warns(RuntimeWarning, match="the update of parameter"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def wrong_moments() -> None:
    model = make_model()
    optimizer = wrapped(model)
    with pytest.raises(psplus.ConfigError, match="add the group"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(psplus.Error, match="copied or pickled"):
        optimizer.__getstate__()
    with optimizer.evaluation():
        for call in (optimizer.step, optimizer.pull, optimizer.publish, optimizer.synchronize):
            with pytest.raises(psplus.Error, match=r"inside evaluation\(\)"):
                call()
    optimizer._inner.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(psplus.ConfigError, match=r"before psplus\.wrap"):
        optimizer.step()
    optimizer.close()
    optimizer.close()
    with pytest.raises(psplus.Error, match=r"step\(\) after close"):
        optimizer.step()
    optimizer.state_dict()

    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = wrapped(embedding)
    embedding(torch.tensor([1])).sum().backward()
    before = values_of(embedding)
    with pytest.raises(psplus.ConfigError, match="'weight' is sparse"):
        optimizer.step()
    assert torch.equal(embedding.weight, before["weight"])

    model = make_model()
    optimizer = wrapped(model, lr_scale=lambda _: -1.0)
    gradients_at(model, 0, 0)
    with pytest.raises(psplus.ConfigError, match=r"returned -1\.0"):
        optimizer.step()


def in_a_forked_child() -> None:
    model = make_model()
    optimizer = wrapped(model)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        told = "nothing"
        try:
            optimizer.step()
        except psplus.Error as error:
            told = str(error)
        os.write(write, told.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "was forked from worker process" in os.read(read, 1000).decode()
    step(model, optimizer)


def alone() -> None:
    outside_writes()
    no_false_alarm()
    bad_gradients()
    wrong_moments()
    in_a_forked_child()


def test_errors_of_one_worker_with_a_server(workers: Workers) -> None:
    workers(alone, 1)


def wrap_lbfgs() -> None:
    model = make_model()
    with pytest.raises(psplus.ConfigError, match="LBFGS"):
        psplus.wrap(torch.optim.LBFGS(model.parameters()), model=model)


def test_c21_lbfgs_is_refused_for_several_workers(workers: Workers) -> None:
    workers(wrap_lbfgs, 2)


def wait_for_one_that_has_stopped() -> dict[str, Any]:
    """Rank 1 stops itself after three steps; rank 0 waits for it under BSP."""
    rank = psplus.config.read().rank
    model = make_model()
    optimizer = wrapped(model, "bsp", timeout=1.0, straggler_timeout=1.0)
    for number in range(3):
        step(model, optimizer, number)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(psplus.TimeoutError) as caught:
        step(model, optimizer, 3)
    return {"seconds": time.monotonic() - began, "message": str(caught.value)}


def test_a_frozen_peer_is_named_by_the_timeout(clean_job: Path) -> None:
    job = secrets.token_hex(8)
    processes = [
        start_worker(wait_for_one_that_has_stopped, rank, 2, clean_job, job) for rank in range(2)
    ]
    try:
        (ended,) = wait_workers(processes[:1], clean_job, limit=30)
    finally:
        processes[1].kill()
        processes[1].wait()
    assert ended.status == 0, ended.stderr
    assert "rank 1" in ended.result["message"]
    assert 1.0 <= ended.result["seconds"] < 3.0


def lose_the_server(executable: str, broken: bool) -> dict[str, Any]:
    """The server dies and no other can be started."""
    model = make_model()
    session = psplus.connect(server="always", timeout=2.0)
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), "asp", session=session, timeout=2.0
    )
    step(model, optimizer)
    native = session.attach(straggler_timeout=10.0)
    Path(executable).unlink()
    if broken:
        shutil.copy("/bin/false", executable)
    os.kill(native.server_pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(psplus.Error) as caught:
        step(model, optimizer)
    return {
        "seconds": time.monotonic() - began,
        "kind": type(caught.value).__name__,
        "message": str(caught.value),
    }


@pytest.mark.parametrize("broken", [True, False], ids=["broken", "missing"])
def test_a_server_that_cannot_be_replaced(workers: Workers, clean_job: Path, broken: bool) -> None:
    executable = clean_job / "psplus-server"
    shutil.copy(psplus.config.server_path(), executable)
    (found,) = workers(
        lose_the_server,
        1,
        environment={"PSPLUS_SERVER": str(executable)},
        executable=str(executable),
        broken=broken,
    )
    if broken:
        assert found["kind"] == "PeerLost"
        assert "server.log" in found["message"]
    else:
        assert found["kind"] == "ConfigError"
        assert str(executable) in found["message"]
    assert found["seconds"] < 5.0
