"""Running figures of the staleness of acknowledged pushes."""

__all__ = ["StalenessMeter"]


class StalenessMeter:
    """Last, mean and maximum of what has been added; -1, 0.0 and 0 before the first."""

    def __init__(self) -> None:
        self.last = -1
        self.maximum = 0
        self._sum = 0
        self._count = 0

    def add(self, staleness: int) -> None:
        """Count one acknowledged push; negative: there was none."""
        if staleness < 0:
            return
        self.last = staleness
        self.maximum = max(self.maximum, staleness)
        self._sum += staleness
        self._count += 1

    @property
    def mean(self) -> float:
        """Mean of what has been added."""
        return self._sum / self._count if self._count else 0.0
