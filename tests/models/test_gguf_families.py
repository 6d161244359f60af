"""GGUF files of every family that has an architecture there: logits equal those of the transformers model.

Files are written as llama.cpp's converter does it: names by the `gguf` package, rows of q and k permuted for some
architectures, one added to the norms of Gemma, matrices of GPT-2 turned, q, k and v of GPT-NeoX taken apart by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_parity_of_families import CASES, MAX_LENGTH, paged_logits
from tiny_models import load, pairs_from_halves, random_tokens, save_hf

from gapless.models.registry import FAMILIES

PERMUTED = ("llama", "granite", "smollm3")
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
RMS_NORM = {"attention.layer_norm_rms_epsilon": 1e-5}
EXPERTS = {"expert_used_count": 2}
# architecture: the case it is written from, and metadata beyond the sizes
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("falcon 3", RMS_NORM | {"attention.key_length": 16, "rope.freq_base": 1000042.0}),
    "llama with experts": (
        "mixtral",
        RMS_NORM | EXPERTS | {"expert_count": 4, "attention.sliding_window": 24, "rope.freq_base": 1e6},
    ),
    "qwen2": ("qwen2 whole", RMS_NORM),
    "qwen3": ("qwen3", RMS_NORM | {"attention.key_length": 12}),
    "qwen2moe": (
        "qwen2 moe whole",
        RMS_NORM
        | EXPERTS
        | {"expert_count": 5, "expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": (
        "qwen3 moe in part",
        RMS_NORM | EXPERTS | {"expert_count": 5, "expert_feed_forward_length": 16, "attention.key_length": 12},
    ),
    "granite": (
        "granite",
        RMS_NORM | {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 1.5},
    ),
    "smollm3": ("smollm3 by default", RMS_NORM | {"rope.freq_base": 2e6}),
    "olmo2": ("olmo2", RMS_NORM),
    "phi3": (
        "phi3 long",
        RMS_NORM
        | {"rope.dimension_count": 4, "rope.scaling.original_context_length": 32}
        | {"rope.scaling.attn_factor": 1.1832159566199232, "attention.sliding_window": 0},
    ),
    "starcoder2": ("starcoder2 whole", LAYER_NORM),
    "gptneox": (
        "pythia",
        LAYER_NORM | {"rope.dimension_count": 6, "use_parallel_residual": True, "rope.freq_base": 900.0},
    ),
    "gpt2": ("gpt2", LAYER_NORM),
    "command-r": ("command r", LAYER_NORM | {"logit_scale": 0.3, "rope.freq_base": 500000.0}),
    "cohere2": (
        "command r7b by pattern",
        LAYER_NORM | {"logit_scale": 0.3, "attention.sliding_window": 24, "rope.freq_base": 10000.0},
    ),
    "gemma2": (
        "gemma2 by size",
        RMS_NORM
        | {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3 by size",
        RMS_NORM
        | {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 24}
        | {"rope.freq_base": 7000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    ),
}
MORE: dict[str, dict[str, Any]] = {  # cases whose values a GGUF has no place for are left at what it implies
    "qwen2 whole": CASES["qwen2"] | {"use_sliding_window": False},
    "qwen2 moe whole": CASES["qwen2 moe"] | {"use_sliding_window": False},
    "smollm3 by default": CASES["smollm3"] | {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "starcoder2 whole": CASES["starcoder2"] | {"sliding_window": None},
    "gemma2 by size": CASES["gemma2"] | {"query_pre_attn_scalar": 16},
    "gemma3 by size": CASES["gemma3 before version 5"] | {"query_pre_attn_scalar": 16, "rope_local_base_freq": 10000.0},
    "qwen3 moe in part": CASES["qwen3 moe in part"] | {"mlp_only_layers": []},
}


def test_there_is_a_file_for_every_architecture() -> None:
    forms = {(form.architecture, form.has_experts) for family in FAMILIES if (form := family.gguf) is not None}
    assert forms == {(name.split()[0], "expert_count" in metadata) for name, (_, metadata) in FILES.items()}


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    case, metadata = FILES[name]
    model = save_hf(tmp_path, **MORE.get(case, CASES.get(case, {})))
    model.set_attn_implementation("eager")
    write(tmp_path / "m.gguf", name.split()[0], model.config, metadata, load_file(tmp_path / "model.safetensors"))
    tokens = random_tokens()
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    found = paged_logits(load(tmp_path / "m.gguf", max_positions=MAX_LENGTH), tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def write(path: Path, arch: str, config: Any, metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
    for key, value in (sizes | metadata).items():
        add[type(value)](f"{arch}.{key}", value)
    kind = next(kind for kind, written in gguf.MODEL_ARCH_NAMES.items() if written == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, array in converted(arch, config, {name: tensor.numpy() for name, tensor in tensors.items()}):
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        writer.add_tensor(written, np.ascontiguousarray(array))
    if arch == "phi3":
        for which in ("long", "short"):
            writer.add_tensor(
                f"rope_factors_{which}.weight", np.array(config.rope_parameters[f"{which}_factor"], np.float32)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(arch: str, config: Any, tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """What the converter does to tensors before it names them."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in tensors.items():
        before, _, rest = name.partition(".experts.")
        if rest:
            stacks.setdefault(f"{before}.experts.{rest.split('.', 1)[1]}", []).append(array)
            continue
        yield name, _converted(arch, config, name, array)
    for name, parts in stacks.items():
        yield name, np.stack(parts)


def _converted(arch: str, config: Any, name: str, array: np.ndarray) -> np.ndarray:
    if arch in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        return pairs_from_halves(array, config.num_attention_heads if ".q_" in name else config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return array + 1
    if name.endswith("layers.0.mlp.shared_expert_gate.weight"):
        return array.reshape(-1)  # files have either
    if arch == "gpt2" and array.ndim == 2 and ".c_" in name:
        return array.T
    if arch == "gptneox" and "query_key_value" in name:
        by_head = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
        return by_head.swapaxes(0, 1).reshape(array.shape)
    return array
