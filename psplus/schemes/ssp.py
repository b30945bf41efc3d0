"""Stale-synchronous parallel."""

from dataclasses import dataclass, field

from psplus.lr_scale import Policy, resolve
from psplus.schemes.base import Turn, push_and_wait
from psplus.schemes.checks import check_bound

__all__ = ["SSP"]


@dataclass(frozen=True)
class SSP:
    """ASP with a limit: a reply waits while its worker is more than ``bound`` steps ahead.

    W -= lambda * delta / N on arrival; the reply to push c_i is held while c_i > min(c) + bound, so
    nobody gets more than bound + 1 pushes ahead of the slowest. The bound counts steps, staleness
    counts foreign pushes. ``bound=0`` keeps workers in step but, unlike `BSP`, still applies each
    push on arrival.

    Attributes:
        staleness_bound: The limit in steps, >= 0.
        lr_scale: Policy or its name.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NIPS 2013.
    """

    staleness_bound: int
    lr_scale: str | Policy = "constant"
    name: str = field(default="ssp", init=False)
    mode: str = field(default="async", init=False)

    def __post_init__(self) -> None:
        check_bound(self.staleness_bound)
        resolve(self.lr_scale)

    @property
    def policy(self) -> Policy:
        """What scales an update before it is pushed."""
        return resolve(self.lr_scale)

    def step(self, turn: Turn) -> None:
        """Push, wait until it is applied and the gate lets go, continue with W."""
        push_and_wait(turn)
