"""One GGUF file: its metadata, and its tensors, as they are stored or dequantized on demand.

Owns the mapping of the file and knows the container format (versions 2 and 3, little-endian).
Knows nothing of architectures: what a key or a tensor name means is for `config` and `weights`.
"""

import errno
import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.errors import CapacityError, CorruptModel, ModelNotFound, UnsupportedModel
from gapless.models.files import check_regular, is_there

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT64 = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 128 * 2**20  # with a vocabulary of 50 thousand it has 2
_MAX_ARRAY_ITEMS = 2**24
_MAX_ENTRIES = 2**17  # keys, or tensors
_MOST_TOUCHED = 32 * 2**20


class GGUFFile:
    """The header is read at once (0.06 s with a vocabulary of 50 thousand); tensor data stays on disk until loaded."""

    metadata: Mapping[str, Any]  # scalars, str, or list of those
    tensors: Mapping[str, "GGUFTensor"]  # by GGUF name, in file order

    def __init__(self, path: Path) -> None:
        self.path = path
        buffer = _map(path)
        try:
            self.metadata, infos, end = _read_header(_Cursor(buffer))
            start = _aligned(end, self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        except (struct.error, UnicodeDecodeError, ValueError, MemoryError) as error:
            raise CorruptModel(f"{path}: the GGUF header is damaged or cut short ({error})") from error
        self.tensors = {name: GGUFTensor(path, name, shape, kind, start + at) for name, shape, kind, at in infos}
        if len(self.tensors) < len(infos):
            twice = next(name for name, count in Counter(info[0] for info in infos).items() if count > 1)
            raise CorruptModel(f"{path}: the tensor {twice[:200]} is there twice")
        self._buffer = buffer
        self._num_touched = 0  # bytes, since the pages were last given back

    def check(self) -> None:
        """Every tensor can be read: its type is known, the file has all of it, and no two share a byte."""
        tensors = sorted(self.tensors.values(), key=lambda tensor: tensor.offset)
        for tensor in tensors:
            tensor.check_readable()
        for tensor, following in pairwise(tensors):
            if tensor.offset + tensor.bytes_in(self._buffer).nbytes > following.offset:
                raise CorruptModel(f"{self.path}: the tensors {tensor.name} and {following.name} overlap")
        if tensors:
            tensors[-1].bytes_in(self._buffer)

    def load(self, name: str) -> npt.NDArray[np.float32]:
        """Dequantizes one tensor to float32, in the row-major shape of `tensors[name].shape`."""
        tensor = self.tensors[name]
        return _dequantize(self.load_bytes(name), tensor.checked_kind(), f"{self.path}: tensor {name}")

    def load_stretch(self, name: str, axis: int, begin: int, end: int) -> npt.NDArray[np.float32]:
        """As `load`, from `begin` to `end` along this axis. Along the last one whole blocks are dequantized."""
        tensor = self.tensors[name]
        kind, where = tensor.checked_kind(), f"{self.path}: tensor {name}"
        raw, before = self.load_bytes(name), (slice(None),) * axis
        if axis < len(tensor.shape) - 1:
            return _dequantize(np.ascontiguousarray(raw[(*before, slice(begin, end))]), kind, where)
        size, num_bytes = _block(kind)
        first, last = begin // size, -(-end // size)
        part = np.ascontiguousarray(raw[(*before, slice(first * num_bytes, last * num_bytes))])
        return _dequantize(part, kind, where)[..., begin - first * size : end - first * size]

    def load_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """One tensor as it is stored, its last dimension in bytes. It lies in the mapping; nobody writes to it."""
        raw = self.tensors[name].bytes_in(self._buffer)
        if self._num_touched > _MOST_TOUCHED:
            self.give_back()
        self._num_touched += raw.nbytes
        return raw

    def give_back(self) -> None:
        """The pages that were read: else the whole file would be in memory beside what is made of it."""
        self._buffer.madvise(mmap.MADV_DONTNEED)
        self._num_touched = 0


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in the file, and how it is stored."""

    path: Path
    name: str
    shape: tuple[int, ...]  # row-major: the reverse of the order in the file
    kind: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the file

    def checked_kind(self) -> Any:
        """The kind, if the `gguf` package knows it."""
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(self.kind)
            gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(f"{self.path}: tensor {self.name} has the unknown type {self.kind}") from error
        return kind

    def check_readable(self) -> None:
        """Raises UnsupportedModel unless the `gguf` package turns this kind into numbers."""
        import gguf

        kind = self.checked_kind()
        _dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind, f"{self.path}: tensor {self.name}")

    def bytes_in(self, buffer: mmap.mmap) -> npt.NDArray[np.uint8]:
        kind = self.checked_kind()
        block_size, block_bytes = _block(kind)
        if not self.shape or not prod(self.shape) or self.shape[-1] % block_size:
            raise CorruptModel(f"{self.path}: tensor {self.name}: shape {self.shape} does not fit type {kind.name}")
        row_bytes = self.shape[-1] // block_size * block_bytes
        num_bytes = prod(self.shape[:-1]) * row_bytes
        if self.offset + num_bytes > len(buffer):
            raise CorruptModel(f"{self.path}: the file ends inside tensor {self.name}; download it again")
        return np.frombuffer(buffer, np.uint8, num_bytes, self.offset).reshape(*self.shape[:-1], row_bytes)


def _block(kind: Any) -> tuple[int, int]:
    """Numbers of a block, and its bytes."""
    import gguf

    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    return int(size), int(num_bytes)


def _dequantize(raw: npt.NDArray[np.uint8], kind: Any, where: str) -> npt.NDArray[np.float32]:
    import gguf

    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(kind.name)
    if plain is not None:
        return raw.view(plain).astype(np.float32)
    try:
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, kind)
    except NotImplementedError as error:
        raise UnsupportedModel(f"{where} has the type {kind.name}, which cannot be turned into numbers") from error
    return values


def _aligned(position: int, alignment: object) -> int:
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment is {alignment!r}")
    return -(-position // alignment) * alignment


def _map(path: Path) -> mmap.mmap:
    if is_there(path):
        check_regular(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # an empty file cannot be mapped
        raise CorruptModel(f"{path}: the file is empty") from error
    except OSError as error:
        kind = CapacityError if error.errno == errno.ENOMEM else ModelNotFound
        raise kind(f"{path}: {error.strerror}") from error


class _Cursor:
    """A read position in the header; every read past the end raises struct.error or ValueError."""

    __slots__ = ("buffer", "position")

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def _check(self, position: int) -> None:
        if position > len(self.buffer):
            raise ValueError("a value runs past the end of the file")
        if position > _MAX_HEADER_BYTES:
            raise ValueError(f"the header is larger than {_MAX_HEADER_BYTES} bytes")

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.buffer, self.position)
        self.position += struct.calcsize(f"<{code}")
        self._check(self.position)
        return value

    def strings(self, count: int) -> list[str]:
        buffer, position, length_of = self.buffer, self.position, _UINT64.unpack_from
        values = []
        for _ in range(count):
            (length,) = length_of(buffer, position)
            begin = position + 8
            position = begin + length
            self._check(position)
            values.append(str(buffer[begin:position], "utf-8"))
        self.position = position
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(_code(kind))

    def array(self, kind: int, count: int) -> list[Any]:
        if count > _MAX_ARRAY_ITEMS:
            raise ValueError(f"an array of {count} items")
        if kind == _STRING:
            return self.strings(count)
        dtype = np.dtype(f"<{_code(kind)}" if kind != 7 else np.bool_)
        self._check(self.position + count * dtype.itemsize)
        values = np.frombuffer(self.buffer, dtype, count, self.position) if count else np.empty(0, dtype)
        self.position += values.nbytes
        items: list[Any] = values.tolist()
        return items


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]


_TensorInfo = tuple[str, tuple[int, ...], int, int]  # name, shape, kind, offset in the data section


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], list[_TensorInfo], int]:
    if cursor.buffer[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is neither 2 nor 3")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if max(num_tensors, num_keys) > _MAX_ENTRIES:
        raise ValueError(f"{num_tensors} tensors and {num_keys} keys")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata, [_read_info(cursor) for _ in range(num_tensors)], cursor.position


def _read_info(cursor: _Cursor) -> _TensorInfo:
    name, num_dims = cursor.string(), cursor.scalar("I")
    if num_dims > 4:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    dims = tuple(cursor.scalar("Q") for _ in range(num_dims))
    return name, dims[::-1], cursor.scalar("I"), cursor.scalar("Q")
