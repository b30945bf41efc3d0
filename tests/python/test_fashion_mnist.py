"""examples/fashion_mnist.py: a very short training, and what it says without the data."""

import re
from pathlib import Path

import pytest
from workers import REPOSITORY, TORCHRUN, run_program

EXAMPLE = REPOSITORY / "examples" / "fashion_mnist.py"
DATA = Path("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz")


@pytest.mark.cluster
@pytest.mark.skipif(not DATA.exists(), reason="needs: apt-get install dataset-fashion-mnist")
def test_two_workers_learn(clean_job: Path) -> None:
    done = run_program(*TORCHRUN, str(EXAMPLE), "--epochs=1", "--steps=30")
    assert done.returncode == 0, done.stderr
    epoch = re.search(r"^epoch 1: [\d.]+% right, ([\d,]+) samples/s$", done.stdout, re.MULTILINE)
    assert epoch, done.stdout
    assert int(epoch[1].replace(",", "")) > 0
    end = re.search(r"^ps\+, 2 workers: ([\d.]+)% right$", done.stdout, re.MULTILINE)
    assert end, done.stdout
    assert float(end[1]) > 50  # 10 without training


def test_the_missing_data_set_is_named(clean_job: Path) -> None:
    done = run_program(str(EXAMPLE), "--data", str(clean_job))
    assert done.returncode == 1
    assert "sudo apt-get install dataset-fashion-mnist" in done.stderr
    assert "Traceback" not in done.stderr
