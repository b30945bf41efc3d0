"""What a learning-rate policy is told about an update."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Staleness"]


@dataclass(frozen=True)
class Staleness:
    """Age of an update and progress of the workers, as this worker knows them at its step.

    Attributes:
        observed: Foreign pushes between this worker's last two snapshots of the parameters, known
            before the update is sent: N - 1 for N equally fast workers.
        actual: Foreign pushes that were applied between the snapshot and the application of this
            worker's last acknowledged push; -1 before the first acknowledgement.
        step: Number of this worker's step, from 1.
        step_vector: Pushes applied per worker, int64, shape ``(world size,)``, indexed by rank.
        rank: This worker.
        num_workers: Workers that take part now.
        rates: Pushes a second of each rank over its last 16 pushes; 0.0 while unknown.
    """

    observed: int
    actual: int
    step: int
    step_vector: Tensor
    rank: int
    num_workers: int
    rates: tuple[float, ...]
