"""Builds everything that one device needs to run a model: weights, rows, KV memory, attention, runner.

Which of them, and in what sizes, `resolve` has said. Nothing here runs once the engine does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gapless.attention.base import Attention, Rotation
from gapless.config import EngineOptions
from gapless.core.params import MAX_LOGPROBS
from gapless.device import open_device, pick_device
from gapless.device.base import Device
from gapless.errors import ConfigError
from gapless.models.config import ModelConfig
from gapless.models.decoder import CausalLM
from gapless.models.loader import load_model, open_weights
from gapless.models.shapes import weight_shapes
from gapless.models.source import ModelSource
from gapless.runner.kv_store import KVStore
from gapless.runner.logprobs import score
from gapless.runner.memory import shortage_named
from gapless.runner.native import NativeModel, NativeRunner
from gapless.runner.resolve import (
    NATIVE_DEVICES,
    Resolved,
    dtypes,
    is_native,
    max_model_len,
    read_config,
    refuse_unsupported,
    resolve_on,
    sizes,
)
from gapless.runner.runner import Runner
from gapless.runner.sampler import sample
from gapless.runner.step import Sampler, Step

if TYPE_CHECKING:
    from gapless.runner.graphs import GraphRunner

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A device with a model on it, ready to run steps."""

    resolved: Resolved
    device: Device
    runner: Runner | GraphRunner | NativeRunner
    layers: Sequence[torch.Tensor]  # the KV memory of each layer, blocks first, however a block is laid out
    capture_cost: str = ""  # what capturing graphs took, in words
    attention: str = ""  # which one runs and why, in words


@shortage_named("the model")
def build(options: EngineOptions, source: ModelSource, progress: Progress | None = None) -> Built:
    """Load the model and lay out its memory. `progress(done, total)` counts weights, then graphs."""
    config = read_config(source)
    device = open_device(pick_device(options.device), seed=options.interleave, check=options.check)
    try:
        model = load(options, source, config, device, progress)
        num_rows, num_tokens = sizes(options, device)
        dry_run = partial(_dry_run, model, config, device, num_rows, num_tokens)
        resolved = resolve_on(device, options, config, dry_run)
        return assemble(device, model, resolved, batch_invariant=options.batch_invariant, progress=progress)
    except BaseException:
        device.close()
        raise


def load(
    options: EngineOptions, source: ModelSource, config: ModelConfig, device: Device, progress: Progress | None = None
) -> CausalLM | NativeModel:
    """The weights, on the device."""
    refuse_unsupported(device, config)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    weights: dict[str, Any] = {
        "dtype": dtypes(options, device)[0],
        "device": device.torch_device,
        "load_format": options.load_format,
        "seed": options.seed,
        "max_positions": max_model_len(options, config),
        "progress": progress,
    }
    if is_native(options, device, config)[0]:
        return load_native(source, config, **weights)
    if options.batch_invariant and device.torch_device.type in NATIVE_DEVICES:
        raise ConfigError("batch_invariant: on a CPU only native steps are (option native, and a C++ compiler)")
    return load_model(source, config, batch_invariant=options.batch_invariant, **weights)


def assemble(
    device: Device,
    model: CausalLM | NativeModel,
    resolved: Resolved,
    *,
    batch_invariant: bool = False,
    progress: Progress | None = None,
) -> Built:
    """A runner for a loaded model, with rows and KV memory of its own."""
    config, limits = resolved.model, resolved.limits
    kv = _kv_store(device, config, resolved)
    if isinstance(model, NativeModel):
        layers = kv.buffer.tensor.view(limits.num_blocks + 1, config.num_layers, -1).unbind(1)
        return Built(resolved, device, NativeRunner(device, limits, model, kv), layers)
    layers = tuple(pool.view(-1, limits.block_size, *pool.shape[1:]) for pool in kv.pools)
    attention, choice = _attention(device, kv, resolved, batch_invariant)
    step = Step(model, attention, _sampler(device, resolved.dtype))
    runner = Runner(device, limits, kv, step, resolved.slow_reason)
    if device.torch_device.type in GRAPH_DEVICES:
        from gapless.runner.graphs import GraphRunner  # needs Triton, which only GPU installations have

        mixed = _weight_bytes(config, resolved.dtype) < MIXED_GRAPHS_BELOW_BYTES
        graphs = GraphRunner(runner, step, limits, progress, mixed=mixed)
        return Built(resolved, device, graphs, layers, str(graphs.cost), choice)
    return Built(resolved, device, runner, layers, attention=choice)


def load_native(
    source: ModelSource, config: ModelConfig, *, max_positions: int | None = None, **weights: Any
) -> NativeModel:
    """The model for native steps; no second copy of its weights remains."""
    with torch.inference_mode():
        return NativeModel(config, open_weights(source, config, **weights), max_positions)


@torch.inference_mode()
def _dry_run(
    model: CausalLM | NativeModel, config: ModelConfig, device: Device, num_rows: int, num_tokens: int
) -> None:
    """The largest step there can be, without attention: what it allocates, no step exceeds by much."""
    if isinstance(model, NativeModel):
        return  # has its memory already
    where = device.torch_device
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=where)

    def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return heads[:, : config.num_heads].reshape(len(heads), -1)

    hidden = model.forward(ids, ids, attend)
    logits = model.logits(hidden[:num_rows])
    logits.float().softmax(dim=1, dtype=torch.float64).cumsum(dim=1)
    score(model.logits(hidden[:num_rows]), ids[:num_rows], min(MAX_LOGPROBS, config.vocab_size))  # a slice of a prompt


def _weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(math.prod(shape) for shape in weight_shapes(config).values())


def _kv_store(device: Device, config: ModelConfig, resolved: Resolved) -> KVStore:
    return KVStore(
        device,
        num_layers=config.num_layers,
        num_blocks=resolved.limits.num_blocks,
        block_size=resolved.limits.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=resolved.kv_dtype,
        heads_first=device.torch_device.type in HEADS_FIRST_DEVICES,
    )


def _reference(device: Device, kv: KVStore, resolved: Resolved, batch_invariant: bool) -> tuple[Attention, str]:
    from gapless.attention.reference import ReferenceAttention

    return ReferenceAttention(kv.pools, resolved.limits.block_size, resolved.model.attention_specs()), ""


def _fastest(device: Device, kv: KVStore, resolved: Resolved, batch_invariant: bool) -> tuple[Attention, str]:
    from gapless.attention.triton import TritonAttention
    from gapless.device.cuda import replay_s
    from gapless.runner.attention_choice import make_attention

    limits, num_heads = resolved.limits, resolved.model.num_heads
    own = TritonAttention(
        kv.pools,
        limits.block_size,
        num_heads,
        resolved.model.layers[0].attention.scale,
        num_rows=limits.num_rows,
        num_cores=device.num_cores,
        batch_invariant=batch_invariant,
    )
    attention, choice = make_attention(own, num_heads, limits, resolved.attention, replay_s)
    log.info("%s", choice)
    return attention, str(choice)


def _attention(device: Device, kv: KVStore, resolved: Resolved, batch_invariant: bool) -> tuple[Attention, str]:
    """The attention, and in words which one it is, where there was a choice."""
    return ATTENTION[device.torch_device.type](device, kv, resolved, batch_invariant)


def _sampler(device: Device, dtype: torch.dtype) -> Sampler:
    if device.torch_device.type != "cuda":
        return sample
    from gapless.runner.draw_kernels import pick  # needs Triton, which only GPU installations have

    return partial(pick, key_bits=16) if dtype == torch.bfloat16 else pick  # a model's logits are no finer than it is


ATTENTION = {"cpu": _reference, "cuda": _fastest}
GRAPH_DEVICES = ("cuda",)
MIXED_GRAPHS_BELOW_BYTES = 4 * 2**30  # of weights: larger models run longer than their launches take
HEADS_FIRST_DEVICES = ("cpu",)  # whose attention gathers the KV cache head by head
