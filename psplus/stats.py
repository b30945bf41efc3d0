"""What an optimizer has done so far."""

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """Counters of one wrapped optimizer on this worker, from its construction.

    Attributes:
        step: Calls of ``step()``.
        pushes: Pushes published, empty ones included; 0 when no server is used.
        skipped_steps: Steps that changed no state because a gradient or an update was not finite.
        staleness_last: Staleness of the last acknowledged push, in foreign pushes; -1 before it.
        staleness_mean: Mean over the acknowledged pushes; 0.0 before the first.
        staleness_max: Largest one; 0 before the first.
        lr_scale: Factor of the last push, as the policy gave it; 1.0 before the first.
        wait_seconds: Time spent waiting for the server and for other workers.
        bytes_pushed: Payload of the pushes.
        bytes_pulled: Payload of the pulls.
        retries: Chunks read again because the server replaced them meanwhile.
        num_workers: Workers that take part now.
        server_restarts: Times that a killed server was replaced under this worker.
    """

    step: int
    pushes: int
    skipped_steps: int
    staleness_last: int
    staleness_mean: float
    staleness_max: int
    lr_scale: float
    wait_seconds: float
    bytes_pushed: int
    bytes_pulled: int
    retries: int
    num_workers: int
    server_restarts: int
