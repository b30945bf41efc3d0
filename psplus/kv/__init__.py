"""Shared values by name, without an optimizer."""

from psplus.kv.dense import DenseValue
from psplus.kv.store import KVStore

__all__ = ["DenseValue", "KVStore"]
