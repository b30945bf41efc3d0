"""Each error of this version, triggered for real."""

import builtins
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import gradients_at, make_model, values_of
from torch import nn
from workers import start_worker, stop_process, wait_for_file, wait_workers

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

    image = nn.Conv2d(3, 4, 3, dtype=torch.complex64)
    of_images = wrapped(image)
    image.to(memory_format=torch.channels_last)  # the same values
    for p in image.parameters():
        p.grad = torch.ones_like(p)
    of_images.step()
    image.weight.data[-1].imag += 1.0
    with pytest.raises(psplus.Error, match=r"'weight' was changed outside"):
        of_images.step()

    relaxed_model = make_model()
    relaxed = wrapped(relaxed_model, outside_writes="ignore")
    by_method(relaxed_model[0].bias)
    step(relaxed_model, relaxed)


def other_kinds(change: str) -> list[str]:
    model = make_model()
    optimizer = wrapped(model)
    step(model, optimizer)
    if change == "dtype":
        model.half()
    else:
        model[0].weight.data = torch.zeros(3, 3)
    gradients = [p.grad for p in model.parameters()]
    told = []
    for _ in range(2):  # the first look must not spoil the second
        for call in (optimizer.step, optimizer.publish, optimizer.pull, optimizer.synchronize):
            with pytest.raises(psplus.ConfigError) as caught:
                call()
            told.append(str(caught.value))
        with pytest.raises(psplus.ConfigError) as caught, optimizer.evaluation():
            pass
        told.append(str(caught.value))
    assert [p.grad for p in model.parameters()] == gradients
    optimizer.close()
    return told


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_another_shape_or_dtype_is_named_by_every_call(workers: Workers, change: str) -> None:
    (told,) = workers(other_kinds, 1, change=change)
    now = "torch.float16 of shape" if change == "dtype" else "torch.float32 of shape [3, 3]"
    for message in told:
        assert re.search(r"'0.weight' was wrapped as torch.float32 of shape \[\d+, \d+\]", message)
        assert f"but now is {now}" in message
        assert "wrap the optimizer again" in message


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


def more_than_the_machine_has() -> str:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    model = nn.Linear(kibibytes // 4, 1024, bias=False, device="meta")
    model.to_empty(device="cpu")  # address space that nothing has touched
    with pytest.raises(psplus.Error) as caught:
        wrapped(model, timeout=10.0)
    return str(caught.value)


def test_more_memory_than_there_is(workers: Workers) -> None:
    (message,) = workers(more_than_the_machine_has, 1)
    assert re.search(r"no memory for \S+: \d+ bytes asked for, \d+ bytes left \(", message)
    assert "use a smaller model or fewer workers" in message


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
    with pytest.raises(psplus.ConfigError, match=r"still open; close\(\) it first"):
        psplus.wrap(optimizer._inner, "asp", model=model)
    with pytest.raises(psplus.Error, match="copied or pickled"):
        optimizer.__getstate__()
    with optimizer.evaluation():
        for call in (optimizer.step, optimizer.pull, optimizer.publish, optimizer.synchronize):
            with pytest.raises(psplus.Error, match=r"inside evaluation\(\)"):
                call()
    group = optimizer.param_groups[0]["params"]
    kept, group[0] = group[0], nn.Parameter(group[0].detach().clone())
    with pytest.raises(psplus.ConfigError, match="another tensor stands in"):
        optimizer.step()
    group[0] = kept
    optimizer._inner.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(psplus.ConfigError, match=r"add_param_group\(\) of the wrapped"):
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


def wait_for_one_that_sleeps(scheme: str, **bound: int) -> list[str]:
    """Rank 1 is busy elsewhere, longer than the time-out: with a checkpoint, a validation."""
    rank = psplus.config.read().rank
    told: list[str] = []
    logging.getLogger("psplus").addFilter(lambda record: told.append(record.getMessage()) or True)
    model = make_model()
    optimizer = wrapped(model, scheme, timeout=1.0, straggler_timeout=30.0, **bound)
    for number in range(4):
        if rank == 1 and number == 2:
            time.sleep(3.0)
        step(model, optimizer, number)
    if rank == 1:
        time.sleep(2.5)
    optimizer.synchronize()
    optimizer.close()
    return told


@pytest.mark.parametrize(
    ("scheme", "bound"), [("bsp", {}), ("ssp", {"staleness_bound": 0}), ("ps+", {})]
)
def test_a_busy_peer_is_not_silent(workers: Workers, scheme: str, bound: dict[str, int]) -> None:
    waited, slept = workers(wait_for_one_that_sleeps, 2, scheme=scheme, **bound)
    assert slept == []
    in_step = scheme != "ps+"  # whose bound is not reached
    assert len(waited) == 1 + in_step, waited
    for line in waited:
        assert re.search(r"rank 0 waited 1\.\d s for .*; rank 1 \(process \d+\) is at step", line)
        assert line.endswith("and alive; it goes on waiting, straggler_timeout is 30 s")


def wait_at_a_barrier_alone() -> str:
    rank = psplus.config.read().rank
    model = make_model()
    optimizer = wrapped(model, "asp", timeout=1.0, straggler_timeout=1.5)
    for number in range(3 * rank + 1):  # who is missing is ahead
        step(model, optimizer, number)
    if rank == 1:
        time.sleep(4.0)
        return ""
    with pytest.raises(psplus.TimeoutError) as caught:
        optimizer.synchronize()
    return str(caught.value)


def test_who_misses_at_a_barrier_is_named(workers: Workers) -> None:
    message, _ = workers(wait_at_a_barrier_alone, 2)
    assert "the other workers at a barrier; rank 1 (process" in message


def freeze_the_server() -> str:
    model = make_model()
    optimizer = wrapped(model, "asp", timeout=1.0)
    native = psplus.session._attachment.native
    assert native is not None
    stop_process(native.server_pid)
    try:
        with pytest.raises(psplus.TimeoutError) as caught:
            step(model, optimizer)
    finally:
        os.kill(native.server_pid, signal.SIGCONT)
    optimizer.pull()
    other_model = make_model()
    other = wrapped(other_model, "asp")
    stop_process(native.server_pid)
    try:
        with pytest.raises(psplus.TimeoutError, match="not applied in time"):
            optimizer.close(timeout=0.3)
        with pytest.raises(psplus.Error, match="after close"):
            optimizer.step()
        assert optimizer.closed
    finally:
        os.kill(native.server_pid, signal.SIGCONT)
    optimizer.close()  # again, and for good; no late answer reaches another question
    optimizer.close()
    step(other_model, other)
    other.close()
    return str(caught.value)


def test_a_frozen_server_is_named(workers: Workers) -> None:
    (message,) = workers(freeze_the_server, 1)
    assert "the server of this job (process" in message
    assert "has given no sign of life for 1." in message


def begin_wrongly(mistake: str) -> dict[str, Any]:
    """Rank 1 makes a mistake, is told, and does it right while rank 0 waits."""
    rank = psplus.config.read().rank
    told = ""
    if rank == 1:
        native = psplus.connect().attach(straggler_timeout=30.0)
        while native.num_workers < 2:
            time.sleep(0.01)
        time.sleep(1.0)  # rank 0 has registered: who comes first is right
        model = make_model()
        kind = torch.optim.Adam if mistake == "optimizer" else torch.optim.SGD
        parameters = list(model.parameters())[: 1 if mistake == "layout" else None]
        scheme = {"mode": "bsp", "scheme": "asp"}.get(mistake, "ps+")
        with pytest.raises(psplus.Error) as caught:
            psplus.wrap(kind(parameters, lr=0.1), scheme)
        told = f"{type(caught.value).__name__}: {caught.value}"
    model = make_model()
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "ps+")
    for number in range(3):
        step(model, optimizer, number)
    optimizer.synchronize()
    found = {"values": values_of(model), "told": told, "pushes": optimizer.step_vector}
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("layout", "LayoutMismatch: "),
        ("mode", "ConfigError: wrapper 0 is bsp"),
        ("scheme", "ConfigError: the scheme is 'asp' on rank 1, but 'ps+' on rank 0"),
        ("optimizer", "ConfigError: the optimizer is 'Adam' on rank 1, but 'SGD' on rank 0"),
    ],
)
def test_a_refused_wrap_can_be_corrected(workers: Workers, mistake: str, message: str) -> None:
    zero, one = workers(begin_wrongly, 2, mistake=mistake)
    assert one["told"].startswith(message), one["told"]
    for found in (zero, one):
        assert found["pushes"].tolist() == [3, 3]
        for name, value in zero["values"].items():
            assert torch.equal(found["values"][name], value)


def wrap_without_buffers(without: int) -> str:
    """A model with BatchNorm, which one rank does not name."""
    rank = psplus.config.read().rank
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = model.named_parameters() if rank == without else None
    try:
        psplus.wrap(
            optimizer,
            "asp",
            model=None if rank == without else model,
            named_parameters=named,
            timeout=5.0,
        )
    except psplus.Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (0, "given on rank 1 and not given on rank 0"),
        (1, "not given on rank 1 and given on rank 0"),
    ],
)
def test_buffers_that_only_one_worker_names(workers: Workers, without: int, message: str) -> None:
    zero, one = workers(wrap_without_buffers, 2, without=without)
    assert zero == ""
    assert one.startswith("ConfigError: buffer '1.num_batches_tracked' is " + message)


def end_at_once() -> str:
    """Rank 1 attaches and is gone; rank 0 is told so, not that nobody ever came."""
    rank = psplus.config.read().rank
    native = psplus.connect().attach(straggler_timeout=30.0)
    if rank == 1:
        while native.num_workers < 2:
            time.sleep(0.01)
        return str(os.getpid())
    with pytest.raises(psplus.TimeoutError) as caught:
        wrapped(make_model(), timeout=1.0)
    return str(caught.value)


def test_a_peer_that_came_and_ended_is_named(workers: Workers) -> None:
    message, process = workers(end_at_once, 2)
    assert "1 of 2 workers joined; rank 1 is missing" in message
    assert f"Rank 1 came as process {process} and ended" in message


def change_settings() -> list[str]:
    """A worker attaches once; what it is attached as does not change behind its back."""
    model = make_model()
    optimizer = wrapped(model)
    told = []
    for name, value in {"PSPLUS_JOB": "another", "PSPLUS_HOST_ID": "elsewhere"}.items():
        before = os.environ.get(name)
        os.environ[name] = value
        with pytest.raises(psplus.ConfigError) as caught:
            wrapped(make_model())
        told.append(str(caught.value))
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
    step(model, optimizer)  # as before
    wrapped(make_model()).close()
    psplus.connect().close()
    os.environ["PSPLUS_JOB"] = "another"
    wrapped(make_model()).close()
    return told


def test_settings_that_change_while_attached_are_refused(workers: Workers) -> None:
    (told,) = workers(change_settings, 1)
    for message, change in zip(told, ["job='another'", "host='elsewhere'"], strict=True):
        attached, _, now = message.partition("the settings now say")
        assert attached.startswith("this process is attached as JobConfig(rank=0, world_size=1,")
        assert change in now
        assert change not in attached
        assert "close the session before changing them" in now


def attach_to_a_frozen_server(meeting: str) -> str:
    """Rank 0 freezes the server; rank 1 can connect to it, but is given no answer."""
    ready, done = Path(meeting) / "ready", Path(meeting) / "done"
    if psplus.config.read().rank == 0:
        native = psplus.connect().attach(straggler_timeout=30.0)
        stop_process(native.server_pid)
        ready.touch()
        try:
            wait_for_file(done)
        finally:
            os.kill(native.server_pid, signal.SIGCONT)
        return ""
    wait_for_file(ready)
    try:
        with pytest.raises(psplus.TimeoutError) as caught:
            psplus.connect(timeout=1.0).attach(straggler_timeout=30.0)
    finally:
        done.touch()
    return str(caught.value)


def test_a_server_that_does_not_answer_is_named(workers: Workers, clean_job: Path) -> None:
    _, message = workers(attach_to_a_frozen_server, 2, meeting=str(clean_job))
    assert message.startswith("rank 1 on host ")
    assert "could not attach to the server of this job within 1 s" in message
