"""docs/optimizer.md: its blocks run, and it says nothing untrue that no other test looks at."""

import contextlib
import copy
import io
import os
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from problems import gradients_at, loss_at, make_model, values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset
from workers import REPOSITORY

import psplus
from psplus.optim import turn

Workers = Callable[..., list[Any]]
Optimizer = psplus.DistributedOptimizer


def run_the_blocks(place: str) -> dict[str, Any]:
    """All blocks of the page, one after the other, as they stand there."""
    os.chdir(place)
    page = (REPOSITORY / "docs" / "optimizer.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for _, block in blocks:
            exec(textwrap.dedent(block), names)
    return {
        "blocks": len(blocks),
        "said": said.getvalue(),
        "loss": float(names["loss"]),
        "accuracy": names.get("accuracy", 0.0),
        "values": values_of(names["model"]),
        "vector": names["optimizer"].step_vector.tolist(),
        "epochs": names["epoch"] + 1,
    }


def test_the_blocks_are_a_script(workers: Workers, clean_job: Any) -> None:
    found = workers(run_the_blocks, 2, place=str(clean_job))
    assert found[0]["blocks"] == 6
    assert found[0]["accuracy"] > 0.85
    assert "epoch 0: " in found[0]["said"]
    assert found[1]["said"] == ""
    steps = 25 * found[0]["epochs"] + 25  # and as many empty ones
    for of_rank in found:
        assert of_rank["epochs"] == found[0]["epochs"] < 10  # it has stopped early
        assert of_rank["vector"] == [steps, steps]
        assert all(torch.equal(v, found[0]["values"][k]) for k, v in of_rank["values"].items())
    saved = torch.load(clean_job / "checkpoint.pt", weights_only=True)
    assert torch.equal(saved["model"]["0.weight"], found[0]["values"]["0.weight"])
    assert len(saved["optimizer"]["state"]) == 6


def wrapped(
    scheme: str = "bsp", kind: Any = torch.optim.SGD, **options: Any
) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    return model, psplus.wrap(kind(model.parameters(), lr=0.1), scheme, model=model, **options)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


def hooks(rank: int, place: str) -> None:
    """Of the wrapped optimizer: the kernels still step. Of the inner one: part of the update."""
    fused = []
    run = turn.PreparedStep.run
    turn.PreparedStep.run = lambda self, *a: (fused.append(1), run(self, *a))[1]  # type: ignore
    model, optimizer = wrapped()
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    gradients_at(model, rank, 0)
    optimizer.step()
    assert (called, fused) == ([1], [1])
    turn.PreparedStep.run = run  # type: ignore
    optimizer.close()

    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.05, 0.05)

    inner.register_step_post_hook(clamp)
    optimizer = psplus.wrap(inner, "bsp", model=model)
    gradients_at(model, rank, 0)
    optimizer.step()
    with optimizer.evaluation():  # what the servers hold
        assert all(p.abs().max() <= 0.05 + 1e-6 for p in model.parameters())
    optimizer.close()


def writes(rank: int, place: str) -> None:
    """A write that is ignored is overwritten and not pushed; a stale backward raises."""
    model, optimizer = wrapped(outside_writes="ignore")
    loss = loss_at(model, rank, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    before = values_of(model)
    with torch.no_grad():
        model[0].weight.add_(10.0 * rank)
    optimizer.zero_grad()
    optimizer.step()
    assert same(values_of(model), before)
    optimizer.synchronize()
    assert same(values_of(model), before)
    optimizer.close()


def checkpoints(rank: int, place: str) -> None:
    """DCP on rank 0 alone, then publish(); the others keep their own optimizer state."""
    model, optimizer = wrapped(kind=torch.optim.Adam)
    for step in range(3):
        gradients_at(model, rank, step)
        optimizer.step()
    optimizer.synchronize()
    expected = values_of(model)
    if rank == 0:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"m": of_model, "o": of_optimizer}, checkpoint_id=place, no_dist=True)
    optimizer.close()

    model, optimizer = wrapped(kind=torch.optim.Adam)
    optimizer.param_groups[0]["lr"] = 0.7
    if rank == 0:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"m": of_model, "o": of_optimizer}, checkpoint_id=place, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        with pytest.raises(psplus.Error, match=r"publish\(\)"):
            optimizer.step()
        optimizer.publish()
    optimizer.synchronize()
    assert same(values_of(model), expected)
    assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == [(0.1, 4), (0.7, 0)][rank]
    assert optimizer.step_vector.tolist() == [0, 0]
    optimizer.close()


def resume(rank: int, place: str) -> None:
    """Every rank's own state, loaded after wrapping, makes a resumed run the same run."""

    def train(stop: bool) -> dict[str, torch.Tensor]:
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = psplus.wrap(plain, "bsp", model=model)
        for step in range(8):
            if stop and step == 4:
                optimizer.synchronize()
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                optimizer.close()
                model = make_model(seed=1)
                model.load_state_dict(saved[0])
                plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                optimizer = psplus.wrap(plain, "bsp", model=model)
                optimizer.load_state_dict(saved[1])
            gradients_at(model, rank, step)
            optimizer.step()
        optimizer.close()
        return values_of(model)

    assert same(train(stop=True), train(stop=False))


def loaders(rank: int, place: str) -> None:
    """DataLoader workers forked after wrapping neither harm nor are harmed."""
    model, optimizer = wrapped("ps+")
    data = TensorDataset(torch.randn(8, 6), torch.randn(8, 3))
    for inputs, targets in DataLoader(data, 4, num_workers=1, multiprocessing_context="fork"):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
    assert optimizer.step_vector.tolist() == [2, 2]
    optimizer.close()


def compiled_names(rank: int, place: str) -> None:
    """A compiled module has names of its own, on every worker the same."""
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    optimizer = psplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "bsp", model=compiled)
    gradients_at(compiled, rank, 0)
    optimizer.step()
    optimizer.close()


CLAIMS = [hooks, writes, checkpoints, resume, loaders, compiled_names]


def check_claims(place: str) -> list[str]:
    rank = psplus.config.read().rank
    for claim in CLAIMS:
        claim(rank, place)
    return [claim.__name__ for claim in CLAIMS]


def test_what_the_page_claims(workers: Workers, clean_job: Any) -> None:
    place = clean_job / "checkpoint"
    assert workers(check_claims, 2, place=str(place)) == [[c.__name__ for c in CLAIMS]] * 2
