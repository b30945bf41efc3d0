"""How tests of the process group begin."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def begin(store: str | int, seconds: float = 30.0, placement: str = "") -> tuple[int, int]:
    """Join the group "psplus" that meets at ``store``: a TCP port, a URL or a file.

    Args:
        store: Where the ranks meet.
        seconds: Time-out of calls.
        placement: Each rank's host, a character a rank; all share one without it.

    Returns:
        This process's rank and the group's size.
    """
    import _psplus_entry

    _psplus_entry.register()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if placement:
        os.environ["PSPLUS_HOST_ID"] = f"host {placement[rank]}"
    where: dict[str, Any]
    if isinstance(store, int):
        where = {"store": dist.TCPStore("127.0.0.1", store, size, False)}
    else:
        where = {"init_method": store if "://" in store else f"file://{store}"}
    dist.init_process_group(
        "psplus",
        **where,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    return rank, size
