"""Optimizers that the servers step: which they are, and how their state travels.

The worker's optimizer keeps groups and hyper-parameters; its ``state`` is empty but for what was
loaded and not yet published.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psplus import _C
from psplus.errors import ConfigError
from psplus.optim.fused import Options, options_for
from psplus.optim.names import NamedParameter
from psplus.optim.skipping import level_of_caller
from psplus.schemes.base import Scheme
from psplus.schemes.psplus import PSPlus

__all__ = ["PlacedOptimizer", "Planes", "check_placement"]

_Group = dict[str, Any]


@dataclass(frozen=True)
class _Kind:
    rule: str  # of the native stream
    planes: tuple[str, ...]  # state tensors by torch's names
    fewest: int  # of them that any options use
    needed: Callable[[_Group], int]  # how many a group's options use


_ADAM = _Kind(
    "adam", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), 2, lambda g: 3 if g["amsgrad"] else 2
)
_KINDS: dict[type, _Kind] = {
    torch.optim.SGD: _Kind("sgd", ("momentum_buffer",), 0, lambda g: int(g["momentum"] != 0)),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: _Kind("adagrad", ("sum",), 1, lambda _: 1),
}


@dataclass(frozen=True)
class Planes:
    """State of some parameters: tensors by plane and parameter, and steps taken by parameter."""

    tensors: list[list[Tensor]]
    counts: list[int]


def check_placement(placement: str, optimizer: torch.optim.Optimizer, scheme: Scheme) -> None:
    """What the servers can step, and when.

    Raises:
        ConfigError: For an unknown placement; for an optimizer or a scheme that servers cannot do.
    """
    if placement not in ("worker", "server"):
        raise ConfigError(f"placement must be 'worker' or 'server', got {placement!r}")
    if placement == "worker":
        return
    if type(optimizer) not in _KINDS:
        raise ConfigError(
            f"placement='server' takes {', '.join(kind.__name__ for kind in _KINDS)}, not "
            f"{type(optimizer).__name__}, of which only its own step() knows what it computes; use "
            "placement='worker'"
        )
    for g, group in enumerate(optimizer.param_groups):
        for option in ("differentiable", "capturable"):
            if group.get(option):
                raise ConfigError(
                    f"parameter group {g} has {option}=True, which servers do not compute; leave "
                    "it out, or use placement='worker'"
                )
    if isinstance(scheme, PSPlus):
        raise refusal(scheme)


def refusal(scheme: Scheme) -> ConfigError:
    """The error for a scheme that pulls before it has pushed."""
    return ConfigError(
        f"scheme {scheme.name!r} continues with a worker's own update before the servers have "
        "answered, and with placement='server' a worker has none; use 'bsp', 'ssp' or 'asp', or "
        "placement='worker'"
    )


class PlacedOptimizer:
    """A worker's optimizer whose steps the servers take."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._kind = _KINDS[type(optimizer)]
        self._options = options_for(optimizer)
        self._planes: dict[Tensor, int] = {}  # that the servers keep, by parameter
        self._has_warned = False

    @property
    def rule(self) -> str:
        """The servers' rule, as a stream wants it."""
        return self._kind.rule

    def add(self, parameters: Sequence[NamedParameter]) -> int:
        """Note parameters of one extent. How many planes of state the servers keep for it."""
        groups = self._optimizer.param_groups
        needed = (self._kind.needed(groups[p.group]) for p in parameters)
        planes = max(needed, default=self._kind.fewest)
        self._planes.update((p.tensor, planes) for p in parameters)
        return planes

    def options(self) -> list[Options]:
        """Hyper-parameters as they are now, by group."""
        return [self._options(group) for group in self._optimizer.param_groups]

    def warn_of_difference(self, rank: int, step: int) -> None:
        """Say, once, that a step of BSP was taken by another worker's hyper-parameters."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"rank {rank} has other hyper-parameters at step {step} than a worker of lower rank, "
            "whose count: with placement='server' a step of BSP is taken once, for all; set the "
            "same on every worker",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )

    @property
    def has_state(self) -> bool:
        """Whether state was loaded, or made by the optimizer, and not given to the servers."""
        return bool(self._optimizer.state)

    def forget_state(self) -> None:
        """From here on the servers' state counts."""
        self._optimizer.state.clear()

    def own_state(self, parameters: Sequence[NamedParameter]) -> Planes:
        """The optimizer's own state; what it lacks is as before the first step."""
        most = max((self._planes[p.tensor] for p in parameters), default=0)
        names = self._kind.planes[:most]
        with torch.no_grad():
            tensors = [[self._own_plane(p, name) for p in parameters] for name in names]
        return Planes(tensors, [self._own_count(p) for p in parameters])

    def _own_plane(self, p: NamedParameter, name: str) -> Tensor:
        own = self._optimizer.state.get(p.tensor, {}).get(name)
        if own is not None:
            return torch.as_tensor(own).to(p.tensor.dtype).expand_as(p.tensor)
        if name == "sum":
            first = self._optimizer.param_groups[p.group]["initial_accumulator_value"]
            fill = complex(first, first) if p.tensor.is_complex() else first
            return torch.full_like(p.tensor, fill, requires_grad=False)
        return torch.zeros_like(p.tensor, requires_grad=False)

    def _own_count(self, p: NamedParameter) -> int:
        own = self._optimizer.state.get(p.tensor, {})
        if self._kind.rule == "sgd":
            return int(own.get("momentum_buffer") is not None)
        return int(own.get("step", 0))

    def take_state(self, stream: _C.DenseStream, parameters: Sequence[NamedParameter]) -> None:
        """Fill the optimizer's ``state``, in torch's form, with what the servers hold."""
        most = max((self._planes[p.tensor] for p in parameters), default=0)
        with torch.no_grad():
            planes = [
                [
                    torch.empty_like(p.tensor, memory_format=torch.contiguous_format)
                    for p in parameters
                ]
                for _ in range(most)
            ]
            counts = stream.read_state(planes)
        for i, p in enumerate(parameters):
            if counts[i] == 0 and self._kind.rule != "adagrad":
                continue
            self._optimizer.state[p.tensor] = self._in_torch_form(
                p, [plane[i] for plane in planes[: self._planes[p.tensor]]], counts[i]
            )

    def _in_torch_form(self, p: NamedParameter, planes: list[Tensor], count: int) -> dict[str, Any]:
        named = dict(zip(self._kind.planes, planes, strict=False))
        if self._kind.rule == "sgd":
            return named
        if not self._optimizer.param_groups[p.group].get("amsgrad", False):
            named.pop("max_exp_avg_sq", None)
        wide = torch.get_default_dtype() == torch.float64
        step = torch.tensor(float(count), dtype=torch.float64 if wide else torch.float32)
        return {"step": step, **named}
