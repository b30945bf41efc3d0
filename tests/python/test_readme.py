"""The README's diff: the plain script and the one it makes of it both train."""

import re
from pathlib import Path

import pytest
from workers import REPOSITORY, TORCHRUN, run_program


def scripts_of_the_diff() -> tuple[str, str]:
    """What the script of the diff is without its added lines, and with them."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    lines = diff.splitlines()
    assert {line[:1] for line in lines} == {" ", "+", ""}
    assert sum(line.startswith("+") for line in lines) == 3
    plain = [line[1:] for line in lines if not line.startswith("+")]
    return "\n".join(plain), "\n".join(line[1:] for line in lines)


def accuracies(script: str, folder: Path, *launcher: str) -> list[float]:
    """Runs a script in ``folder``; the accuracy that each of its processes printed."""
    path = folder / "train.py"
    path.write_text(script, encoding="utf-8")
    done = run_program(*launcher, str(path), cwd=folder)
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"([\d.]+)% right", done.stdout)]


@pytest.mark.cluster
def test_the_diff_turns_a_plain_script_into_a_distributed_one(clean_job: Path) -> None:
    plain, distributed = scripts_of_the_diff()
    assert "psplus" not in plain
    (alone,) = accuracies(plain, clean_job)
    pair = accuracies(distributed, clean_job, *TORCHRUN)
    assert len(pair) == 2
    assert pair[0] == pair[1]  # the same weights on the same data
    for accuracy in (alone, *pair):
        assert accuracy > 80  # a third of the labels without training
