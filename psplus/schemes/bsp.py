"""Bulk-synchronous parallel."""

from dataclasses import dataclass, field

from psplus.lr_scale import Policy, constant
from psplus.schemes.base import Turn, push_and_wait

__all__ = ["BSP"]


@dataclass(frozen=True)
class BSP:
    """Everybody's k-th update together: W^k = W^(k-1) - (1/N) * sum_i delta_i^k.

    The server waits for all workers and adds in rank order, so two runs are equal bit for bit, and
    N workers equal the plain optimizer on the mean of their updates. A worker waits for the
    slowest one at each step. Updates are never scaled.

    Source: Valiant, "A bridging model for parallel computation", CACM 33(8), 1990.
    """

    name: str = field(default="bsp", init=False)
    mode: str = field(default="bsp", init=False)
    staleness_bound: int | None = field(default=None, init=False)

    @property
    def policy(self) -> Policy:
        """Updates of one step belong together: none is scaled."""
        return constant

    def step(self, turn: Turn) -> None:
        """Push, wait for everybody's push of this step, continue with W^k."""
        push_and_wait(turn)
