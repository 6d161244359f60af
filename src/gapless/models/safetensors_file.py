"""One safetensors file: where each tensor lies, checked against the size of the file, and the tensors, mapped.

Owns the mapping and knows the container format. The header is checked at once; the bytes of a tensor are read when
they are used. Knows nothing of what a tensor is for.
"""

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.errors import CapacityError, CorruptModel, UnsupportedModel
from gapless.models.files import check_regular, shown

TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
_MAX_SIZE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    kind: str  # as safetensors calls the type
    shape: tuple[int, ...]
    start: int  # from the start of the file
    end: int


class SafetensorsFile:
    tensors: Mapping[str, StoredTensor]  # by name, in file order

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = check_regular(path)
        self.tensors = self._laid_out(*self._read_header())
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CapacityError(f"{path}: cannot be mapped ({error.strerror})") from error
        self._storage = torch.frombuffer(self._mapping, dtype=torch.uint8).untyped_storage()

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor is read where it lies: a tensor must begin at a multiple of its numbers' size."""
        return self.tensors[name].start % TYPES[self.tensors[name].kind].itemsize == 0

    def read(self, name: str) -> Tensor:
        """The tensor, in the mapping: its pages are the file's, until they are written to. Or a copy."""
        stored = self.tensors[name]
        kind = TYPES[stored.kind]
        if self.is_mapped(name):
            place = stored.start // kind.itemsize
            return torch.empty(0, dtype=kind).set_(self._storage, place, stored.shape)  # type: ignore[call-overload, no-any-return]
        raw = torch.empty(0, dtype=torch.uint8).set_(self._storage, stored.start, (stored.end - stored.start,))  # type: ignore[call-overload]
        return raw.clone().view(kind).view(stored.shape)  # type: ignore[no-any-return]

    def give_back(self) -> None:
        """Drop the pages that were read: else the whole file would be in memory beside what is made of it."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header, and where it ends."""
        try:
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if self._size < 8 or 8 + length > self._size:
                    raise self._damaged(f"the file has {self._size} bytes, the header alone {8 + length}")
                if length > _MAX_HEADER_BYTES:
                    raise self._damaged(f"the header has {length} bytes")
                header = json.loads(file.read(length).decode(), object_pairs_hook=_without_repetition)
        except OSError as error:
            raise CorruptModel(f"{self.path}: cannot be read ({error.strerror})") from error
        except RecursionError:
            raise self._damaged("the header is nested too deeply") from None
        except ValueError as error:
            raise self._damaged(f"the header cannot be read: {error}") from error
        if not isinstance(header, dict):
            raise self._damaged("the header is not an object")
        header.pop("__metadata__", None)
        return header, 8 + length

    def _laid_out(self, header: dict[str, Any], end: int) -> dict[str, StoredTensor]:
        """The tensors. Together they are the rest of the file, each byte once."""
        found = {name: self._tensor(name, entry, end) for name, entry in header.items()}
        found = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].end)))
        for name, tensor in found.items():
            if tensor.end > self._size:
                raise CorruptModel(
                    f"{self.path}: damaged or cut short: the file ends at byte {self._size}, "
                    f"tensor {name} at byte {tensor.end}; download it again"
                )
            if tensor.start != end:
                raise self._damaged(f"tensor {name} begins at byte {tensor.start}, the one before it ends at {end}")
            end = tensor.end
        if end != self._size:
            raise self._damaged(f"{self._size - end} bytes belong to no tensor")
        return found

    def _tensor(self, name: str, entry: Any, data: int) -> StoredTensor:
        """data: where in the file the tensors begin."""
        found: list[Any] = [entry.get(key) if isinstance(entry, dict) else None for key in _ENTRY]
        kind, shape, places = found
        if not _are_sizes(shape) or not _are_sizes(places) or len(places) != 2 or not isinstance(kind, str):
            raise self._damaged(f"tensor {name[:200]} is {shown(entry)}, which has no type, shape and place")
        if kind not in TYPES:
            raise UnsupportedModel(f"{self.path}: tensor {name[:200]} has the unknown type {shown(kind)}")
        start, end = places
        num_bytes = prod(shape) * TYPES[kind].itemsize
        if end - start != num_bytes or num_bytes > _MAX_SIZE:
            raise self._damaged(
                f"tensor {name[:200]} of type {kind} and shape {shown(tuple(shape))} takes {shown(num_bytes)} bytes, "
                f"its place has {end - start}"
            )
        return StoredTensor(kind, tuple(shape), data + start, data + end)

    def _damaged(self, why: str) -> CorruptModel:
        return CorruptModel(f"{self.path}: damaged or cut short: {why}; download it again")


_ENTRY = ("dtype", "shape", "data_offsets")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{name[:200]} is there twice")
    return found
