"""The optimizer wrapper."""

from psplus.optim.distributed_optimizer import DistributedOptimizer
from psplus.optim.factory import wrap

__all__ = ["DistributedOptimizer", "wrap"]
