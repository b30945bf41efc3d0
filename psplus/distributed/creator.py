"""Makes a process group, and the inner ones that it hands tensors on to."""

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, Store, _DistributedBackendOptions

from psplus import _C, config

__all__ = ["create"]

# A callback that ends after the interpreter would abort the process.
atexit.register(_C.await_callbacks, 5.0)


def create(options: _DistributedBackendOptions, pg_options: Any = None) -> Backend:
    """Make the backend of a new process group; torch calls this.

    Waits until all ranks of the group have called it.

    Args:
        options: Store, ranks and time-out of the group.
        pg_options: Must be None: there is nothing to choose.

    Raises:
        TypeError: If ``pg_options`` are given.
        ConfigError: If the host cannot be told.
        torch.distributed.DistBackendError: If a rank does not come, or memory does not suffice.
    """
    if pg_options is not None:
        raise TypeError(
            f'the backend "psplus" has no options of its own, got {type(pg_options).__name__}; '
            "leave pg_options out"
        )
    group: Backend = _C.ProcessGroupPSPlus(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        host_id=config.host_id(),
        global_ranks=list(options.global_ranks_in_group),
        make_gloo=_make_gloo,
        make_nccl=_make_nccl,
    )
    return group


def _make_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, _global_ranks: list[int]
) -> Backend:
    """The group for CPU tensors when ranks are on several hosts."""
    if not dist.is_gloo_available():
        raise RuntimeError("psplus reaches ranks on other hosts through Gloo; this torch has none")
    gloo = dist.ProcessGroupGloo(
        PrefixStore("gloo", store),
        rank,
        size,
        timeout=timeout,
    )
    gloo._set_sequence_number_for_group()
    return gloo


def _make_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, global_ranks: list[int]
) -> Backend | None:
    """The group for CUDA tensors; None when there can be none."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timeout
    nccl_options.global_ranks_in_group = global_ranks
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)
    nccl._set_sequence_number_for_group()
    return nccl
