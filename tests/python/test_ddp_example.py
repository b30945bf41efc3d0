"""examples/ddp.py, which the README shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workers import REPOSITORY

pytestmark = pytest.mark.cluster


def loss_with(backend: str) -> float:
    script = REPOSITORY / "examples" / "ddp.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), "--backend", backend, "--steps", "40"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = re.search(rf"{backend}: 2 workers, (\d+) samples/s, loss ([\d.]+)", done.stdout)
    assert line, done.stdout
    assert int(line[1]) > 0
    return float(line[2])


def test_both_backends_reach_the_same_loss(clean_job: Path) -> None:
    assert loss_with("psplus") == pytest.approx(loss_with("gloo"), rel=1e-3)
