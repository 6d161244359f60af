"""Every way in which weights can be wrong, in each kind of file: an error that names tensor and file, at once.

Files that are none, JSON that is none, and values that are NaN are in test_loader.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_gguf_families import save as save_family
from tiny_models import full_logits, load, random_tokens, save_gguf, save_hf

from gapless.errors import CorruptModel, ModelError, UnsupportedModel
from gapless.models.gguf_file import GGUFFile, GGUFTensor
from gapless.models.loader import load_config
from gapless.models.safetensors_file import SafetensorsFile
from gapless.models.source import resolve

FORMATS = ("single", "sharded", "gguf")
HF, GGUF = "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"


class Damaged:
    """A tiny model of one kind of file, whose tensors can be changed."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.folder = kind, folder
        self.tensor = GGUF if kind == "gguf" else HF
        if kind == "gguf":
            self.path = folder / "m.gguf"
            save_gguf(self.path, "llama")
            return
        save_hf(folder, **({"max_shard_size": "30KB"} if kind == "sharded" else {}))
        paths = sorted(folder.glob("*.safetensors"))
        assert (len(paths) > 1) == (kind == "sharded")
        self.path = next(path for path in paths if self.tensor in load_file(path))

    def change(self, name: str, value: Any) -> None:
        """value: a tensor; None: it is gone."""
        if self.kind == "gguf":
            old = GGUFFile(self.path)
            kept = {key: old.load(key).copy() for key in old.tensors if key != name}
            self._write_gguf(old, kept | ({} if value is None else {name: np.asarray(value)}))
            return
        tensors = {key: tensor.clone() for key, tensor in load_file(self.path).items() if key != name}
        if value is not None:
            tensors[name] = torch.as_tensor(value)
        save_file(tensors, self.path)

    def _write_gguf(self, old: GGUFFile, tensors: dict[str, np.ndarray]) -> None:
        writer = gguf.GGUFWriter(self.path.with_suffix(".new"), "llama")
        for key, value in old.metadata.items():
            if key != "general.architecture" and not isinstance(value, str):
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        for name, value in tensors.items():
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.path.with_suffix(".new").replace(self.path)

    def cut(self) -> None:
        """The last tensor of the file lacks its end."""
        self.tensor = list(self.tensors())[-1]
        content = self.path.read_bytes()
        self.path.write_bytes(content[:-40])

    def tensors(self) -> Any:
        found = GGUFFile(self.path) if self.kind == "gguf" else SafetensorsFile(self.path)
        place = {name: t.offset if isinstance(t, GGUFTensor) else t.start for name, t in found.tensors.items()}
        return dict(sorted(place.items(), key=lambda item: item[1]))

    def set_type(self, number: int, name: str) -> None:
        content = self.path.read_bytes()
        if self.kind == "gguf":
            at = content.index(GGUF.encode()) + len(GGUF) + 4 + 16
            self.path.write_bytes(content[:at] + struct.pack("<I", number) + content[at + 4 :])
            return
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        header[self.tensor]["dtype"] = name
        text = json.dumps(header).encode()
        self.path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


CASES: dict[str, tuple[Callable[[Damaged], None], type[ModelError], tuple[str, ...]]] = {
    "missing": (lambda d: d.change(d.tensor, None), CorruptModel, ("{tensor}",)),
    "extra": (
        lambda d: d.change(d.tensor.replace("q", "k", 1).replace("weight", "bias"), np.ones(48, np.float32)),
        CorruptModel,
        ("has no tensor", ".bias"),
    ),
    "extra, like a mask": (
        lambda d: d.change("model.layers.0.attn.bias", np.ones(48, np.float32)),
        CorruptModel,
        ("has no tensor model.layers.0.attn.bias",),
    ),
    "extra, like eyes": (
        lambda d: d.change("vision_tower.norm.weight", np.ones(48, np.float32)),
        CorruptModel,
        ("has no tensor vision_tower.norm.weight",),
    ),
    "misshapen": (
        lambda d: d.change(d.tensor, np.ones((32, 64), np.float32)),
        CorruptModel,
        ("{tensor} has shape (32, 64), the config says",),
    ),
    "transposed": (
        lambda d: d.change(d.tensor, np.ones((64, 96) if d.kind == "gguf" else (48, 64), np.float32)),
        CorruptModel,
        ("{tensor} has shape (",),
    ),
    "flat": (lambda d: d.change(d.tensor, np.ones(64, np.float32)), CorruptModel, ("{tensor} has shape (64,)",)),
    "cut short": (lambda d: d.cut(), CorruptModel, ("{tensor}", "the file ends", "download it again")),
    "whole numbers": (lambda d: d.change(d.tensor, np.ones((48, 64), np.int8)), UnsupportedModel, ("{tensor}", "I8")),
    "an unknown type": (lambda d: d.set_type(238, "F17"), UnsupportedModel, ("{tensor} has the unknown type",)),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_before_weights_are_read(
    tmp_path: Path, kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, error, parts = CASES[case]
    damaged = Damaged(tmp_path, kind)
    damage(damaged)

    def read(*_: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr(SafetensorsFile, "read", read)
    monkeypatch.setattr(GGUFFile, "load_bytes", read)
    with pytest.raises(ModelError) as caught:
        load(damaged.path if kind == "gguf" else tmp_path)
    assert caught.type is error
    assert str(tmp_path) in str(caught.value)
    if case != "missing" or kind == "sharded":  # which file should have had it, an index alone says
        assert damaged.path.name in str(caught.value)
    for part in parts:
        assert part.format(tensor=damaged.tensor) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_shards_have_one_tensor(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "sharded")
    other = next(path for path in sorted(tmp_path.glob("*.safetensors")) if path != damaged.path)
    save_file({HF: torch.ones(2), **load_file(other)}, other)
    with pytest.raises(CorruptModel, match=f"has a tensor {HF}, and so has") as caught:
        load(tmp_path)
    assert damaged.path.name in str(caught.value)
    assert other.name in str(caught.value)


def test_a_header_that_has_a_tensor_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    with pytest.raises(CorruptModel, match="a is there twice"):
        SafetensorsFile(path)


def test_gguf_tensors_that_overlap_or_repeat(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "gguf")
    content = damaged.path.read_bytes()
    at = content.index(GGUF.encode()) + len(GGUF) + 4 + 16 + 4
    damaged.path.write_bytes(content[:at] + bytes(8) + content[at + 8 :])
    with pytest.raises(CorruptModel, match=r"m\.gguf: the tensors .* overlap"):
        load(damaged.path)
    damaged.path.write_bytes(content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))
    with pytest.raises(CorruptModel, match=r"m\.gguf: the tensor blk\.0\.attn_v\.weight is there twice"):
        load(damaged.path)


def test_a_part_of_a_split_gguf(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", "llama", split__count=3)
    with pytest.raises(UnsupportedModel, match=r"m\.gguf: is one of 3 parts; .* --merge"):
        load(tmp_path / "m.gguf")


def test_weights_of_an_unknown_quantization(tmp_path: Path) -> None:
    """What is there in their place is named too."""
    damaged = Damaged(tmp_path, "single")
    damaged.change(HF, None)
    damaged.change(HF.replace("weight", "qweight"), torch.ones(2, 2))
    with pytest.raises(CorruptModel, match=r"missing weights: .*q_proj\.weight; there is .*q_proj\.qweight"):
        load(tmp_path)


def test_tensors_at_odd_places_are_read(tmp_path: Path) -> None:
    """A header may have any length; a mapped tensor must begin at a multiple of its numbers' size."""
    save_hf(tmp_path)
    expected = full_logits(load(tmp_path), random_tokens())
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    path.write_bytes(struct.pack("<Q", size + 1) + content[8 : 8 + size] + b" " + content[8 + size :])
    assert torch.equal(full_logits(load(tmp_path), random_tokens()), expected)
    file = SafetensorsFile(path)
    assert not any(file.is_mapped(name) for name in file.tensors)  # pages of a copy cannot be given back


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F4"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**64), max_size=5) | json_values,
        "data_offsets": st.lists(st.integers(-1, 2**64), min_size=2, max_size=2) | json_values,
    },
)


@settings(max_examples=150, deadline=None)
@given(header=st.dictionaries(st.text(max_size=6), entries | json_values, max_size=4), data=st.binary(max_size=40))
def test_safetensors_headers_never_escape_the_error_tree(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with suppress(ModelError):
        file = SafetensorsFile(path)
        assert sum(file.read(name).nbytes for name in file.tensors) == len(data)


@settings(max_examples=150, deadline=None)
@given(header=st.binary(max_size=120), num_tensors=st.integers(0, 3), num_keys=st.integers(0, 3))
def test_gguf_headers_never_escape_the_error_tree(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, num_tensors: int, num_keys: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + header)
    with suppress(ModelError):
        GGUFFile(path).check()


def test_the_config_of_a_gguf_without_its_end_is_refused(tmp_path: Path) -> None:
    """So that nothing is made for such a model, and `gapless info` does not describe it."""
    damaged = Damaged(tmp_path, "gguf")
    damaged.cut()
    with pytest.raises(CorruptModel, match=f"the file ends inside tensor {damaged.tensor}"):
        load_config(resolve(damaged.path))


def test_a_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", "llama", split__count=3)
    with pytest.raises(UnsupportedModel, match=r"m\.gguf: is one of 3 parts"):
        load_config(resolve(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["blk.1.ffn_up_exps.bias", "blk.0.ffn_down_exps.weight", "blk.0.attn_sinks.weight"])
@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "misshapen"])
def test_experts_and_sinks_of_a_gguf(tmp_path: Path, name: str, is_there: bool) -> None:
    save_family(tmp_path, "gpt-oss")
    path = tmp_path / "m.gguf"
    content = path.read_bytes()
    if is_there:
        at = content.index(name.encode()) + len(name) + 4  # the size of a row
        path.write_bytes(content[:at] + struct.pack("<Q", 3) + content[at + 8 :])
    else:
        path.write_bytes(content.replace(name.encode(), name.replace("e", "_").encode()))
    with pytest.raises(CorruptModel, match=rf"m\.gguf: .*{name}"):
        load(path)
