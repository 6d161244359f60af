"""Tiny models on disk with random weights: Hugging Face folders, in one file or in shards, and GGUF files.

Each is whole: config, weights, tokenizer and chat template. Small enough to be written for each case of a fuzz.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from gapless.models.registry import hf_config
from gapless.models.shapes import weight_shapes
from gapless.proof.tiny import FAMILIES, SPREAD, VOCAB_SIZE, mean_of, raw_config

KINDS = ("folder", "shards", "gguf")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
)


def write_model(folder: Path, kind: str, dice: random.Random) -> None:
    """A model of one of KINDS."""
    if kind == "gguf":
        write_gguf(folder / "model.gguf", dice)
    else:
        write_folder(folder, dice, sharded=kind == "shards")


def write_folder(folder: Path, dice: random.Random, *, sharded: bool) -> None:
    rope = dice.choice(ROPES)
    raw = raw_config(**FAMILIES[dice.choice(list(FAMILIES))], **({"rope_parameters": rope} if rope else {}))
    _write_json(folder / "config.json", raw)
    _write_json(folder / "generation_config.json", {"eos_token_id": [0, 1]})
    _write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "!", "eos_token": {"content": " "}, "additional_special_tokens": ["#"]},
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    dice.choice((_words, _byte_level, _pieces))().save(str(folder / "tokenizer.json"))
    _write_weights(folder, weight_shapes(hf_config(raw)), sharded=sharded)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _write_weights(folder: Path, shapes: dict[str, tuple[int, ...]], *, sharded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(shape).normal_(mean_of(name, shape), SPREAD, generator=generator)
        for name, shape in shapes.items()
    }
    if not sharded:
        save_file(weights, folder / "model.safetensors")
        return
    names = list(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file)
    places = {name: file for file, held in shards.items() for name in held}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _words() -> Backend:
    backend = Backend(models.WordLevel({chr(32 + i): i for i in range(VOCAB_SIZE)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _byte_level() -> Backend:
    backend = Backend(models.BPE({chr(32 + i): i for i in range(VOCAB_SIZE - 1)} | {"lo": 96}, [("l", "o")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="! $A", special_tokens=[("!", 1)])
    backend.add_special_tokens([AddedToken("!", special=True)])
    return backend


def _pieces() -> Backend:
    pieces = [("?", 0.0), ("▁", -1.0), *((chr(32 + i), -2.0 - i) for i in range(2, VOCAB_SIZE))]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.Metaspace()]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.enable_truncation(8)
    backend.enable_padding(length=4)
    return backend


def write_gguf(path: Path, dice: random.Random) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    dice.choice((_add_byte_level, _add_sentencepiece))(writer)
    for name, shape in _GGUF_SHAPES.items():
        values = np.random.default_rng(0).normal(0, SPREAD, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 2 and dice.random() < 0.3:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_byte_level(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(33 + i) for i in range(VOCAB_SIZE - 1)), "lo"])
    writer.add_token_merges(["l o"])
    writer.add_token_types([3, *[1] * (VOCAB_SIZE - 1)])
    writer.add_eos_token_id(0)


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "▁", *(chr(33 + i) for i in range(VOCAB_SIZE - 5)), "lo"])
    writer.add_token_scores([-float(i) for i in range(VOCAB_SIZE)])
    writer.add_token_types([2, 3, 3, *[1] * (VOCAB_SIZE - 3)])
    for name, value in (("unk", 0), ("bos", 1), ("eos", 2)):
        getattr(writer, f"add_{name}_token_id")(value)


_GGUF_SHAPES = {
    "token_embd.weight": (VOCAB_SIZE, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (64, 32),
    "blk.0.ffn_up.weight": (64, 32),
    "blk.0.ffn_down.weight": (32, 64),
}
