"""Where weights come from: a safetensors directory, a GGUF file, or a random generator.

Each source lists shapes by name without reading data, and reads one tensor at a time.
Knows the file layouts; knows nothing of what a model does with a weight.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.files import is_there, read_object, shown
from gapless.models.gguf_file import GGUFFile
from gapless.models.gguf_scheme import PIECE_BYTES, has_finite_scales, stored_weight
from gapless.models.mxfp4_scheme import split_blocks
from gapless.models.safetensors_file import SafetensorsFile
from gapless.models.weight import Weight

Shapes = Mapping[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"
_DUMMY_SCALE = 0.02


class Weights(Protocol):
    shapes: Shapes  # by name

    def read(self, name: str) -> Tensor:
        """The tensor in the dtype it is stored in, or float32 where that is not a torch dtype."""
        ...

    def origin(self, name: str) -> str:
        """Where the tensor lies or should lie, for messages."""
        ...


class SafetensorsWeights:
    """One file or many shards, with or without an index; the files stay mapped while this or a tensor of it lives.

    Some checkpoints leave out the first word of all names. Which, the name of one weight shows.
    """

    def __init__(self, directory: Path, first: str = "") -> None:
        """first: the full name of a weight that every checkpoint has."""
        self._directory = directory
        self._files: dict[str, SafetensorsFile] = {}  # of each tensor
        index = directory / INDEX
        places = read_index(index) if is_there(index) else {}
        for path in _shards(directory, places):
            self._add(SafetensorsFile(path))
        for name, shard in places.items():
            if name not in self._files:
                raise CorruptModel(f"{directory / shard}: has no tensor {name}, though {INDEX} says so")
        word, _, rest = first.partition(".")
        self._left_out = f"{word}." if first not in self._files and rest in self._files else ""
        tensors = {self._full(name): file.tensors[name] for name, file in self._files.items()}
        self.shapes: Shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.kind for name, tensor in tensors.items()}  # as safetensors calls them

    def _add(self, file: SafetensorsFile) -> None:
        for name in file.tensors:
            if name in self._files:
                raise CorruptModel(f"{file.path}: has a tensor {name}, and so has {self._files[name].path}")
            self._files[name] = file

    def _full(self, name: str) -> str:
        return name if name.startswith(("lm_head.", self._left_out)) else self._left_out + name

    def read(self, name: str) -> Tensor:
        """It lies in the mapping of its file, if it can."""
        stored = self._stored(name)
        return self._files[stored].read(stored)

    def is_mapped(self, name: str) -> bool:
        stored = self._stored(name)
        return self._files[stored].is_mapped(stored)

    def give_back(self, name: str) -> None:
        """Drop what was read of the tensor's file; who still reads there gets it from the file again."""
        self._files[self._stored(name)].give_back()

    def read_stretch(self, name: str, axis: int, begin: int, end: int) -> Tensor:
        """A part of a tensor; the rest of it is not read."""
        stored = self._stored(name)
        return self._files[stored].read(stored).narrow(axis, begin, end - begin).contiguous()

    def origin(self, name: str) -> str:
        stored = self._stored(name)
        return str(self._files[stored].path if stored in self._files else self._directory)

    def _stored(self, name: str) -> str:
        return name if name in self._files else name.removeprefix(self._left_out)


def _shards(directory: Path, places: Mapping[str, str]) -> list[Path]:
    """places: what the index says, if there is one."""
    single = directory / "model.safetensors"
    if is_there(directory / INDEX):
        paths = [directory / name for name in sorted(set(places.values()))]
    else:
        paths = [single] if is_there(single) else sorted(directory.glob("*.safetensors"))
    if not paths and list(directory.glob("*.bin")):
        raise UnsupportedModel(f"{directory}: has *.bin weights only; convert them to safetensors")
    if not paths:
        raise CorruptModel(f"{directory}: has no *.safetensors file")
    return paths


def read_index(index: Path) -> dict[str, str]:
    """The shard of each tensor, as an index has it. Each lies below the index's own folder."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise CorruptModel(f"{index}: weight_map is {shown(names)}, not an object")
    for tensor, name in names.items():
        if not isinstance(name, str):
            raise CorruptModel(f"{index}: {shown(tensor)} lies in {shown(name)}, which is not the name of a file")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CorruptModel(f"{index}: {shown(tensor)} lies in {shown(name)}, which is outside the model's folder")
        if not is_there(index.parent / name):
            raise CorruptModel(f"{index.parent / name}: this shard is missing, though {index.name} names it")
    return names


class GGUFWeights:
    """The tensors of a file."""

    def __init__(self, file: GGUFFile) -> None:
        file.check()
        self._file = file
        self.shapes: Shapes = {name: _without_ones(tensor.shape) for name, tensor in file.tensors.items()}

    def read(self, name: str) -> Tensor:
        return torch.from_numpy(self._file.load(name)).view(self.shapes[name])

    def read_stretch(self, name: str, axis: int, begin: int, end: int) -> Tensor:
        """A part of a tensor; the rest of it is not read, except for blocks that lie across its borders."""
        return torch.from_numpy(self._file.load_stretch(name, axis, begin, end))

    def kind(self, name: str) -> str:
        """How the tensor is stored, such as Q8_0."""
        return str(self._file.tensors[name].checked_kind().name)

    def is_mxfp4(self, name: str) -> bool:
        """Whether it is a stack of experts of such numbers."""
        return len(self.shapes[name]) == 3 and self.kind(name) == "MXFP4"

    def read_mxfp4(self, name: str) -> tuple[Tensor, Tensor]:
        """Blocks [count, out, groups, 16] and scales [count, out, groups], as a checkpoint of safetensors has them."""
        return split_blocks(torch.from_numpy(self._file.load_bytes(name).copy()))

    def read_stored(self, name: str) -> Weight:
        """A matrix of one of `gguf_scheme.KINDS`, as it is stored."""
        kind, rows = self._file.tensors[name].kind, self._file.load_bytes(name)
        flat = rows.reshape(-1, rows.shape[-1])
        step = max(1, PIECE_BYTES // flat.shape[1])
        for begin in range(0, len(flat), step):
            if begin:
                self._file.give_back()
            if not has_finite_scales(kind, flat[begin : begin + step]):
                raise CorruptModel(f"{self.origin(name)}: tensor {name} has scales that are NaN or infinite")
        return stored_weight(kind, rows)

    def origin(self, name: str) -> str:
        return str(self._file.path)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A matrix of one row is a vector to llama.cpp, and its files have either."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


class DummyWeights:
    """Random weights that depend on the seed and the name only, made on the device they are for."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shapes = shapes
        self._dtype, self._device, self._seed = dtype, device, seed

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name], dtype=self._dtype, device=self._device)
        if tensor.dim() == 1 and name.endswith(".weight"):  # of a norm
            return tensor.fill_(1.0)
        generator = torch.Generator(self._device).manual_seed(crc32(f"{self._seed} {name}".encode()))
        return tensor.normal_(0.0, _DUMMY_SCALE, generator=generator)

    def read_stretch(self, name: str, axis: int, begin: int, end: int) -> Tensor:
        """Of the whole tensor, which is made for it: ranks draw the same numbers as one rank does."""
        return self.read(name).narrow(axis, begin, end - begin).clone()

    def origin(self, name: str) -> str:
        return "dummy weights"
