"""How a job begins: first values, late and missing workers, jobs side by side, leftovers."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import gradients_at, make_model, values_of
from torch import nn
from workers import start_worker, wait_for_file, wait_workers

import psplus

Workers = Callable[..., list[Any]]


def wrap_after(delays: list[float]) -> dict[str, Any]:
    """Each rank has its own values, learning rate and optimizer state, and its own delay."""
    rank = psplus.config.read().rank
    time.sleep(delays[rank])
    model = make_model(seed=rank)
    plain = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    for parameter in model.parameters():
        plain.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(rank))
    optimizer = psplus.wrap(plain, "asp", model=model)
    found = {
        "values": values_of(model),
        "lr": optimizer.param_groups[0]["lr"],
        "buffers": [s["momentum_buffer"].clone() for s in plain.state.values()],
        "inner": optimizer.param_groups is plain.param_groups,
    }
    optimizer.close()
    return found


@pytest.mark.parametrize("delays", [[0.7, 0.0, 0.4], [0.0, 0.5, 0.2]])
def test_c59_everybody_begins_as_rank_0(workers: Workers, delays: list[float]) -> None:
    found = workers(wrap_after, 3, delays=delays)
    expected = values_of(make_model(seed=0))
    for of_rank in found:
        assert of_rank["lr"] == pytest.approx(0.1)
        assert of_rank["inner"]
        assert all(torch.equal(b, torch.zeros_like(b)) for b in of_rank["buffers"])
        for name, value in expected.items():
            assert torch.equal(of_rank["values"][name], value), name


def wrap_alone(timeout: float) -> dict[str, Any]:
    model = make_model()
    began = time.monotonic()
    with pytest.raises(psplus.TimeoutError) as caught:
        psplus.wrap(torch.optim.SGD(model.parameters(), 0.1), model=model, timeout=timeout)
    return {"seconds": time.monotonic() - began, "message": str(caught.value)}


def test_c68_a_peer_that_never_comes_is_named(clean_job: Path) -> None:
    process = start_worker(wrap_alone, 0, 3, clean_job, secrets.token_hex(8), timeout=1.0)
    (ended,) = wait_workers([process], clean_job, limit=30)
    assert ended.status == 0, ended.stderr
    assert "1 of 3 workers joined" in ended.result["message"]
    assert "1, 2" in ended.result["message"]
    assert 1.0 <= ended.result["seconds"] < 3.0


def train_job(offset: float) -> dict[str, Any]:
    """Each rank's gradient is constant, so the final values are known."""
    model = nn.Linear(3, 2)
    rank = psplus.config.read().rank
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(offset)
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=1.0), "asp", model=model)
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0 * (rank + 1))
        optimizer.step()
    optimizer.synchronize()
    result = values_of(model)
    optimizer.close()
    return result


def test_jobs_side_by_side_do_not_meet(clean_job: Path) -> None:
    folders, processes = [], []
    for number in range(3):
        folder = clean_job / str(number)
        folder.mkdir()
        job = secrets.token_hex(8)
        folders.append(folder)
        processes.append(
            [
                start_worker(train_job, rank, 2, folder, job, offset=100.0 * number)
                for rank in range(2)
            ]
        )
    for number, (folder, pair) in enumerate(zip(folders, processes, strict=True)):
        for ended in wait_workers(pair, folder, limit=60):
            assert ended.status == 0, ended.stderr
            # 10 steps of (2 + 4) / 2
            for value in ended.result.values():
                assert torch.equal(value, torch.full_like(value, 100.0 * number - 30.0))


def two_wrappers() -> dict[str, Any]:
    """A BSP and an SSP wrapper in one process; rank 1 is a step ahead on the second one."""
    rank = psplus.config.read().rank
    first, second = nn.Linear(4, 3), nn.Linear(2, 5)
    with torch.no_grad():
        for parameter in [*first.parameters(), *second.parameters()]:
            parameter.zero_()
    a = psplus.wrap(torch.optim.SGD(first.parameters(), lr=1.0), "bsp", model=first)
    b = psplus.wrap(
        torch.optim.SGD(second.parameters(), lr=1.0), "ssp", model=second, staleness_bound=1
    )
    for step in range(6):
        for parameter in first.parameters():
            parameter.grad = torch.full_like(parameter, float(rank + 1))
        a.step()
        if rank == 0:
            time.sleep(0.05)
        for _ in range(1 + (rank == 1 and step == 0)):
            for parameter in second.parameters():
                parameter.grad = torch.full_like(parameter, 10.0)
            b.step()
            clocks = b.step_vector  # its gate was closed until rank 0 had stepped
            assert clocks[rank] - clocks.min() <= 1
        # BSP: after each step everybody has the same.
        for parameter in first.parameters():
            assert torch.equal(parameter, torch.full_like(parameter, -1.5 * (step + 1)))
    b.synchronize()
    result = {
        "first": values_of(first),
        "second": values_of(second),
        "vectors": [a.step_vector, b.step_vector],
        "pushes": [a.stats.pushes, b.stats.pushes],
        "waited": b.stats.wait_seconds,
    }
    a.close()
    b.close()
    return result


def test_two_wrappers_in_one_process_are_apart(workers: Workers) -> None:
    for rank, found in enumerate(workers(two_wrappers, 2)):
        assert found["vectors"][0].tolist() == [6, 6]
        assert found["vectors"][1].tolist() == [6, 7]
        assert found["pushes"] == [6, 6 + rank]
        for value in found["first"].values():
            assert torch.equal(value, torch.full_like(value, -9.0))
        for value in found["second"].values():  # 13 pushes of 10 / 2
            assert torch.equal(value, torch.full_like(value, -65.0))
        assert rank == 0 or found["waited"] > 0.05


def wrap_shape(features: list[int]) -> str:
    rank = psplus.config.read().rank
    model = nn.Linear(10, features[rank])
    began = time.monotonic()
    try:
        psplus.wrap(torch.optim.SGD(model.parameters(), 0.1), model=model, timeout=3.0)
    except psplus.LayoutMismatch as error:
        assert time.monotonic() - began < 2  # the time-out is three
        return f"{type(error).__name__}: {error}"
    return "started"


def test_c25_a_different_shape_is_named_on_the_offending_rank(workers: Workers) -> None:
    found = workers(wrap_shape, 2, features=[5, 6])
    (first,) = [rank for rank in range(2) if "the job cannot begin" in found[rank]]
    second = 1 - first
    for text in found:
        assert text.startswith("LayoutMismatch: ")
        assert f"[{5 + second}, 10] on rank {second}, but" in text
        assert "'weight'" in text
        assert f"[{6 - second}, 10] in the job" in text
    assert f"rank {second} was refused and has ended" in found[first]


def train_then_leave(steps: list[int], scheme: str) -> dict[str, Any]:
    """Ranks make different numbers of steps; who has finished leaves."""
    rank = psplus.config.read().rank
    model = make_model()
    optimizer = psplus.wrap(
        torch.optim.SGD(model.parameters(), 0.01), scheme, model=model, timeout=10.0
    )
    for step in range(steps[rank]):
        gradients_at(model, rank, step)
        optimizer.step()
    vector = optimizer.step_vector
    optimizer.close()
    return {"own": int(vector[rank])}


@pytest.mark.parametrize("scheme", ["bsp", "asp", "ps+"])
def test_uneven_numbers_of_steps_hang_nobody(workers: Workers, scheme: str) -> None:
    found = workers(train_then_leave, 3, steps=[5, 0, 12], scheme=scheme)
    # Under PS+ the last push may still be on its way when the vector is read.
    allowance = 1 if scheme == "ps+" else 0
    for of_rank, steps in zip(found, [5, 0, 12], strict=True):
        assert steps - allowance <= of_rank["own"] <= steps


def stay_attached(meeting: str) -> str:
    """Attaches and stays, to meet whoever is wrong."""
    native = psplus.connect().attach(straggler_timeout=30.0)
    (Path(meeting) / "attached").write_text(str(os.getpid()))
    wait_for_file(Path(meeting) / "refused")
    return f"{native.num_workers}"


def attach_wrongly(meeting: str) -> str:
    wait_for_file(Path(meeting) / "attached")
    try:
        with pytest.raises(psplus.ConfigError) as caught:
            wrap_one()
    finally:
        (Path(meeting) / "refused").touch()
    return str(caught.value)


def wrap_one() -> psplus.DistributedOptimizer:
    model = make_model()
    return psplus.wrap(torch.optim.SGD(model.parameters(), 0.1), model=model, timeout=20.0)


@pytest.mark.parametrize(
    ("rank", "world", "message"),
    [
        (0, 2, "rank 0 is attached already, as process {process}; give each worker a RANK"),
        (1, 3, "rank 1 says WORLD_SIZE is 3, but this job was started with 2; stop the other job"),
    ],
    ids=["two of one rank", "another world size"],
)
def test_a_worker_that_contradicts_another_is_refused(
    clean_job: Path, rank: int, world: int, message: str
) -> None:
    job = secrets.token_hex(8)
    folders = [clean_job / name for name in ("right", "wrong")]
    for folder in folders:
        folder.mkdir()
    right = start_worker(stay_attached, 0, 2, folders[0], job, meeting=str(clean_job))
    wrong = start_worker(attach_wrongly, rank, world, folders[1], job, meeting=str(clean_job))
    try:
        for process, folder in ((right, folders[0]), (wrong, folders[1])):
            (err,) = folder.glob("*.err")
            assert process.wait(60) == 0, err.read_text()
    finally:
        for process in (right, wrong):
            process.kill()
            process.wait()
    process_of_right = (clean_job / "attached").read_text()
    told = torch.load(folders[1] / f"{rank}.pt", weights_only=True)
    assert told.startswith(message.format(process=process_of_right))
    assert torch.load(folders[0] / "0.pt", weights_only=True) == "1"  # and stays in the job
