"""MXFP4 checkpoints: equal to what transformers makes of the blocks, and refused where they are none."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity_of_families import CLOSE, MAX_LENGTH, paged_logits
from tiny_models import load, random_tokens
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gapless.errors import CorruptModel
from gapless.models.loader import load_config, open_weights
from gapless.models.mxfp4_scheme import dequantize, join_blocks, split_blocks
from gapless.models.source import resolve
from mxfp4_files import expected_logits, quantized, random_blocks

UP = "model.layers.0.mlp.experts.gate_up_proj"


def test_numbers_equal_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 8, 2, seed=0)
    assert torch.equal(dequantize(blocks, scales).transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


def test_a_checkpoint(tmp_path: Path) -> None:
    quantized(tmp_path / "a")
    expected = expected_logits(tmp_path / "a", tmp_path / "b", random_tokens())
    found = paged_logits(load(tmp_path / "a", max_positions=MAX_LENGTH), random_tokens())
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=CLOSE)


def test_blocks_of_a_gguf_and_back() -> None:
    blocks, scales = random_blocks(3, 8, 2, seed=0)
    rows = join_blocks(blocks, scales)
    assert rows.shape == (3, 8, 2 * 17)
    assert all(map(torch.equal, split_blocks(rows), (blocks, scales)))
    whole = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(torch.from_numpy(whole), dequantize(blocks, scales).float())


def test_weights_as_they_are_stored(tmp_path: Path) -> None:
    """A weight keeps its bytes, and stands for the same numbers as when it is made whole."""
    quantized(tmp_path)
    source = resolve(tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "keeps_mxfp4": True}
    kept, whole = (
        open_weights(source, load_config(source), quantization=kind, **options)(UP) for kind in ("auto", "none")
    )
    assert (kept.scheme.name, whole.scheme.name) == ("mxfp4", "plain")
    assert kept.scales is not None
    assert kept.data.nbytes + kept.scales.nbytes == whole.data.numel() * 17 // 32
    rows = torch.tensor([5, 0, 2])
    for part, expected in zip(kept.scheme.parts(kept), whole.data, strict=True):
        by_output = part.scheme.transposed(part)
        assert torch.equal(by_output.dense(), expected.T)
        assert torch.equal(part.scheme.rows(by_output, rows).dense(), expected.T[rows])
        assert torch.equal(part.scheme.stacked([by_output, by_output]).dense(), torch.cat((expected.T, expected.T)))


@pytest.mark.parametrize("keeps_mxfp4", [False, True])
def test_a_scale_that_is_no_number(tmp_path: Path, keeps_mxfp4: bool) -> None:
    quantized(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}_scales"][1, 2, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModel, match=f"tensor {UP} has values that are NaN or infinite"):
        load(tmp_path, keeps_mxfp4=keeps_mxfp4)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{UP}_scales", None, "no blocks of 32 numbers"),
        (f"{UP}_scales", torch.zeros(4, 64, 3, dtype=torch.uint8), "no blocks of 32 numbers"),
        (f"{UP}_blocks", torch.zeros(4, 64, 2, 8, dtype=torch.uint8), "no blocks of 32 numbers"),
        (f"{UP}_blocks", torch.zeros(4, 64, 2, 16), "is F32, not bytes"),
    ],
)
def test_blocks_that_are_none(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    quantized(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(CorruptModel, match=rf"model\.safetensors: tensor {UP}_blocks .*{message}"):
        load(tmp_path)
