"""Tiny checkpoints of GPT-OSS whose experts are random MXFP4 blocks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from family_cases import GPT_OSS, save_hf

SIZES = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}


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
