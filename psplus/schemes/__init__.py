"""Synchronisation schemes: one file each.

``wrap`` takes their names ("bsp", "ssp", "asp", "ps+") or objects with options.
"""

from psplus.schemes.asp import ASP
from psplus.schemes.base import Scheme
from psplus.schemes.bsp import BSP
from psplus.schemes.psplus import PSPlus
from psplus.schemes.ssp import SSP

__all__ = ["ASP", "BSP", "SSP", "PSPlus", "Scheme"]
