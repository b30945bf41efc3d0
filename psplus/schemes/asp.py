"""Asynchronous parallel."""

from dataclasses import dataclass, field

from psplus.lr_scale import Policy, resolve
from psplus.schemes.base import Turn, push_and_wait

__all__ = ["ASP"]


@dataclass(frozen=True)
class ASP:
    """W -= lambda * delta / N on arrival; the worker continues with W after its own round trip.

    Nobody waits for another worker. For equally fast workers an update is N - 1 foreign pushes
    old; with a slow worker there is no limit, see `SSP` for one.

    Attributes:
        lr_scale: Policy or its name; it sees the staleness known when the step began.

    Source: Dean et al., "Large scale distributed deep networks", NIPS 2012.
    """

    lr_scale: str | Policy = "constant"
    name: str = field(default="asp", init=False)
    mode: str = field(default="async", init=False)
    staleness_bound: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        resolve(self.lr_scale)

    @property
    def policy(self) -> Policy:
        """What scales an update before it is pushed."""
        return resolve(self.lr_scale)

    def step(self, turn: Turn) -> None:
        """Push, wait until it is applied, continue with what the servers hold."""
        push_and_wait(turn)
