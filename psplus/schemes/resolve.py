"""From the arguments of ``wrap`` to a scheme."""

from typing import Any

from psplus.errors import ConfigError
from psplus.lr_scale import Policy
from psplus.schemes.asp import ASP
from psplus.schemes.base import Scheme
from psplus.schemes.bsp import BSP
from psplus.schemes.psplus import PSPlus
from psplus.schemes.ssp import SSP

__all__ = ["resolve"]

_OPTIONS = {
    "bsp": (),
    "ssp": ("staleness_bound", "lr_scale"),
    "asp": ("lr_scale",),
    "ps+": ("staleness_bound", "lr_scale", "local_scale"),
}
_CLASSES: dict[str, Any] = {"bsp": BSP, "ssp": SSP, "asp": ASP, "ps+": PSPlus}
_SPELLINGS = {"psplus": "ps+", "ps_plus": "ps+", "ps-plus": "ps+", "ps": "ps+"}


def resolve(
    scheme: str | Scheme,
    *,
    staleness_bound: int | None,
    lr_scale: str | Policy | None,
    local_scale: float | None,
) -> Scheme:
    """The scheme with its options; None leaves an option to the scheme.

    Raises:
        ConfigError: For an unknown scheme, an option that it does not have or that is given twice,
            or "ssp" without a bound.
    """
    options = {
        "staleness_bound": staleness_bound,
        "lr_scale": lr_scale,
        "local_scale": local_scale,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(scheme, str):
        return _check_object(scheme, given)
    if scheme not in _CLASSES:
        meant = _SPELLINGS.get(scheme.lower(), scheme.lower())
        hint = f"; did you mean {meant!r}?" if meant in _CLASSES else ""
        raise ConfigError(
            f"scheme {scheme!r} is not in this version, which has "
            f"{', '.join(map(repr, _CLASSES))}{hint}"
        )
    for name in given:
        if name not in _OPTIONS[scheme]:
            raise ConfigError(f"scheme {scheme!r} takes no {name}, got {given[name]!r}; remove it")
    if scheme == "ssp" and staleness_bound is None:
        raise ConfigError("scheme 'ssp' needs staleness_bound: the steps a worker may be ahead")
    made: Scheme = _CLASSES[scheme](**given)
    return made


def _check_object(scheme: Scheme, given: dict[str, Any]) -> Scheme:
    if isinstance(scheme, type) or not isinstance(scheme, Scheme):
        raise ConfigError(
            f"scheme must be one of {', '.join(map(repr, _CLASSES))} or an object of "
            f"psplus.schemes such as PSPlus(), got {scheme!r}"
        )
    if given:
        raise ConfigError(
            f"{', '.join(given)} given beside a scheme object; pass it to {type(scheme).__name__}()"
        )
    return scheme
