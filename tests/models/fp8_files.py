"""Tiny checkpoints with FP8 weights on disk, in every spelling, and what their weights stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 320}
FLOAT8 = torch.float8_e4m3fn


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | more
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SPELLINGS: dict[str, tuple[dict[str, Any], str, str]] = {  # config, name of scales, what shares one
    "fp8 in blocks": (FINE, "weight_scale_inv", "block"),
    "fp8, static": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", "tensor"),
    "fp8, dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight_scale", "tensor"),
    "compressed, channel": (compressed("channel"), "weight_scale", "channel"),
    "compressed, tensor": (compressed("tensor"), "weight_scale", "tensor"),
    "compressed, block": (compressed("block", block_structure=[128, 128]), "weight_scale", "block"),
    "fbgemm": (FBGEMM, "weight_scale", "channel"),
}


def scales_of(weight: Tensor, grain: str) -> Tensor:
    """The largest of what shares a scale, as a share of the largest number."""
    if grain == "tensor":
        return weight.abs().max() / 448
    if grain == "channel":
        return weight.abs().amax(dim=1, keepdim=True) / 448
    parts = [[block.abs().max() for block in rows.split(128, dim=1)] for rows in weight.split(128)]
    return torch.tensor(parts) / 448


def whole_scales(scales: Tensor, grain: str, shape: torch.Size) -> Tensor:
    if grain != "block":
        return scales.expand(shape)
    by_row = torch.cat([row.expand(128, -1) for row in scales])[: shape[0]]
    return torch.cat([column[:, None].expand(-1, 128) for column in by_row.unbind(1)], dim=1)[:, : shape[1]]


def quantize(folder: Path, spelling: str, *, but: str = "nothing") -> dict[str, Tensor]:
    """Make the layers' matrices of a checkpoint FP8, those named aside; the whole weights that it stands for now."""
    config, ending, grain = SPELLINGS[spelling]
    path = folder / "model.safetensors"
    stored, whole = {}, {}
    for name, tensor in load_file(path).items():
        stored[name] = whole[name] = tensor
        if "_proj.weight" in name and but not in name:
            scales = scales_of(tensor.float(), grain)
            every = whole_scales(scales, grain, tensor.shape)
            stored[name] = (tensor.float() / every).to(FLOAT8)
            whole[name] = stored[name].float() * every
            stored[name.removesuffix("weight") + ending] = scales
            if config.get("activation_scheme") == "static":
                stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    save_file(stored, path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return whole


def write_whole(folder: Path, whole: dict[str, Tensor], config: Path) -> Path:
    """The same model without quantization."""
    folder.mkdir()
    raw = json.loads((config / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, folder / "model.safetensors")
    return folder
