"""What a synchronisation scheme is: the order of events in one step of a worker."""

from typing import Protocol, runtime_checkable

from psplus import _C
from psplus.lr_scale import Policy

__all__ = ["Scheme", "Turn", "push_and_wait"]


class Turn(Protocol):
    """One step of a worker, as a scheme sees it."""

    def compute(self) -> None:
        """Run the inner optimizer and write its update into the next push slot.

        Where a kernel can do it in one pass with the pull, it happens in pull() or publish(),
        whichever comes first. A step whose gradients are not finite writes an empty push instead.
        """

    def publish(self, lam: float) -> None:
        """Let the push that compute() has written go, scaled by ``lam``."""

    def wait_round(self, lag: int) -> None:
        """Wait until the last push but ``lag`` is applied, visible and released by the gate."""

    def observe(self) -> _C.Observation:
        """Begin a snapshot of the servers' values; pull() takes it."""

    def peek(self) -> _C.Observation:
        """What the last snapshot showed; begins none."""

    def scale(self, seen: _C.Observation) -> float:
        """The policy's factor for this step's update."""

    def pull(self, local_scale: float) -> None:
        """Parameters = servers' values - ``local_scale`` * this step's update."""


@runtime_checkable
class Scheme(Protocol):
    """A rule for when to push, what to wait for and what to continue with.

    One file and one frozen dataclass each; a new scheme needs no other change unless the server
    must act differently for it.
    """

    @property
    def name(self) -> str:
        """Its string in ``wrap(scheme=...)``."""

    @property
    def mode(self) -> str:
        """What the server does: ``"async"``: apply on arrival; ``"bsp"``: collect a step."""

    @property
    def staleness_bound(self) -> int | None:
        """Steps that a worker may be ahead of the slowest; None: any number."""

    @property
    def policy(self) -> Policy:
        """What scales an update before it is pushed."""

    def step(self, turn: Turn) -> None:
        """Carry one step of a worker through."""


def push_and_wait(turn: Turn) -> None:
    """The step of BSP, SSP and ASP: push, wait for the reply, continue with what the servers hold.

    What the reply waits for is the server's affair: everybody's push, the gate, or nothing.
    """
    turn.compute()
    turn.publish(turn.scale(turn.peek()))
    turn.wait_round(0)
    turn.observe()
    turn.pull(0.0)
