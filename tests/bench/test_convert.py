"""The forms that peers read: same metadata, same values in another type."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapless.bench.convert import Forms, shipped_type, write_gguf
from gapless.errors import ModelError
from gapless.models.source import ModelSource


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    import gguf

    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(0.25)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_q.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize(("name", "file_type"), [("BF16", 32), ("F16", 1)])
def test_matrices_change_type_and_nothing_else_does(
    small_gguf: Path, tmp_path: Path, name: str, file_type: int
) -> None:
    import gguf

    target = tmp_path / "target.gguf"
    write_gguf(small_gguf, target, name)
    fields, tensors = read(small_gguf)
    new_fields, new_tensors = read(target)
    assert new_fields == fields | {"general.file_type": file_type}
    assert {key: tensor.tensor_type.name for key, tensor in new_tensors.items()} == {
        "blk.0.attn_q.weight": name,
        "output_norm.weight": "F32",
    }
    for key, tensor in tensors.items():
        old = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        new = gguf.quants.dequantize(new_tensors[key].data, new_tensors[key].tensor_type)
        np.testing.assert_allclose(new, old, rtol=2**-7)


def test_forms_are_made_once(small_gguf: Path, tmp_path: Path) -> None:
    forms = Forms(ModelSource("small", small_gguf, "gguf"), tmp_path)
    assert forms.path("given") == forms.path("gguf") == small_gguf
    made = forms.path("gguf-BF16")
    stamp = made.stat().st_mtime_ns
    assert forms.path("gguf-BF16") == made
    assert made.stat().st_mtime_ns == stamp
    assert (forms.weights("shipped"), forms.weights("fp32")) == ("Q8_0", "fp32")
    assert shipped_type(made) == "BF16"


def test_a_directory_has_no_gguf_forms(tmp_path: Path) -> None:
    forms = Forms(ModelSource("dir", tmp_path, "hf"), tmp_path)
    assert forms.path("given") == forms.path("directory") == tmp_path
    with pytest.raises(ModelError, match="needs a GGUF file, and dir is a directory"):
        forms.path("gguf")
