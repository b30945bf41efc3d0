"""examples/quickstart.ipynb: its cells run, one after the other, without Jupyter."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from workers import REPOSITORY, run_program

NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"

# Runs the sources that come in as JSON as a notebook's kernel would: in __main__. The last line
# tells what the plot shows.
RUNNER = """
import json, sys
for number, source in enumerate(json.load(sys.stdin)):
    exec(compile(source, f"<code cell {number}>", "exec"))
lines = pyplot.gca().get_lines()
print("plot:", {line.get_label(): len(line.get_xdata()) for line in lines})
"""


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def test_the_notebook_is_clean() -> None:
    ids = [cell["id"] for cell in cells()]
    assert len(set(ids)) == len(ids)
    for cell in cells():
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.cluster
def test_the_cells_run_in_order(clean_job: Path) -> None:
    sources = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    done = run_program(
        "-c",
        RUNNER,
        environment={"MPLBACKEND": "Agg", "MPLCONFIGDIR": str(clean_job)},
        input=json.dumps(sources),
        cwd=clean_job,
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(
        r"^(\S+) +([\d.]+)% of the test digits right.*\[(\d+), (\d+)\]$", done.stdout, re.MULTILINE
    )
    assert [scheme for scheme, *_ in told] == ["ps+", "bsp"], done.stdout
    for scheme, accuracy, first, second in told:
        assert float(accuracy) > 85  # 10 without training
        assert int(first) + int(second) >= 600
        assert scheme != "bsp" or first == second
    assert re.search(r"^plot: \{'ps\+': \d+, 'bsp': 15\}$", done.stdout, re.MULTILINE), done.stdout
