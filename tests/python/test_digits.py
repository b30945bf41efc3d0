"""Accuracy on a real data set, beside DDP at equal samples."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import REPOSITORY

import psplus

SCHEMES = ("bsp", "ssp", "asp", "ps+")
SEEDS = (0, 1, 2)
EPOCHS = {1: 6, 2: 10, 4: 15}  # by the number of workers: late pushes take longer
Workers = Callable[..., list[Any]]


def train_everything(store: str) -> dict[str, list[float]]:
    """Accuracy of each scheme for each seed, all in one set of processes."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    from digits import load_data

    rank, world = psplus.config.read().rank, psplus.config.read().world_size
    images, labels, test_images, test_labels = load_data()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

    def train(scheme: str, seed: int) -> float:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        net = nn.parallel.DistributedDataParallel(model) if scheme == "ddp" else model
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if scheme != "ddp":
            bound = {"staleness_bound": 3} if scheme == "ssp" else {}
            optimizer = psplus.wrap(optimizer, scheme, model=model, **bound)
        for epoch in range(EPOCHS[world]):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
            for batch in order[rank::world][: len(labels) // world].split(16):
                loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if isinstance(optimizer, psplus.DistributedOptimizer):
            optimizer.synchronize()
            optimizer.close()
        with torch.no_grad():
            right = model(test_images).argmax(1) == test_labels
        return right.double().mean().item()

    results = {scheme: [train(scheme, seed) for seed in SEEDS] for scheme in (*SCHEMES, "ddp")}
    time.sleep(0.2)  # see examples/digits.py
    dist.destroy_process_group()
    return results


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_c60_accuracy_is_that_of_ddp(workers: Workers, clean_job: Path, world_size: int) -> None:
    results = workers(train_everything, world_size, limit=280, store=str(clean_job / "store"))
    for of_rank in results:  # synchronize() gives everybody the same weights
        assert {s: of_rank[s] for s in SCHEMES} == {s: results[0][s] for s in SCHEMES}
    reference = median(results[0]["ddp"])
    for scheme in SCHEMES:
        accuracy = median(results[0][scheme])
        assert accuracy >= 0.95, f"{scheme} with {world_size} workers: {results[0]}"
        assert accuracy >= reference - 0.02, f"{scheme} with {world_size} workers: {results[0]}"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_example_compares_and_plots(clean_job: Path) -> None:
    plot = clean_job / "digits.png"
    example = str(REPOSITORY / "examples" / "digits.py")
    ended = subprocess.run(
        [sys.executable, example, "--compare", "--workers=2", "--epochs=2", "--plot", str(plot)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    table = ended.stdout.splitlines()
    assert [line.split()[0] for line in table[:4]] == ["scheme", "single", "ddp", "ps+"], table
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_one_process_of_the_example(clean_job: Path) -> None:
    result = clean_job / "result.json"
    example = str(REPOSITORY / "examples" / "digits.py")
    subprocess.run(
        [sys.executable, example, "--epochs=8", f"--result={result}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
        check=True,
    )
    measured = json.loads(result.read_text())
    assert measured["accuracy"] > 0.9
    assert len(measured["curve"]) == 8
