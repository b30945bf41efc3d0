"""PS+: eager pulls, so that communication hides behind computation."""

from dataclasses import dataclass, field

from psplus.lr_scale import Policy, resolve
from psplus.schemes.base import Turn
from psplus.schemes.checks import check_bound, check_local_scale

__all__ = ["PSPlus"]


@dataclass(frozen=True)
class PSPlus:
    """Push k and pull for k + 1 together; wait only for push k - 1.

    With delta_i^k the change that the inner optimizer would make::

        server:  W -= lambda * delta_i^k / N                      on arrival
        worker:  x_i^(k+1) = W_hat - local_scale * lambda * delta_i^k

    W_hat is a state not older than the worker's own push k - 1. A step takes max(computation,
    communication) instead of their sum, and nobody waits for another worker. The price is
    staleness: up to 2(N - 1) foreign pushes for equal workers when pulls are buffered, N - 1 when
    they are mapped; ``lr_scale`` damps updates that are older than that.

    Attributes:
        lr_scale: Policy or its name.
        local_scale: How much of its own pending update a worker sees. 1 looks ahead by the whole
            update, which with momentum is more stable than the 1/N that will be applied.
        staleness_bound: Steps that a worker may be ahead of the slowest, as in `SSP`; None: any.

    Source: PS+, IEEE TPDS 33(12), 2022; the policy is after arXiv:1511.05950.
    """

    lr_scale: str | Policy = "inverse_staleness"
    local_scale: float = 1.0
    staleness_bound: int | None = None
    name: str = field(default="ps+", init=False)
    mode: str = field(default="async", init=False)

    def __post_init__(self) -> None:
        check_local_scale(self.local_scale)
        if self.staleness_bound is not None:
            check_bound(self.staleness_bound)
        resolve(self.lr_scale)

    @property
    def policy(self) -> Policy:
        """What scales an update before it is pushed."""
        return resolve(self.lr_scale)

    def step(self, turn: Turn) -> None:
        """Wait for the round trip begun one step earlier, take W_hat, then let the update go."""
        turn.compute()
        turn.wait_round(0)  # the last one published is push k - 1
        lam = turn.scale(turn.observe())
        turn.pull(self.local_scale * lam)
        turn.publish(lam)
