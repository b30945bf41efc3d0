"""Values of optimizers as JSON and raw tensors: nothing that could run code when read."""

import json
import struct
from typing import Any

import torch

__all__ = ["is_portable", "pack", "unpack"]

_LENGTH = struct.Struct("<Q")
_TENSOR, _TUPLE, _MAP, _COMPLEX = "tensor", "tuple", "map", "complex"


def is_portable(tree: Any) -> bool:
    """Whether `pack()` takes it."""
    try:
        _encode(tree, [])
    except TypeError:
        return False
    return True


def pack(tree: Any) -> bytes:
    """Numbers, strings, None, tensors and lists, tuples and dicts of them as bytes.

    The layout is: length of the skeleton (8 bytes, little endian), skeleton (JSON), then the
    tensors' elements one after another.

    Raises:
        TypeError: If something in the tree is none of these; the message names its type.
    """
    tensors: list[torch.Tensor] = []
    skeleton = json.dumps(_encode(tree, tensors), separators=(",", ":")).encode()
    parts = [_LENGTH.pack(len(skeleton)), skeleton]
    parts += [_bytes_of(t) for t in tensors]
    return b"".join(parts)


def unpack(blob: bytes) -> Any:
    """The tree that was packed; its tensors are new ones on the CPU.

    Raises:
        ValueError: If the bytes are not what `pack()` makes.
    """
    try:
        (length,) = _LENGTH.unpack_from(blob)
        start = _LENGTH.size + length
        return _decode(json.loads(blob[_LENGTH.size : start]), _Reader(blob, start))
    except (struct.error, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"damaged optimizer state: {error}") from error


def _encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value)
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {_MAP: [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, complex):
        return {_COMPLEX: [value.real, value.imag]}
    raise TypeError(f"values of type {type(value).__name__} do not travel")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


class _Reader:
    """Takes tensors off a blob in the order in which they were packed."""

    def __init__(self, blob: bytes, offset: int) -> None:
        # Writable: torch wants no tensor over memory that it must not change.
        self._blob = bytearray(blob)
        self._offset = offset

    def take(self, dtype_name: str, shape: list[int]) -> torch.Tensor:
        dtype = getattr(torch, dtype_name)
        tensor = torch.empty(shape, dtype=dtype)
        size = tensor.numel() * tensor.element_size()
        if self._offset + size > len(self._blob):
            raise ValueError("damaged optimizer state: it ends within a tensor")
        if size:
            raw = torch.frombuffer(self._blob, dtype=torch.uint8, count=size, offset=self._offset)
            tensor.reshape(-1).view(torch.uint8).copy_(raw)
        self._offset += size
        return tensor


def _decode(value: Any, reader: _Reader) -> Any:
    if isinstance(value, list):
        return [_decode(item, reader) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == _TENSOR:
        return reader.take(*content)
    if tag == _TUPLE:
        return tuple(_decode(item, reader) for item in content)
    if tag == _MAP:
        return {_decode(k, reader): _decode(v, reader) for k, v in content}
    if tag == _COMPLEX:
        return complex(*content)
    raise ValueError(f"damaged optimizer state: unknown tag {tag!r}")
