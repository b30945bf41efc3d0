"""examples/ddp.py, which the README shows."""

import re
from pathlib import Path

import pytest
from workers import REPOSITORY, TORCHRUN, run_program

pytestmark = pytest.mark.cluster


def loss_with(backend: str) -> float:
    script = REPOSITORY / "examples" / "ddp.py"
    done = run_program(*TORCHRUN, str(script), "--backend", backend, "--steps", "40")
    assert done.returncode == 0, done.stderr
    line = re.search(rf"{backend}: 2 workers, (\d+) samples/s, loss ([\d.]+)", done.stdout)
    assert line, done.stdout
    assert int(line[1]) > 0
    return float(line[2])


def test_both_backends_reach_the_same_loss(clean_job: Path) -> None:
    assert loss_with("psplus") == pytest.approx(loss_with("gloo"), rel=1e-3)
