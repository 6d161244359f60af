"""MXFP4 checkpoints: equal to what transformers makes of the blocks, and refused where they are none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity_of_families import CLOSE, MAX_LENGTH, paged_logits
from tiny_models import load, random_tokens, save_hf
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from family_cases import GPT_OSS
from gapless.errors import CorruptModel
from gapless.models.mxfp4 import dequantize

SIZES = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
UP = "model.layers.0.mlp.experts.gate_up_proj"


def random_blocks(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)


def quantized(path: Path) -> None:
    """Replace the experts of a saved model by random blocks, and the model's config by one that says so."""
    save_hf(path, **GPT_OSS | SIZES)
    tensors = load_file(path / "model.safetensors")
    for seed, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        count, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_blocks(count, outputs, inputs // 32, seed=seed)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def test_numbers_equal_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 8, 2, seed=0)
    assert torch.equal(dequantize(blocks, scales).transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


def test_a_checkpoint(tmp_path: Path) -> None:
    quantized(tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "a/model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        whole = convert_moe_packed_tensors(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
        tensors[name] = whole.float().contiguous()
    save_file(tensors, tmp_path / "b/model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference.eval()(random_tokens()[None]).logits[0]
    found = paged_logits(load(tmp_path / "a", max_positions=MAX_LENGTH), random_tokens())
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=CLOSE)


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
