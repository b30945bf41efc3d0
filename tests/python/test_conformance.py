"""PyTorch's own DistributedTest: a quick part of it, and, among the soaks, all of it.

tests/conformance/table.py writes docs/conformance.md from the whole.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workers import REPOSITORY

pytest.importorskip("expecttest", reason="PyTorch's suite needs it: pip install expecttest")

SUITE = REPOSITORY / "tests" / "conformance" / "distributed_suite.py"
# One of each kind that is quick and does not wait for a time-out on purpose.
STAND_IN = [
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_barrier",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_gather_object",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_monitored_barrier_gloo",
    "test_reduce_full_group_product",
    "test_scatter_object_list",
    "test_send_recv_any_source_autograd_profiler",
    "test_sparse_all_reduce_sum",
]
PSPLUS = [
    "test_all_reduce_full_group_max",
    "test_ddp_create_graph",
    "test_isend",
    "test_scatter_full_group",
    "test_send_recv_with_tag",
]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize(("side", "tests"), [("stand-in", STAND_IN), ("psplus", PSPLUS)])
def test_a_part_of_pytorchs_suite(clean_job: Path, side: str, tests: list[str]) -> None:
    out = clean_job / "outcomes.json"
    only = [argument for test in tests for argument in ("--only", test)]
    done = subprocess.run(
        [sys.executable, str(SUITE), side, *only, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert out.exists(), done.stdout
    outcomes = json.loads(out.read_text())
    assert sorted(outcomes) == sorted(tests)
    others = {test: found for test, found in outcomes.items() if found[0] != "passed"}
    assert not others, others


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_the_whole_suite_differs_only_for_reasons(clean_job: Path) -> None:
    table = REPOSITORY / "tests" / "conformance" / "table.py"
    done = subprocess.run(
        [sys.executable, str(table), "--outcomes", str(clean_job), "--out", str(clean_job / "md")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
