"""What the examples say of themselves."""

import re
from pathlib import Path

import pytest
from workers import REPOSITORY, run_program

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_every_option_is_described(script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    options = re.findall(r'add_argument\(\s*"(--[\w-]+)"', source)
    assert options
    if "sklearn" in source:
        pytest.importorskip("sklearn")
    done = run_program(str(script), "--help", environment={"COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    _, _, listed = done.stdout.partition("show this help message and exit\n")
    described = re.findall(r"^  (--[\w-]+)(?: \S+)?\s{2,}\S.*", listed, re.MULTILINE)
    assert described == options, done.stdout
