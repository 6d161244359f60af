"""Tiny Llama models on disk, and their greedy continuation by dense attention, without any of the engine.

The written model's weights are wide (0.2, not the 0.02 of dummy weights), so that attention is sharp: a change of any
earlier token, or of its place, changes what follows. Its tokenizer has a character for each of its 97 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gapless.attention.base import Rotation
from gapless.models.decoder import CausalLM
from gapless.models.loader import load_config, load_model
from gapless.models.registry import hf_config
from gapless.models.shapes import weight_shapes
from gapless.models.source import resolve

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}  # options of every engine here
VOCAB_SIZE = 97
EOS = 0
MAX_LEN = 128
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 32 + 95)) + "é"  # 97 characters; the first is the end token
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}|"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
END = "</s>"  # the end token of the model that calls tools
COUNT = 20  # tokens to ask for, unless said otherwise
PROMPTS = [
    "Hello, world",
    "a",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the dog.",
    "0123456789",
    "The quick brown fox jumps over the lazy cat",
    "é {}[]",
    "Hello, world!",
    "x" * 40,
    "The quick brown fox",
]


def raw_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    } | changes


def write_dummy(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(raw_config(**changes)))
    return directory


def write_tiny(directory: Path, **changes: Any) -> Path:
    write_dummy(directory, **changes)
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in weight_shapes(hf_config(raw_config(**changes))).items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        weights[name] = torch.empty(shape).normal_(mean, 0.2, generator=generator)
    save_file(weights, directory / "model.safetensors")
    backend = Tokenizer(models.WordLevel({char: i for i, char in enumerate(ALPHABET)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": ALPHABET[EOS]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_tool_model(directory: Path, max_len: int) -> Path:
    """A model whose template tells of tools in the way of Hermes, and whose texts may have line ends."""
    write_tiny(directory, max_position_embeddings=max_len)
    words = {END: EOS, **{char: id for id, char in enumerate(ALPHABET[1:-1], 1)}, "\n": len(ALPHABET) - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TOOL_TEMPLATE, "eos_token": END}))
    return directory


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation, and how clearly its closest token won, in standard deviations of the logits."""

    tokens: tuple[int, ...]
    margin: float


def greedy(directory: Path, prompt: Sequence[int], count: int, stop: Sequence[int] = (EOS,)) -> Greedy:
    """What the model says, computed from scratch for each token."""
    model = _load(directory)
    tokens, margin = list(prompt), float("inf")
    with torch.inference_mode():
        while len(tokens) < len(prompt) + count:
            hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), _dense)
            logits = model.logits(hidden[-1:])[0]
            best, second = logits.topk(2).values.tolist()
            margin = min(margin, (best - second) / float(logits.std()))
            tokens.append(int(logits.argmax()))
            if tokens[-1] in stop:
                break
    return Greedy(tuple(tokens[len(prompt) :]), margin)


@cache
def truth(directory: Path, prompt: str, count: int = COUNT) -> Greedy:
    """What the model says to a text, past its end token too."""
    return greedy(directory, ids(prompt), count, ())


def ids(text: str) -> list[int]:
    return [ALPHABET.index(char) for char in text]


def text_of(tokens: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens if token != EOS)


@cache
def _load(directory: Path) -> CausalLM:
    source = resolve(directory)
    return load_model(source, load_config(source), dtype=torch.float32, device=torch.device("cpu"))


def _dense(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    config = raw_config()
    sizes = (config["num_attention_heads"], config["num_key_value_heads"])
    q, k = rotation.apply(heads[:, : sum(sizes)]).split_with_sizes(sizes, dim=1)
    q, k, v = (x.transpose(0, 1) for x in (q, k, heads[:, sum(sizes) :]))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
