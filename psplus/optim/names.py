"""Names of an optimizer's parameters: how workers match them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from psplus.errors import ConfigError

__all__ = ["NamedParameter", "NamedParameters", "held_by", "name_group", "name_parameters"]

NamedParameters = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of an optimizer, its name and the index of its group."""

    name: str
    tensor: torch.Tensor
    group: int


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters in its own order."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def name_parameters(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    named_parameters: NamedParameters | None,
) -> list[NamedParameter]:
    """The optimizer's parameters in its own order, each with one name.

    Names come from ``named_parameters``, else from ``model``, else they are ``group.index``. Tied
    tensors go by their first name; names of tensors that the optimizer does not hold are ignored.

    Raises:
        ConfigError: If a name stands for two tensors, or parameters of the optimizer have none.
    """
    names = _names(model, named_parameters)
    result, missing = [], []
    for g, group in enumerate(optimizer.param_groups):
        for i, tensor in enumerate(group["params"]):
            name = f"{g}.{i}" if names is None else names.get(id(tensor))
            if name is None:
                missing.append(f"{g}.{i} of shape {_shape(tensor)}")
            else:
                result.append(NamedParameter(name, tensor, g))
    if missing:
        source = "model" if named_parameters is None else "named_parameters"
        raise ConfigError(
            f"{source} names only part of the optimizer's parameters; no name for "
            f"group.index {', '.join(missing)}; name all of them, or none"
        )
    return result


def name_group(
    optimizer: torch.optim.Optimizer,
    g: int,
    model: torch.nn.Module | None,
    named_parameters: NamedParameters | None,
) -> list[NamedParameter]:
    """The parameters of group ``g``, added later: those without a name are ``group.index``.

    The model's names are those of now: a user adds layers to it and then their parameters here.
    """
    names = _names(model, named_parameters) or {}
    return [
        NamedParameter(names.get(id(tensor), f"{g}.{i}"), tensor, g)
        for i, tensor in enumerate(optimizer.param_groups[g]["params"])
    ]


def _names(
    model: torch.nn.Module | None, named_parameters: NamedParameters | None
) -> dict[int, str] | None:
    if named_parameters is None and model is not None:
        named_parameters = model.named_parameters(remove_duplicate=False)
    return None if named_parameters is None else _first_names(named_parameters)


def _first_names(named_parameters: NamedParameters) -> dict[int, str]:
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    if not isinstance(pairs, Iterable):
        raise TypeError(
            "named_parameters must give pairs of a name and a tensor, as model.named_parameters() "
            f"does, got {named_parameters!r}"
        )
    by_name: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
            raise TypeError(
                "named_parameters must give pairs of a name and a tensor, as "
                f"model.named_parameters() does, got {pair!r}"
            )
        name, tensor = pair
        if by_name.setdefault(name, tensor) is not tensor:
            raise ConfigError(
                f"two parameters are named {name!r}, of shapes {_shape(by_name[name])} and "
                f"{_shape(tensor)}; names must be unique, as in model.named_parameters()"
            )
        names.setdefault(id(tensor), name)
    # by_name keeps the tensors alive until here, so that no id is used twice.
    return names


def _shape(tensor: torch.Tensor) -> object:
    uninitialised = torch.nn.parameter.is_lazy(tensor)
    return "(not initialised)" if uninitialised else tuple(tensor.shape)
