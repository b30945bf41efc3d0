"""Makes torch know the backend "psplus"; both entry-point groups name `register`.

Importing torch runs `register` (group ``torch.backends``), and torch 2.14 runs it when the name is
first used (group ``torch.distributed.backends``). So it lies outside the package: it may neither
import psplus, which imports torch, nor fail, which would break every ``import torch`` of an
environment whose psplus was built for another one.
"""

import logging
from typing import Any


def register() -> None:
    """Register the backend if it is not. Cheap, idempotent, never raises."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or "PSPLUS" in dist.Backend._plugins:
            return
        dist.Backend.register_backend("psplus", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:
        logging.getLogger("psplus").debug("the backend was not registered", exc_info=True)


def _create(options: Any, pg_options: Any) -> Any:
    """Make a group; only here is psplus itself imported."""
    from psplus.distributed import create

    return create(options, pg_options)
