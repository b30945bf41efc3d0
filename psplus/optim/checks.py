"""Which optimizers and parameters psplus can take."""

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from psplus.errors import ConfigError
from psplus.optim.names import NamedParameter

__all__ = [
    "DTYPES",
    "check_distinct",
    "check_for_server",
    "check_model",
    "check_optimizer",
    "check_parameters",
    "check_trainable",
    "declare_parameters",
]

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


def check_optimizer(optimizer: object) -> None:
    """Raises TypeError unless ``optimizer`` behaves like one of torch.optim."""
    needed = ("param_groups", "state", "step", "zero_grad", "state_dict", "load_state_dict")
    missing = [name for name in needed if not hasattr(optimizer, name)]
    if isinstance(optimizer, type) or missing:
        raise TypeError(
            f"optimizer must be an instance like those of torch.optim, got {optimizer!r}"
            + (f", which has no {', '.join(missing)}" if missing else "")
        )


def check_model(model: torch.nn.Module | None) -> None:
    """Raises ConfigError if another wrapper averages the model's gradients or shards it."""
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                "the model is wrapped in DistributedDataParallel, which averages gradients "
                "itself; pass the plain module and drop the wrapper"
            )
        if kind in ("FullyShardedDataParallel", "FSDPModule") or hasattr(module, "_get_fsdp_state"):
            raise ConfigError(
                f"the model's parameters are sharded by FSDP ({kind}); psplus needs whole "
                "parameters in each worker: pass the plain module"
            )


def _is_sharded_by_fsdp(tensor: torch.Tensor) -> bool:
    """Whether it is a flat parameter of FSDP's, or with ``use_orig_params`` a view of one."""
    return hasattr(tensor, "_fsdp_flattened")


def _check_no_ddp(parameters: Sequence[NamedParameter]) -> None:
    """Raises ConfigError if a DistributedDataParallel averages gradients of these parameters.

    Neither a parameter nor its module knows of the wrapper around it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return  # there cannot be one
    ours = {id(p.tensor) for p in parameters}
    for thing in gc.get_objects():
        if not issubclass(type(thing), DistributedDataParallel):
            continue
        if any(id(tensor) in ours for tensor in thing.parameters()):
            raise ConfigError(
                "the model is wrapped in DistributedDataParallel, which averages gradients "
                "itself; pass the plain module and drop the wrapper"
            )


def check_parameters(parameters: Sequence[NamedParameter]) -> None:
    """What holds with and without a server.

    Raises:
        ConfigError: For uninitialised or sharded parameters.
    """
    _check_no_ddp(parameters)
    for p in parameters:
        if torch.nn.parameter.is_lazy(p.tensor):
            raise ConfigError(
                f"parameter {p.name!r} of a lazy module has no shape yet; run one forward pass "
                "of the model first"
            )
        if _is_sharded_by_fsdp(p.tensor):
            raise ConfigError(
                f"parameter {p.name!r} is sharded by FSDP; psplus needs whole parameters in each "
                "worker: pass an optimizer over the plain module's"
            )
        if hasattr(p.tensor, "placements") and hasattr(p.tensor, "device_mesh"):
            raise ConfigError(
                f"parameter {p.name!r} is a DTensor; psplus needs whole parameters: pass an "
                "optimizer over plain tensors"
            )


def check_trainable(parameters: Sequence[NamedParameter]) -> None:
    """Raises ConfigError when there is nothing to train."""
    if not any(p.tensor.requires_grad for p in parameters):
        raise ConfigError(
            f"none of the optimizer's {len(parameters)} parameters requires a gradient: there is "
            "nothing to train; set requires_grad on some before psplus.wrap()"
        )


def declare_parameters(parameters: Sequence[NamedParameter]) -> list[tuple[str, str, list[int]]]:
    """Their names, dtypes and shapes as a stream wants them."""
    return [(p.name, DTYPES[p.tensor.dtype], list(p.tensor.shape)) for p in parameters]


def check_distinct(what: str, tensor: torch.Tensor) -> None:
    """Raises ConfigError if elements of ``tensor`` share memory, as ``expand()`` makes them do."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise ConfigError(
                f"{what} is expanded: its shape is {tuple(tensor.shape)}, and several of its "
                "elements are one number in memory, so none can be written by itself; clone() the "
                "tensor when you make the module"
            )


def check_for_server(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[NamedParameter],
    model: torch.nn.Module | None,
    world_size: int,
) -> None:
    """What a server needs beside `check_parameters()`.

    Raises:
        ConfigError: For a device, dtype or layout that this version cannot push, for expanded
            tensors, or an optimizer that evaluates its closure a varying number of times.
    """
    for p in parameters:
        if p.tensor.device.type != "cpu":
            raise ConfigError(
                f"parameter {p.name!r} is on device {p.tensor.device}; this version pushes CPU "
                "parameters: move the model with .cpu() before making the optimizer"
            )
        if p.tensor.layout is not torch.strided:
            raise ConfigError(f"parameter {p.name!r} has layout {p.tensor.layout}, not dense")
        if p.tensor.dtype not in DTYPES:
            raise ConfigError(
                f"parameter {p.name!r} has dtype {p.tensor.dtype}; supported are "
                f"{', '.join(DTYPES.values())}"
            )
        check_distinct(f"parameter {p.name!r}", p.tensor)
    for name, buffer in () if model is None else model.named_buffers():
        if buffer.layout is torch.strided:
            check_distinct(f"buffer {name!r}", buffer)
    if world_size > 1 and isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS steps along a line of its own loss, which has no meaning when several workers "
            "push; use it with one worker, or choose another optimizer"
        )
