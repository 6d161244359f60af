"""`gapless info`: what the engine would use, without loading the weights."""

from __future__ import annotations

import platform

from gapless import __version__
from gapless.config import EngineOptions
from gapless.core.limits import Limits, most_tokens
from gapless.models.source import resolve as resolve_source
from gapless.pipeline.engine import Resolved, resolve
from gapless.report import readable_bytes


def _step(resolved: Resolved) -> str:
    if resolved.native:
        return "one native call"
    lacking = "a native one" if resolved.device_name == "cpu" else "fused layers"
    return "torch" + (f", for want of {lacking}: {resolved.slow_reason}" if resolved.slow_reason else "")


def _attention(resolved: Resolved) -> str:
    first, *others = resolved.attention
    return f"{first} or {', '.join(others)}: timed at the start, the faster runs" if others else first


def _weights(resolved: Resolved) -> str:
    kinds = resolved.model.kinds
    if resolved.stored:
        return f"{' and '.join(kinds)} as in the file"
    return f"{resolved.weights}, dequantized from {' and '.join(kinds)}" if kinds else resolved.weights


def info(options: EngineOptions) -> int:
    """Print a short table."""
    import torch

    source = resolve_source(options.model)
    resolved = resolve(options, source)
    limits, model = resolved.limits, resolved.model
    kv_dtype = str(resolved.kv_dtype).removeprefix("torch.")
    rows = {
        "gapless": f"{__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "device": f"{resolved.device_name}, {options.num_threads or torch.get_num_threads()} threads",
        "model": f"{source.name}: {model.architecture}, {model.num_layers} layers, vocabulary {model.vocab_size}",
        "dtype": f"weights {_weights(resolved)}, KV cache {kv_dtype}",
        **({"ranks": _ranks(options.tensor_parallel)} if options.tensor_parallel > 1 else {}),
        "step": _step(resolved),
        **({"attention": _attention(resolved)} if resolved.attention else {}),
        "depth": str(options.depth),
        "KV cache": f"{readable_bytes(resolved.kv_bytes)}: {limits.num_blocks} blocks of {limits.block_size} tokens, "
        + _kv_room(limits),
        "limits": f"{limits.num_rows} rows, {limits.max_batch_tokens} tokens a step, "
        f"{limits.max_model_len} tokens a request",
        "prefix cache": "on" if limits.prefix_cache else "off",
    }
    for name, text in rows.items():
        print(f"{name:13} {text}")
    return 0


def _ranks(count: int) -> str:
    return f"{count}, each with its part of the model; sizes below are those of one"


def _kv_room(limits: Limits) -> str:
    """How much the blocks hold, in words."""
    if limits.windows == (None,):
        return f"{limits.num_blocks * limits.block_size} tokens in all"
    groups = f"{limits.num_groups} groups of layers" if limits.num_groups > 1 else "layers that keep their window"
    return f"for {groups}; a request has {most_tokens(limits)} at most"
