"""GGUF files of every family that has an architecture there: logits equal those of the transformers model.

Files are written as llama.cpp's converter does it: names by the `gguf` package, rows of q and k permuted for some
architectures, one added to the norms of Gemma, matrices of GPT-2 turned, q, k and v of GPT-NeoX taken apart by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_parity_of_families import CASES, MAX_LENGTH, paged_logits
from tiny_models import load, pairs_from_halves, random_tokens, save_hf

from gapless import LLM, SamplingParams
from gapless.models.loader import load_config, open_weights
from gapless.models.registry import FAMILIES
from gapless.models.source import resolve
from gapless.native import library

PERMUTED = ("llama", "granite", "smollm3")
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
RMS_NORM = {"attention.layer_norm_rms_epsilon": 1e-5}
EXPERTS = {"expert_used_count": 2}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
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
    "qwen2moe in blocks": (
        "qwen2 moe in blocks",
        RMS_NORM
        | EXPERTS
        | {"expert_count": 5, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 160},
    ),
    "qwen3moe": (
        "qwen3 moe in part",
        RMS_NORM | EXPERTS | {"expert_count": 5, "expert_feed_forward_length": 16, "attention.key_length": 12},
    ),
    "gpt-oss": (
        "gpt oss",
        RMS_NORM
        | EXPERTS
        | YARN
        | {"expert_count": 4, "expert_feed_forward_length": 80, "attention.key_length": 12}
        | {"attention.sliding_window": 24, "rope.freq_base": 1000.0},
    ),
    "gpt-oss in blocks": (
        "gpt oss in blocks",
        RMS_NORM
        | EXPERTS
        | YARN
        | {"expert_count": 4, "expert_feed_forward_length": 96, "attention.key_length": 16}
        | {"attention.sliding_window": 24, "rope.freq_base": 1000.0},
    ),
    "granite": (
        "granite",
        RMS_NORM | {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 1.5},
    ),
    "smollm3": ("smollm3 by default", RMS_NORM | {"rope.freq_base": 2e6}),
    "olmo2": ("olmo2", RMS_NORM),
    "olmo2 with windows": (
        "olmo3 with one base",
        RMS_NORM
        | YARN
        | {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, True, True, False]}
        | {"rope.freq_base": 500000.0, "rope.scaling.attn_factor": 1.138629436111989},
    ),
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
    "qwen2 moe in blocks": CASES["qwen2 moe"]
    | {"use_sliding_window": False, "hidden_size": 64, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 160},
    "olmo3 with one base": CASES["olmo3 before version 5"] | {"rope_theta": 500000.0},
    "gpt oss in blocks": CASES["gpt oss"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    "smollm3 by default": CASES["smollm3"] | {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "starcoder2 whole": CASES["starcoder2"] | {"sliding_window": None},
    "gemma2 by size": CASES["gemma2"] | {"query_pre_attn_scalar": 16},
    "gemma3 by size": CASES["gemma3 before version 5"] | {"query_pre_attn_scalar": 16, "rope_local_base_freq": 10000.0},
    "qwen3 moe in part": CASES["qwen3 moe in part"] | {"mlp_only_layers": []},
}


def test_there_is_a_file_for_every_architecture() -> None:
    forms = {(form.architecture, form.mark) for family in FAMILIES if (form := family.gguf) is not None}
    found = set()
    for name, (_, metadata) in FILES.items():
        marks = [mark for arch, mark in forms if arch == name.split()[0] and mark in metadata]
        found.add((name.split()[0], *(marks or [""])))
    assert found == forms
    for family in FAMILIES:
        assert (family.gguf is None) == bool(family.gguf_name)
        assert family.gguf_name in {"", *(arch for arch, _ in forms)}


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, name))


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Halves of a block lie in the low and in the high bits, not side by side as in safetensors."""
    check(tmp_path, save(tmp_path, "gpt-oss in blocks", "MXFP4"))
    source, name = resolve(tmp_path / "m.gguf"), "blk.0.ffn_down_exps.weight"
    where: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "keeps_mxfp4": True}
    open_as = partial(open_weights, source, load_config(source), **where)
    kept, whole = (open_as(quantization=how)(name) for how in ("auto", "none"))
    assert (kept.scheme.name, whole.scheme.name) == ("mxfp4", "plain")
    for part, expected in zip(kept.scheme.parts(kept), whole.data, strict=True):
        assert torch.equal(part.dense(), expected)


@pytest.mark.skipif(library.why_unavailable() is not None, reason=str(library.why_unavailable()))
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt-oss in blocks", "MXFP4"), ("gpt-oss in blocks", "Q4_0"), ("qwen2moe in blocks", "Q4_1")]
)
def test_native_products_with_experts_as_they_are_stored(tmp_path: Path, name: str, kind: str) -> None:
    """Sinks, windows, biases of experts and of the router, and a shared expert, as in torch with whole numbers."""
    save(tmp_path, name, kind, "Q8_0")
    prompts, params = [random_tokens().tolist()], SamplingParams(max_tokens=4, temperature=0, logprobs=0)
    found = []
    for options in ({}, {"dtype": "float32", "native": False}, {"dtype": "float32"}):
        with LLM(tmp_path / "m.gguf", device="cpu", num_blocks=32, max_num_rows=2, **options) as llm:
            assert llm.engine.resolved.stored == (not options)
            found.append(llm.generate(prompts, params)[0])
    stored, dense, whole = ([score.logprob for score in each.logprobs] for each in found)
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    assert np.abs(np.subtract(stored, dense)).max() < 0.1
    assert np.abs(np.subtract(whole, dense)).max() < 1e-4  # a named dtype makes them whole


def save(path: Path, name: str, kind: str = "F32", others: str = "F32") -> Any:
    """Writes m.gguf and returns the same model by transformers. kind: of experts, which get such numbers.

    others: of other matrices, whose numbers are not rounded in the model that is returned.
    """
    case, metadata = FILES[name]
    model = save_hf(path, **MORE.get(case, CASES.get(case, {})))
    model.set_attn_implementation("eager")
    if kind != "F32":
        for weight in (value for key, value in model.state_dict().items() if key.endswith(("up_proj", "down_proj"))):
            rows, stored = weight.transpose(1, 2).contiguous().numpy(), gguf.GGMLQuantizationType[kind]
            rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, stored), stored)
            weight.copy_(torch.from_numpy(rounded).transpose(1, 2))
        model.save_pretrained(path)
    tensors = {key: tensor.numpy() for key, tensor in load_file(path / "model.safetensors").items()}
    write(path / "m.gguf", name.split()[0], model.config, metadata, tensors, (kind, others))
    return model


def check(path: Path, model: Any) -> None:
    tokens = random_tokens()
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    found = paged_logits(load(path / "m.gguf", max_positions=MAX_LENGTH), tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def write(
    path: Path, arch: str, config: Any, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kinds: tuple[str, str]
) -> None:
    """kinds: of experts, and of other matrices but the router."""
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
    add[list] = writer.add_array
    for key, value in (sizes | metadata).items():
        add[type(value)](f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(33 + i) for i in range(config.vocab_size - 1)), '!"'])
    writer.add_token_merges(['! "'])
    number = next(number for number, written in gguf.MODEL_ARCH_NAMES.items() if written == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, array in converted(arch, config, tensors):
        written = names.get_name(name + ".weight" * name.endswith("sinks"), try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        kind = kinds[array.ndim == 2] if array.ndim > 1 and not written.endswith(("inp.weight", "bias")) else "F32"
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(written, gguf.quants.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
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
        if arch == "gpt-oss" and ".experts." in name:
            yield from _without_columns(name, array)
            continue
        before, _, rest = name.partition(".experts.")
        if rest:
            stacks.setdefault(f"{before}.experts.{rest.split('.', 1)[1]}", []).append(array)
            continue
        yield name, _converted(arch, config, name, array)
    for name, parts in stacks.items():
        yield name, np.stack(parts)


def _without_columns(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Experts of GPT-OSS: columns become rows, and those of gate and up, which alternate, are taken apart."""
    whole, ending = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    rows = array.swapaxes(-1, -2) if ending == "weight" else array
    if whole.endswith("down_proj"):
        yield f"{whole}.{ending}", rows
        return
    for first, role in enumerate(("gate_proj", "up_proj")):
        yield f"{whole.removesuffix('gate_up_proj')}{role}.{ending}", rows[:, first::2]


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
