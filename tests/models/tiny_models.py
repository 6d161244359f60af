"""Tiny models written to disk, and the dense attention that stands in for the paged one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from family_cases import random_tokens, raw_config, save_hf
from gapless.models.decoder import AttendLayer, CausalLM
from gapless.models.loader import load_config, load_model
from gapless.models.rope import RotaryRotation
from gapless.models.source import resolve

__all__ = ["random_tokens", "raw_config", "save_hf"]

torch.set_num_threads(1)
CPU = torch.device("cpu")


def dense_attend(num_heads: int, num_kv_heads: int) -> AttendLayer:
    def attend(layer: int, heads: Tensor, rotation: RotaryRotation) -> Tensor:
        qk, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        q, k = rotation.apply(qk).split_with_sizes((num_heads, num_kv_heads), dim=1)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)

    return attend


def full_logits(model: CausalLM, token_ids: Tensor) -> Tensor:
    attend = dense_attend(model.config.num_heads, model.config.num_kv_heads)
    with torch.inference_mode():
        return model.logits(model.forward(token_ids, torch.arange(len(token_ids)), attend))


def load(path: Path | str, **options: Any) -> CausalLM:
    source = resolve(path)
    return load_model(source, load_config(source), **{"dtype": torch.float32, "device": CPU} | options)


def save_gguf(
    path: Path, arch: str, *, drop: str = "", extra: dict[str, np.ndarray] | None = None, **metadata: Any
) -> dict[str, np.ndarray]:
    """Writes a tiny GGUF as llama.cpp's converter would; returns its weights under Hugging Face names."""
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 24,
    }
    for key, value in sizes.items():
        if key != drop:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 5000.0)
    for key, value in metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key.replace("__", ".").replace("ARCH", arch), value)
    weights = _gguf_weights(arch)
    for name, (gguf_name, array) in weights.items():
        if gguf_name != drop:
            is_permuted = arch == "llama" and ("q_proj" in name or "k_proj" in name)
            stored = pairs_from_halves(array, 4 if "q_proj" in name else 2) if is_permuted else array
            writer.add_tensor(gguf_name, stored)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: array for name, (_, array) in weights.items()}


def pairs_from_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _gguf_weights(arch: str) -> dict[str, tuple[str, np.ndarray]]:
    shapes = {
        "model.embed_tokens.weight": ("token_embd.weight", (97, 64)),
        "model.norm.weight": ("output_norm.weight", (64,)),
        "input_layernorm.weight": ("attn_norm.weight", (64,)),
        "post_attention_layernorm.weight": ("ffn_norm.weight", (64,)),
        "self_attn.q_proj.weight": ("attn_q.weight", (96, 64)),
        "self_attn.k_proj.weight": ("attn_k.weight", (48, 64)),
        "self_attn.v_proj.weight": ("attn_v.weight", (48, 64)),
        "self_attn.o_proj.weight": ("attn_output.weight", (64, 96)),
        "mlp.gate_proj.weight": ("ffn_gate.weight", (96, 64)),
        "mlp.up_proj.weight": ("ffn_up.weight", (96, 64)),
        "mlp.down_proj.weight": ("ffn_down.weight", (64, 96)),
    }
    if arch == "qwen3":
        shapes |= {f"self_attn.{x}_norm.weight": (f"attn_{x}_norm.weight", (24,)) for x in "qk"}
    if arch == "qwen2":
        rows = {"q": 96, "k": 48, "v": 48}
        shapes |= {f"self_attn.{x}_proj.bias": (f"attn_{x}.bias", (rows[x],)) for x in "qkv"}
    rng = np.random.default_rng(0)
    weights = {}
    for name, (gguf_name, shape) in shapes.items():
        array = rng.normal(0, 0.2, shape).astype(np.float32)
        in_layer = not name.startswith("model.")
        weights[f"model.layers.0.{name}" if in_layer else name] = (
            f"blk.0.{gguf_name}" if in_layer else gguf_name,
            array,
        )
    return weights
