"""psplus: an asynchronous parameter server for PyTorch.

    optimizer = psplus.wrap(optimizer, "ps+", model=model)

turns a training loop into a distributed one; see `wrap()`.
"""

from psplus import _compat
from psplus._build_info import TORCH_VERSION

_compat.check_torch(TORCH_VERSION)

import _psplus_entry  # noqa: E402 - only after the check of torch
from psplus import _C, errors, lr_scale, schemes  # noqa: E402
from psplus._version import __version__  # noqa: E402
from psplus.errors import (  # noqa: E402
    AuthenticationError,
    CheckpointError,
    ConfigError,
    Error,
    LayoutMismatch,
    PeerLost,
    TimeoutError,  # noqa: A004
)
from psplus.kv import DenseValue, KVStore  # noqa: E402
from psplus.launcher import launch  # noqa: E402
from psplus.optim import DistributedOptimizer, wrap  # noqa: E402
from psplus.session import Session, connect  # noqa: E402
from psplus.staleness import Staleness  # noqa: E402
from psplus.stats import Stats  # noqa: E402
from psplus.work import Work  # noqa: E402

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "ConfigError",
    "DenseValue",
    "DistributedOptimizer",
    "Error",
    "KVStore",
    "LayoutMismatch",
    "PeerLost",
    "Session",
    "Staleness",
    "Stats",
    "TimeoutError",
    "Work",
    "__version__",
    "connect",
    "errors",
    "launch",
    "lr_scale",
    "schemes",
    "wrap",
]

_C.set_error_types(
    {
        "error": Error,
        "timeout": TimeoutError,
        "peer_lost": PeerLost,
        "layout_mismatch": LayoutMismatch,
        "config": ConfigError,
    }
)

_psplus_entry.register()
