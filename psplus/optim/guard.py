"""Notices parameters that somebody else has written."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch

from psplus.errors import ConfigError, Error
from psplus.optim.names import NamedParameter

__all__ = ["OutsideWrites", "WriteGuard", "check_policy"]

OutsideWrites = Literal["raise", "ignore"]

_SAMPLES = 16  # elements per parameter
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_policy(outside_writes: str) -> None:
    """Raises ConfigError for an unknown policy."""
    if outside_writes not in ("raise", "ignore"):
        raise ConfigError(f"outside_writes must be 'raise' or 'ignore', got {outside_writes!r}")


class WriteGuard:
    """Remembers version counters and a sample of values as psplus last left them.

    Writes through ``p.data`` move no version counter, hence the sample: up to 16 elements spread
    over a parameter, compared bit by bit, gathered for all parameters in one call per dtype.
    """

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self._names = [p.name for p in parameters]
        self._tensors = [p.tensor for p in parameters]
        self._kinds = self._read_kinds()
        self._places: list[int] = []
        self._views: dict[torch.dtype, list[torch.Tensor]] = {}
        self._owners: dict[torch.dtype, list[int]] = {}
        self.record()

    def record(self, found: str | None = None) -> None:
        """Take the parameters as they are now for psplus's own, but for what was ``found``."""
        self._found = found
        self._has_moved = False
        self._view_samples()
        self._versions = self._read_versions()
        self._samples = self._read_samples()

    def find(self) -> str | None:
        """Name of a parameter that has changed since `record()`, or None."""
        if self._found is not None:
            return self._found
        versions = self._read_versions()
        if versions != self._versions:
            return self._name_of_first_difference(versions, self._versions)
        self._has_moved = self._view_samples() or self._has_moved
        if self._has_moved:
            kinds = self._read_kinds()
            if kinds != self._kinds:
                return self._name_of_first_difference(kinds, self._kinds)
        for dtype, now in self._read_samples().items():
            before = self._samples[dtype]
            if not torch.equal(now, before):
                at = int((now != before).nonzero()[0])
                return self._names[self._owners[dtype][at]]
        return None

    def check(self) -> None:
        """Raises Error if a parameter was changed from outside since `record()`."""
        name = self.find()
        if name is not None:
            self.check_kinds()
            raise Error(
                f"parameter {name!r} was changed outside of psplus since its last step; call "
                "publish() after such a change to make it everybody's, pull() to take the servers' "
                "values instead (after a step that failed, for one), or pass "
                "outside_writes='ignore' to have such changes overwritten"
            )

    def check_kinds(self) -> None:
        """Raises ConfigError if a parameter has another shape or dtype than when it was wrapped."""
        for name, now, before in zip(self._names, self._read_kinds(), self._kinds, strict=True):
            if now != before:
                raise ConfigError(
                    f"parameter {name!r} was wrapped as {before[0]} of shape {list(before[1])}, "
                    f"but now is {now[0]} of shape {list(now[1])}; a parameter keeps both while it "
                    "is wrapped: close() this wrapper and wrap the optimizer again"
                )

    def _read_versions(self) -> list[int]:
        return [t._version for t in self._tensors]

    def _read_kinds(self) -> list[tuple[torch.dtype, torch.Size]]:
        return [(t.dtype, t.shape) for t in self._tensors]

    def _view_samples(self) -> bool:
        """Makes the views again if a parameter's memory has moved, as ``p.data = ...`` does."""
        places = [t.data_ptr() for t in self._tensors]
        if places == self._places:
            return False
        views, owners = defaultdict(list), defaultdict(list)
        for i, tensor in enumerate(self._tensors):
            for view in _sample_views(tensor):
                views[view.dtype].append(view)
                owners[view.dtype].extend([i] * view.numel())
        self._views, self._owners, self._places = dict(views), dict(owners), places
        return True

    def _read_samples(self) -> dict[torch.dtype, torch.Tensor]:
        with torch.no_grad():
            # As integers: a NaN equals itself, and -0.0 is not 0.0.
            return {
                dtype: torch.cat(views).view(_BITS[dtype.itemsize])
                for dtype, views in self._views.items()
            }

    def _name_of_first_difference(self, now: Sequence[object], before: Sequence[object]) -> str:
        pairs = zip(self._names, now, before, strict=True)
        return next(name for name, new, old in pairs if new != old)


def _sample_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of at most 16 elements, evenly spread; no copies, so they show later writes.

    The elements are the same wherever they lie: another memory format alone is no change.
    """
    whole = tensor.detach()
    parts = torch.view_as_real(whole).unbind(-1) if whole.is_complex() else (whole,)
    step = max(1, -(-whole.numel() // _SAMPLES))
    if whole.is_contiguous():
        return [part.view(-1)[::step] for part in parts]
    index = torch.unravel_index(torch.arange(0, whole.numel(), step), whole.shape)
    places = list(zip(*(along.tolist() for along in index), strict=True))
    return [part[place].view(1) for part in parts for place in places]
