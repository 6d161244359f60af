"""Tiny checkpoints of GPT-OSS whose experts are random MXFP4 blocks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from family_cases import GPT_OSS, save_hf

SIZES = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}


def random_blocks(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)


def quantized(path: Path, **sizes: int) -> None:
    """Replace the experts of a saved model by random blocks, and the model's config by one that says so."""
    save_hf(path, **GPT_OSS | SIZES | sizes)
    tensors = load_file(path / "model.safetensors")
    for seed, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        count, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_blocks(count, outputs, inputs // 32, seed=seed)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def make_whole(path: Path, names: str, to: Path) -> None:
    """Write the checkpoint with those stacks that have `names` in their name made whole by transformers."""
    to.mkdir()
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config")
    (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks") and names in name]:
        whole = convert_moe_packed_tensors(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
        tensors[name] = whole.float().contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def expected_logits(path: Path, to: Path, tokens: torch.Tensor) -> torch.Tensor:
    """By transformers with whole weights."""
    make_whole(path, "experts", to)
    reference = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return reference.eval()(tokens[None]).logits[0]  # type: ignore[no-any-return]
