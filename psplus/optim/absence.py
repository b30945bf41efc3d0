"""Workers that leave a job before they have made a step."""

import logging

from psplus import _C

__all__ = ["AbsenceWatch"]

_log = logging.getLogger(__name__)


class AbsenceWatch:
    """Says when a worker has left before its first step, which is seldom meant.

    It failed while its loop began, say, or its `wrap()` was refused when the others had begun. To
    train on with fewer workers is what the schemes promise; to do so unnoticed is not.

    Thread safety: none; one thread steps.
    """

    def __init__(self, stream: _C.DenseStream, rank: int, workers: int) -> None:
        self._stream = stream
        self._rank = rank
        self._workers = workers  # when we last looked
        self._told = {rank}  # not to be told of, or told of already
        self._done = False

    def look(self) -> None:
        """Once a step; costs nothing from when everybody has made one."""
        if self._done:
            return
        present = self._stream.peek().num_workers
        steps = self._stream.step_vector()
        idle = [r for r, made in enumerate(steps) if made == 0 and r not in self._told]
        if idle and present < self._workers:
            _log.warning(
                "rank %d: %d of %d workers left, and no step has come from rank %s: see what it "
                "said; training goes on with %d",
                self._rank,
                self._workers - present,
                self._workers,
                ", ".join(map(str, idle)),
                present,
            )
            self._told.update(idle)
        self._workers = min(present, self._workers)
        self._done = not idle
