"""The header parser and dequantization against the gguf package; damaged files raise CorruptModel and nothing else."""

import errno
import os
import random
import struct
import time
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import pytest
from tiny_models import load, save_gguf

from gapless.errors import CapacityError, CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from gapless.models.gguf_file import GGUFFile


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_bool("bool", True)
    writer.add_int8("int8", -3)
    writer.add_uint64("uint64", 2**40)
    writer.add_float64("float64", 0.1)
    writer.add_string("string", "žluť ▁")
    writer.add_array("strings", ["a", "", "Ġb"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("bools", [True, False])
    writer.add_array("floats", [0.5, -1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = dict(GGUFFile(path).metadata)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == {
        "bool": True,
        "int8": -3,
        "uint64": 2**40,
        "float64": 0.1,
        "string": "žluť ▁",
        "strings": ["a", "", "Ġb"],
        "ints": [1, -2, 3],
        "bools": [True, False],
        "floats": [0.5, -1.5],
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantize_every_kind(tmp_path: Path, kind: str) -> None:
    path, quant = tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, quant)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("t", stored, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.tensors["t"].shape == (5, 64)
    assert np.array_equal(file.load("t"), gguf.quants.dequantize(stored, quant).reshape(5, 64))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        GGUFFile(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"not a gguf file at all", b"GGUF\x01\0\0\0" + bytes(16)])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CorruptModel, match=r"m\.gguf"):
        GGUFFile(tmp_path / "m.gguf")


def test_unknown_tensor_kind(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", "llama")
    content = (tmp_path / "m.gguf").read_bytes()
    name = b"output_norm.weight"
    kind_at = content.index(name) + len(name) + 4 + 8
    (tmp_path / "m.gguf").write_bytes(content[:kind_at] + b"\xee" + content[kind_at + 1 :])
    with pytest.raises(UnsupportedModel, match=r"output_norm\.weight"):
        load(tmp_path)


def test_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(path, "llama", tokenizer__ggml__tokens=["a", "b"])
    content = path.read_bytes()
    for length in [*range(1, 1500, 37), len(content) // 2, len(content) - 100]:
        path.write_bytes(content[:length])
        with pytest.raises(CorruptModel, match=r"m\.gguf"):
            load(path)


def test_flipped_bytes_never_escape_the_error_tree(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(path, "llama", tokenizer__ggml__tokens=["a", "b"])
    content, rng = path.read_bytes(), random.Random(0)
    for _ in range(150):
        at = rng.randrange(1200)
        path.write_bytes(content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :])
        try:
            load(path)
        except ModelError:
            continue


def header(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def entry(kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


ABSURD = {
    "tensors": header(2**63, 0),
    "keys": header(0, 2**63),
    "string": header(0, 1, struct.pack("<Q", 2**63)),
    "value": header(0, 1, entry(8, struct.pack("<Q", 2**60))),
    "strings": header(0, 1, entry(9, struct.pack("<IQ", 8, 2**60))),
    "numbers": header(0, 1, entry(9, struct.pack("<IQ", 0, 2**60))),
    "arrays": header(0, 1, entry(9, struct.pack("<IQ", 9, 2**60))),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_counts_are_refused_at_once(tmp_path: Path, name: str) -> None:
    """The file is 4 GiB of nothing on disk: only a bound on the header keeps its zeros from being read as values."""
    path = tmp_path / "m.gguf"
    path.write_bytes(ABSURD[name])
    os.truncate(path, 2**32)
    began = time.monotonic()
    with pytest.raises(CorruptModel, match=r"m\.gguf"):
        GGUFFile(path)
    assert time.monotonic() - began < 10


def test_tensors_past_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(path, "llama")
    content, name = path.read_bytes(), b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8 + 4
    path.write_bytes(content[:at] + struct.pack("<Q", 2**62) + content[at + 8 :])
    with pytest.raises(CorruptModel, match=r"ends inside tensor output_norm\.weight"):
        load(path)


def test_a_vocabulary_that_is_no_table(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", "llama", drop="token_embd.weight", extra={"token_embd.weight": np.ones(3, "f4")})
    with pytest.raises(CorruptModel, match=r"token_embd\.weight has shape \(3,\)"):
        load(tmp_path)


def test_a_file_larger_than_the_address_space(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", "llama")
    full = patch("mmap.mmap", side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    with full, pytest.raises(CapacityError, match=r"m\.gguf: Cannot allocate memory"):
        GGUFFile(tmp_path / "m.gguf")
