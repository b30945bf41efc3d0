"""Runs PyTorch's DistributedTest on all sides and writes docs/conformance.md.

    python tests/conformance/table.py [--outcomes FOLDER] [--reuse] [--out FILE]

Ends with status 1 if a test that Gloo passes fails for no reason known here. ``--reuse`` takes the
outcomes of an earlier run from FOLDER. Takes about ten minutes on two cores; needs ``expecttest``.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SIDES = ("gloo", "stand-in", "psplus")
SMALL = "Skipped due to small world size."  # with fewer than eight ranks
Outcomes = dict[str, tuple[str, str]]

# Failures of psplus that are none, by side and test.
REASONS = {
    ("stand-in", "test_ddp_logging_data_cpu"): (
        "torch's DDP logger takes whatever goes by Gloo's name for a `ProcessGroupGloo` object and "
        "reads its number of threads out of ours; the name `psplus` is never read that way"
    ),
    ("psplus", "test_ddp_logging_data_cpu"): (
        'torch calls every backend that is not its own "custom" in DDP\'s log, where the test '
        "expects the backend's name"
    ),
}


def run(side: str, folder: Path) -> None:
    """Leave the outcomes of one side in ``folder``: four ranks, then eight where the suite asks."""
    suite = [sys.executable, str(HERE / "distributed_suite.py"), side]
    four = folder / f"{side}.json"
    subprocess.run([*suite, "--out", str(four)], check=False, timeout=3600)
    small = [name for name, (_, reason) in read(four).items() if reason.strip() == SMALL]
    only = [argument for name in small for argument in ("--only", name)]
    eight = folder / f"{side}-8.json"
    command = [*suite, "--ranks", "8", *only, "--out", str(eight)]
    subprocess.run(command, check=False, timeout=3600)
    if side == "gloo":
        retry(suite, four, [])
        retry(suite, eight, ["--ranks", "8"])


def retry(suite: list[str], path: Path, arguments: list[str]) -> None:
    """Give Gloo's failures a second run: on a busy machine it times out now and then."""
    outcomes = read(path)
    failed = [name for name, (outcome, _) in outcomes.items() if outcome == "failed"]
    if not failed:
        return
    again = path.with_suffix(".again.json")
    only = [argument for name in failed for argument in ("--only", name)]
    command = [*suite, *arguments, *only, "--out", str(again)]
    subprocess.run(command, check=False, timeout=3600)
    path.write_text(json.dumps({**outcomes, **read(again)}, indent=1))


def read(path: Path) -> Outcomes:
    return {name: tuple(found) for name, found in json.loads(path.read_text()).items()}


def merged(side: str, folder: Path) -> Outcomes:
    return {**read(folder / f"{side}.json"), **read(folder / f"{side}-8.json")}


def only_for_known_names(found: dict[str, tuple[str, str]]) -> bool:
    """Whether the suite skips a test for the name psplus alone, and the stand-in does as Gloo."""
    return found["psplus"][0] == "skipped" and found["stand-in"][0] == found["gloo"][0]


def explain(test: str, found: dict[str, tuple[str, str]]) -> str:
    """Why psplus does not do as Gloo in a test; empty when nobody knows."""
    reasons = [
        REASONS.get((side, test), "")
        for side in ("stand-in", "psplus")
        if found[side][0] not in (found["gloo"][0], "passed")
    ]
    if not reasons:
        return "Gloo's own failure, twice"
    return "; ".join(reasons) if all(reasons) else ""


def write(outcomes: dict[str, Outcomes], out: Path) -> list[str]:
    """Write the page; the names of tests whose differences have no reason."""
    lines = [
        "# PyTorch's own tests",
        "",
        "torch ships `DistributedTest`, the suite that its own backends pass.",
        f"`python tests/conformance/table.py` runs it (torch {torch.__version__}, four ranks,",
        "eight for the tests that ask for it) and writes this page: under the name `psplus`, with",
        "our groups wherever the suite makes Gloo's (*stand-in*: many tests run only for names",
        "that the suite knows), and with Gloo itself.",
        "",
        "| | passed | failed | skipped by the suite |",
        "|---|---|---|---|",
    ]
    for side in SIDES:
        count = Counter(outcome for outcome, _ in outcomes[side].values())
        lines.append(f"| {side} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    lines += ["", "## Where psplus does not do as Gloo", ""]
    lines += ["| test | Gloo | stand-in | psplus | why |", "|---|---|---|---|---|"]
    unexplained = []
    names: dict[str, list[str]] = {}
    for test in sorted(outcomes["gloo"]):
        found = {side: outcomes[side].get(test, ("missing", "")) for side in SIDES}
        results = [found[side][0] for side in SIDES]
        if len(set(results)) == 1:
            continue
        if only_for_known_names(found):
            names.setdefault(found["psplus"][1].strip(), []).append(f"`{test}`")
            continue
        why = explain(test, found)
        if not why:
            unexplained.append(test)
        lines.append(f"| `{test}` | {' | '.join(results)} | {why or '**unexplained**'} |")
    lines += ["", "## Not run under the name psplus; as stand-in psplus does as Gloo", ""]
    lines += ["| the suite's reason | tests |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(tests)} |" for reason, tests in sorted(names.items())]
    lines += ["", "## Skipped on all sides", ""]
    lines += ["| tests | the suite's reason |", "|---|---|"]
    skips = Counter(
        reason.strip()
        for test, (outcome, reason) in outcomes["gloo"].items()
        if outcome == "skipped" and all(outcomes[s][test][0] == "skipped" for s in SIDES)
    )
    lines += [f"| {count} | {reason} |" for reason, count in skips.most_common()]
    out.write_text("\n".join(lines) + "\n")
    return unexplained


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outcomes", type=Path, default=REPOSITORY / "build" / "conformance")
    parser.add_argument("--reuse", action="store_true", help="run nothing, take what is there")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "conformance.md")
    arguments = parser.parse_args()
    if not arguments.reuse:
        arguments.outcomes.mkdir(parents=True, exist_ok=True)
        for side in SIDES:
            run(side, arguments.outcomes)
    unexplained = write({s: merged(s, arguments.outcomes) for s in SIDES}, arguments.out)
    if unexplained:
        sys.exit(f"differences without a reason: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
