"""PyTorch's own DistributedTest suite on the CPU, under "psplus", as stand-in for Gloo, or Gloo.

    python tests/conformance/distributed_suite.py SIDE [--ranks N] [--per-host N]
                                                  [--only PATTERN]... [--out FILE]

SIDE is ``psplus`` (by that name; the suite gates many tests on names it knows), ``stand-in``
(psplus's groups where the suite asks for "gloo") or ``gloo`` (what it is compared with). Prints a
line a test that does not pass, and counts; ``--out`` writes one JSON object with all outcomes. With
``--per-host`` the ranks of psplus's groups take each other to be on several hosts, so many on each.

Each test runs in forked processes, so torch is imported once for all.
"""

import argparse
import fnmatch
import json
import os
import sys
import tempfile
import time
import unittest
from typing import Any

SIDES = ("psplus", "stand-in", "gloo")


def prepare(side: str, folder: str, ranks: int) -> None:
    """What the suite reads when it is imported."""
    os.environ.update(
        BACKEND="psplus" if side == "psplus" else "gloo",
        WORLD_SIZE=str(ranks),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/shared",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",  # of a test, in seconds
    )
    from torch.testing._internal.common_distributed import DistTestCases

    import psplus  # noqa: F401 - registers the backend

    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add("psplus")
    if side == "stand-in":
        stand_in_for_gloo()


def stand_in_for_gloo() -> None:
    """Let torch make groups of ours where it means to make Gloo's."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from psplus import _C
    from psplus.distributed import creator

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, _C.ProcessGroupPSPlus)

        def __call__(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
            options = dist.distributed_c10d._DistributedBackendOptions()
            options.store, options.group_rank, options.group_size = store, rank, size
            options.timeout, options.global_ranks_in_group = timeout, list(range(size))
            return creator.create(options)

    class StandIn(metaclass=Meta):
        pass

    c10d.ProcessGroupGloo = StandIn

    # The profiler's ranges carry our name all the same.
    from torch.testing._internal.distributed import distributed_test

    get_event = distributed_test.get_profiling_event

    def get_our_event(event_name: str, *rest: Any, **keywords: Any) -> Any:
        message = event_name.startswith(("gloo:send", "gloo:recv"))
        if message and "PSPLUS_HOST_ID" in os.environ:  # between hosts these are Gloo's
            return get_event(event_name, *rest, **keywords)
        events = get_event(event_name.replace("gloo:", "psplus:"), *rest, **keywords)
        for event in events:
            event.name = event.name.replace("psplus:", "gloo:")
        return events

    distributed_test.get_profiling_event = get_our_event


def place_on_hosts(per_host: int) -> None:
    """Give the ranks of each group of ours hosts by their numbers."""
    from psplus import distributed
    from psplus.distributed import creator

    create = creator.create

    def create_there(options: Any, pg_options: Any = None) -> Any:
        os.environ["PSPLUS_HOST_ID"] = f"host {options.group_rank // per_host}"
        return create(options, pg_options)

    creator.create = distributed.create = create_there


def make_case() -> type[unittest.TestCase]:
    """The suite with forked processes."""
    import torch
    from torch.testing._internal.distributed import distributed_test

    class TestSuite(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:  # noqa: N802 - unittest's name
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestSuite


class Outcomes(unittest.TestResult):
    """Outcome and reason of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, str]] = {}
        self.began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        """Note when it began."""
        super().startTest(test)
        self.began = time.monotonic()

    def note(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        """Keep an outcome; print what did not pass."""
        name = test.id().rsplit(".", 1)[-1]
        self.found[name] = (outcome, reason)
        if outcome != "passed":
            seconds = time.monotonic() - self.began
            last = reason.strip().splitlines()[-1][:200] if reason.strip() else ""
            print(f"{outcome:8} {name} ({seconds:.1f} s) {last}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Passed."""
        self.note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        """Skipped by the suite itself."""
        self.note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        """Failed."""
        self.note(test, "failed", self._exc_info_to_string(err, test))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        """Failed."""
        self.note(test, "failed", self._exc_info_to_string(err, test))


def main() -> None:
    """Run the tests that match."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--ranks", type=int, default=4, help="with fewer than 8 some are skipped")
    parser.add_argument("--per-host", type=int, help="ranks on a host (default: all)")
    parser.add_argument("--only", action="append", default=[], help="pattern of test names")
    parser.add_argument("--skip", action="append", default=[], help="pattern of test names")
    parser.add_argument("--out", help="where to write the outcomes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(arguments.side, folder, arguments.ranks)
        if arguments.per_host:
            place_on_hosts(arguments.per_host)
        case = make_case()
        outcomes = Outcomes()
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in arguments.only or ["*"])
            if wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in arguments.skip):
                case(name).run(outcomes)
                if arguments.out:
                    with open(arguments.out, "w") as file:  # noqa: PTH123 - rewritten each time
                        json.dump(outcomes.found, file, indent=1)
    counts = {
        outcome: sum(found[0] == outcome for found in outcomes.found.values())
        for outcome in ("passed", "failed", "skipped")
    }
    print(json.dumps({"side": arguments.side, **counts}))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
