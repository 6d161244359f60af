"""Tiny quantized GGUF files. K kinds are made of random codes, for the `gguf` package only reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

VOCAB_SIZE, HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 100, 256, 512, 8, 2, 32, 2
SIZES = {
    "block_count": NUM_LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": NUM_HEADS,
    "attention.head_count_kv": NUM_KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
}
_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's scales of 16 bits lie
_LAYER = {
    "attn_q": (NUM_HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, NUM_HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def _layer(num_experts: int) -> dict[str, tuple[int, ...]]:
    if num_experts == 0:
        return dict(_LAYER)
    in_stacks = {f"{name}_exps": (num_experts, *shape) for name, shape in _LAYER.items() if name.startswith("ffn_")}
    return {name: shape for name, shape in _LAYER.items() if not name.startswith("ffn_")} | in_stacks


def random_rows(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The bytes of random rows; numbers are about 0.05."""
    dice, stored = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    if kind not in _HALVES:
        return gguf.quants.quantize(dice.normal(0, 0.05, shape).astype(np.float32), stored)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[stored]
    blocks = dice.integers(0, 256, (*shape[:-1], shape[-1] // block_size, block_bytes), dtype=np.uint8)
    for place in _HALVES[kind]:
        halves = dice.uniform(1e-5, 1e-4, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_quantized(
    path: Path,
    kind: str,
    others: Mapping[str, str] | None = None,
    *,
    tied: bool = False,
    silent: bool = False,
    num_experts: int = 0,
    num_more: int = 0,
) -> Path:
    """A llama of one kind, except for the tensors that `others` names. silent: layers add nothing to the stream.

    num_experts: in place of each MLP, of which two are chosen. num_more: tokens without a text.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, size in SIZES.items():
        writer.add_uint32(f"llama.{key}", size)
    if num_experts:
        writer.add_uint32("llama.expert_count", num_experts)
        writer.add_uint32("llama.expert_used_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(33 + i) for i in range(VOCAB_SIZE - 1)), "lo"])
    writer.add_token_merges(["l o"])
    writer.add_token_types([3, *[1] * (VOCAB_SIZE - 1)])
    writer.add_eos_token_id(0)
    table = (VOCAB_SIZE + num_more, HIDDEN)
    shapes = {"token_embd": table} | ({} if tied else {"output": table})
    for layer in range(NUM_LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _layer(num_experts).items()}
        if num_experts:
            router = np.random.default_rng(layer).normal(0, 0.1, (num_experts, HIDDEN)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    for seed, (name, shape) in enumerate(shapes.items()):
        short = name.split(".")[-1]
        used = (others or {}).get(short, kind)
        rows = random_rows(used, shape, seed) if used != "F32" else np.full(shape, 0.01, np.float32)
        if silent and short in ("attn_output", "ffn_down"):
            rows = np.zeros_like(rows)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType[used])
    for name in ("output_norm", *(f"blk.{i}.{n}_norm" for i in range(NUM_LAYERS) for n in ("attn", "ffn"))):
        norm = np.random.default_rng(len(name)).normal(1, 0.1, HIDDEN).astype(np.float32)
        writer.add_tensor(f"{name}.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
