"""Builds everything that one device needs to run a model: resolves options against model and machine.

Owns the sizing: data types, lengths, and how many blocks fit. Nothing here runs once the engine does.
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
from gapless.config import EngineOptions, parse_bytes
from gapless.core.limits import Limits
from gapless.core.params import MAX_LOGPROBS
from gapless.device import open_device, pick_device
from gapless.device.base import Device
from gapless.errors import CapacityError, ConfigError
from gapless.models.config import ModelConfig
from gapless.models.llama import CausalLM, weight_shapes
from gapless.models.loader import load_config, load_model, open_weights
from gapless.models.source import ModelSource
from gapless.runner.kv_store import KVStore, block_bytes
from gapless.runner.logprobs import score
from gapless.runner.native import NativeModel, NativeRunner, why_not
from gapless.runner.runner import Runner, Sampler
from gapless.runner.sampler import sample

if TYPE_CHECKING:
    from gapless.runner.graphs import GraphRunner

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What depends on the kind of device where the user did not say."""

    dtype: torch.dtype
    kv_dtype: torch.dtype | None  # None: that of the model
    max_batch_tokens: int
    max_num_rows: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options, resolved against a model and a machine."""

    model: ModelConfig
    device_name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_bytes: int
    limits: Limits
    native: bool  # steps are native calls
    slow_reason: str | None = None  # why they are not, where the user did not say so
    attention: tuple[str, ...] = ()  # names of which the fastest will run, where there is a choice


@dataclass(frozen=True, slots=True)
class Built:
    """A device with a model on it, ready to run steps."""

    resolved: Resolved
    device: Device
    runner: Runner | GraphRunner | NativeRunner
    layers: Sequence[torch.Tensor]  # the KV memory of each layer, blocks first, however a block is laid out
    capture_cost: str = ""  # what capturing graphs took, in words
    attention: str = ""  # which one runs and why, in words


def resolve(options: EngineOptions, source: ModelSource) -> Resolved:
    """What `build` would use, without loading the weights; their memory is not accounted for."""
    device = open_device(pick_device(options.device), check=False)
    try:
        return _resolve(options, load_config(source), device, dry_run=lambda: None)
    finally:
        device.close()


def build(options: EngineOptions, source: ModelSource, progress: Progress | None = None) -> Built:
    """Load the model and lay out its memory. `progress(done, total)` counts weights, then graphs."""
    config = load_config(source)
    device = open_device(pick_device(options.device), seed=options.interleave, check=options.check)
    model = load(options, source, config, device, progress)
    num_rows, num_tokens = _sizes(options, device)
    dry_run = partial(_dry_run, model, config, device, num_rows, num_tokens)
    resolved = _resolve(options, config, device, dry_run)
    return assemble(device, model, resolved, batch_invariant=options.batch_invariant, progress=progress)


def load(
    options: EngineOptions, source: ModelSource, config: ModelConfig, device: Device, progress: Progress | None = None
) -> CausalLM | NativeModel:
    """The weights, on the device."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    weights: dict[str, Any] = {
        "dtype": _dtypes(options, device)[0],
        "device": device.torch_device,
        "load_format": options.load_format,
        "seed": options.seed,
        "max_positions": _max_model_len(options, config),
        "progress": progress,
    }
    if _native(options, device)[0]:
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
    runner = Runner(device, limits, model, kv, attention, _sampler(device, resolved.dtype), resolved.slow_reason)
    if device.torch_device.type in GRAPH_DEVICES:
        from gapless.runner.graphs import GraphRunner  # needs Triton, which only GPU installations have

        mixed = _weight_bytes(config, resolved.dtype) < MIXED_GRAPHS_BELOW_BYTES
        graphs = GraphRunner(runner, model, attention, limits, progress, mixed=mixed)
        return Built(resolved, device, graphs, layers, str(graphs.cost), choice)
    return Built(resolved, device, runner, layers, attention=choice)


def load_native(
    source: ModelSource, config: ModelConfig, *, max_positions: int | None = None, **weights: Any
) -> NativeModel:
    """The model for native steps; no second copy of its weights remains."""
    with torch.inference_mode():
        return NativeModel(config, open_weights(source, config, **weights), max_positions)


def _resolve(options: EngineOptions, model: ModelConfig, device: Device, dry_run: Callable[[], None]) -> Resolved:
    dtype, kv_dtype = _dtypes(options, device)
    num_rows, max_batch_tokens = _sizes(options, device)
    max_model_len = _max_model_len(options, model)
    size = block_bytes(model.num_layers, options.block_size, model.num_kv_heads, model.head_dim, kv_dtype)
    wanted = -(-max_model_len // options.block_size) * num_rows
    num_blocks = _num_blocks(options, size, wanted, partial(device.kv_budget, dry_run))
    limits = Limits(
        num_rows=num_rows,
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_batch_tokens=max_batch_tokens,
        max_model_len=max_model_len,
        prefix_cache=options.prefix_cache,
    )
    machine = device.torch_device.type, dtype, kv_dtype, num_blocks * size
    return Resolved(model, *machine, limits, *_native(options, device), _candidates(options, device, model, kv_dtype))


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

    config = resolved.model
    scale = config.head_dim**-0.5
    return ReferenceAttention(kv.pools, resolved.limits.block_size, config.num_heads, scale), ""


def _fastest(device: Device, kv: KVStore, resolved: Resolved, batch_invariant: bool) -> tuple[Attention, str]:
    from gapless.attention.triton import TritonAttention
    from gapless.device.cuda import replay_s
    from gapless.runner.attention_choice import make_attention

    limits, num_heads = resolved.limits, resolved.model.num_heads
    own = TritonAttention(
        kv.pools,
        limits.block_size,
        num_heads,
        resolved.model.head_dim**-0.5,
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


def _candidates(options: EngineOptions, device: Device, config: ModelConfig, kv_dtype: torch.dtype) -> tuple[str, ...]:
    if device.torch_device.type in CHOICE_DEVICES:
        from gapless.runner.attention_choice import candidates  # needs Triton, which only GPU installations have

        return candidates(options, config, kv_dtype)
    if options.attention != "auto":
        raise ConfigError(f"attention {options.attention}: only a GPU has it; on a CPU leave it at auto")
    return ()


def _sampler(device: Device, dtype: torch.dtype) -> Sampler:
    if device.torch_device.type != "cuda":
        return sample
    from gapless.runner.draw_kernels import pick  # needs Triton, which only GPU installations have

    return partial(pick, key_bits=16) if dtype == torch.bfloat16 else pick  # a model's logits are no finer than it is


def _cpu_defaults() -> DeviceDefaults:
    fast = (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    # attention over bfloat16 is many times slower on a CPU
    return DeviceDefaults(torch.bfloat16 if fast else torch.float32, torch.float32, 512, 128)


def _cuda_defaults() -> DeviceDefaults:
    return DeviceDefaults(torch.bfloat16, None, 8192, 256)


ATTENTION = {"cpu": _reference, "cuda": _fastest}
CHOICE_DEVICES = ("cuda",)  # with more than one attention
DEFAULTS = {"cpu": _cpu_defaults, "cuda": _cuda_defaults}
GRAPH_DEVICES = ("cuda",)
MIXED_GRAPHS_BELOW_BYTES = 4 * 2**30  # of weights: larger models run longer than their launches take
NATIVE_DEVICES = ("cpu",)
HEADS_FIRST_DEVICES = ("cpu",)  # whose attention gathers the KV cache head by head


def _dtypes(options: EngineOptions, device: Device) -> tuple[torch.dtype, torch.dtype]:
    """Of the weights and of the KV cache."""
    defaults = DEFAULTS[device.torch_device.type]()
    dtype: torch.dtype = defaults.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    return dtype, defaults.kv_dtype or dtype


def _native(options: EngineOptions, device: Device) -> tuple[bool, str | None]:
    """Whether steps are native calls, and if not, why, unless that is what the user asked for."""
    if device.torch_device.type not in NATIVE_DEVICES or not options.native:
        return False, None
    reason = why_not(_dtypes(options, device)[0])
    return reason is None, reason


def _sizes(options: EngineOptions, device: Device) -> tuple[int, int]:
    """Rows and tokens of a step at most; every row must fit into one step."""
    defaults = DEFAULTS[device.torch_device.type]()
    tokens = options.max_batch_tokens or defaults.max_batch_tokens
    return min(options.max_num_rows or defaults.max_num_rows, tokens), tokens


def _max_model_len(options: EngineOptions, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if options.max_model_len is None:
        return longest
    if options.max_model_len > longest:
        raise ConfigError(f"max_model_len {options.max_model_len} is beyond the model's {longest} positions")
    return options.max_model_len


def _num_blocks(options: EngineOptions, size: int, wanted: int, budget: Callable[[], int]) -> int:
    if options.num_blocks is not None:
        return options.num_blocks
    memory = budget() if options.kv_memory is None else parse_bytes("kv_memory", options.kv_memory)
    if memory < size:
        raise CapacityError(
            f"the KV cache has {memory} bytes, and one block of {options.block_size} tokens takes {size}; "
            "raise kv_memory or lower block_size"
        )
    return min(memory // size, wanted)
