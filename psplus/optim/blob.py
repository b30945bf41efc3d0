"""What a worker takes over beside the parameters: hyper-parameters, optimizer state, buffers."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from psplus.errors import ConfigError, LayoutMismatch
from psplus.optim.names import NamedParameter
from psplus.optim.tree import is_portable, pack, unpack

__all__ = ["adopt", "check_same", "describe"]

_log = logging.getLogger(__name__)


def describe(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    parameters: Sequence[NamedParameter],
    model: torch.nn.Module | None,
    scheme: str,
    rank: int,
    *,
    with_state: bool = True,
) -> bytes:
    """Rank, kind, hyper-parameters per group, state per parameter, the model's buffers: as bytes.

    ``groups`` are those of ``optimizer`` that hold ``parameters``: all, or one that is added.
    Where servers keep the state it does not travel here: not ``with_state``.
    Values that are neither numbers, strings, tensors nor containers of them stay each worker's own.
    """
    names = {p.tensor: p.name for p in parameters}
    described = [
        {
            "names": [names[t] for t in group["params"]],
            "values": _portable({k: v for k, v in group.items() if k != "params"}, f"group {g}"),
        }
        for g, group in enumerate(groups, len(optimizer.param_groups) - len(groups))
    ]
    state = {
        names[key]: _portable(value, f"state of {names[key]!r}")
        for key, value in (optimizer.state.items() if with_state else ())
        if isinstance(key, torch.Tensor) and key in names and isinstance(value, dict)
    }
    buffers = {} if model is None else dict(model.named_buffers())
    kind = {"optimizer": _kind(optimizer), "scheme": scheme}
    return pack(
        {"rank": rank, "kind": kind, "groups": described, "state": state, "buffers": buffers}
    )


def check_same(blob: bytes, optimizer: torch.optim.Optimizer, scheme: str, rank: int) -> None:
    """Raises ConfigError unless the worker of ``blob`` has the same optimizer and scheme."""
    tree = unpack(blob)
    for what, ours in (("optimizer", _kind(optimizer)), ("scheme", scheme)):
        if tree["kind"][what] != ours:
            raise ConfigError(
                f"the {what} is {ours!r} on rank {rank}, but {tree['kind'][what]!r} on rank "
                f"{tree['rank']}, as which the job began; use the same {what} on every worker"
            )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def adopt(
    blob: bytes,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    parameters: Sequence[NamedParameter],
    model: torch.nn.Module | None,
    rank: int,
) -> None:
    """Take over what `describe()` on another worker has put into ``blob``.

    Raises:
        ConfigError: If the workers' parameter groups or their models' buffers differ.
        LayoutMismatch: If a buffer's shape differs.
    """
    tree = unpack(blob)
    tensors = {p.name: p.tensor for p in parameters}
    names = {p.tensor: p.name for p in parameters}
    ours = [[names[t] for t in g["params"]] for g in groups]
    _check_groups(tree["groups"], ours, f"on rank {rank}", f"on rank {tree['rank']}")
    buffers = _matching_buffers(
        tree["buffers"], model, f"on rank {rank}", f"on rank {tree['rank']}"
    )
    for group, other in zip(groups, tree["groups"], strict=True):
        group.update(other["values"])
    for name, value in tree["state"].items():
        optimizer.state.setdefault(tensors[name], {}).update(value)
    for name in tensors.keys() - tree["state"].keys():
        optimizer.state.pop(tensors[name], None)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _portable(values: dict[Any, Any], where: str) -> dict[Any, Any]:
    result = {key: value for key, value in values.items() if is_portable({key: value})}
    for key in values.keys() - result.keys():
        _log.info("%r in %s stays each worker's own: it cannot travel", key, where)
    return result


def _check_groups(
    theirs: list[dict[str, Any]], ours: list[list[str]], here: str, there: str
) -> None:
    if len(theirs) != len(ours):
        raise ConfigError(
            f"the optimizer has {len(ours)} parameter group(s) {here}, but {len(theirs)} {there}; "
            "build the same groups on every worker"
        )
    for g, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if their["names"] != our:
            odd = sorted(set(their["names"]) ^ set(our)) or our
            raise ConfigError(
                f"parameter group {g} {here} differs from that {there} in "
                f"{', '.join(map(repr, odd))}; build the same groups, in the same order, on every "
                "worker"
            )


def _matching_buffers(
    theirs: dict[str, torch.Tensor], model: torch.nn.Module | None, here: str, there: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ours = {} if model is None else dict(model.named_buffers())
    if odd := sorted(theirs.keys() ^ ours.keys()):
        raise ConfigError(
            f"buffer {odd[0]!r} is {_known(odd[0] in ours)} {here} and {_known(odd[0] in theirs)} "
            f"{there}; pass the same model= to psplus.wrap() on every worker"
        )
    for name in ours:
        if theirs[name].shape != ours[name].shape:
            raise LayoutMismatch(
                f"buffer {name!r} has shape {tuple(ours[name].shape)} {here}, but "
                f"{tuple(theirs[name].shape)} {there}; build the same model on every worker"
            )
    return [(ours[name], theirs[name]) for name in ours]


def _known(given: bool) -> str:
    return "given" if given else "not given"
