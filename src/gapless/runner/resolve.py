"""What the engine will use: options, resolved against a model and a machine.

Owns the sizing: data types, lengths, and how many blocks fit. Loads no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gapless.config import EngineOptions, parse_bytes
from gapless.core.limits import Limits
from gapless.core.params import MAX_STOP_IDS
from gapless.device import open_device, pick_device
from gapless.device.base import Device
from gapless.errors import CapacityError, ConfigError, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.loader import load_config
from gapless.models.source import ModelSource
from gapless.runner.kv_store import block_bytes
from gapless.runner.native import why_not


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What depends on the kind of device where the user did not say."""

    dtype: torch.dtype
    kv_dtype: torch.dtype | None  # None: that of the model
    max_batch_tokens: int
    max_num_rows: int


def _cpu_defaults() -> DeviceDefaults:
    fast = (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    # attention over bfloat16 is many times slower on a CPU
    return DeviceDefaults(torch.bfloat16 if fast else torch.float32, torch.float32, 512, 128)


def _cuda_defaults() -> DeviceDefaults:
    return DeviceDefaults(torch.bfloat16, None, 8192, 256)


CHOICE_DEVICES = ("cuda",)  # with more than one attention
DEFAULTS = {"cpu": _cpu_defaults, "cuda": _cuda_defaults}
NATIVE_DEVICES = ("cpu",)


MAX_AUTO_LEN = 2**20  # tokens of a request, unless the user asks for more: tables grow with it
MAX_LEN = 2**24


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


def resolve(options: EngineOptions, source: ModelSource) -> Resolved:
    """What `build` would use, without loading the weights; their memory is not accounted for."""
    device = open_device(pick_device(options.device), check=False)
    try:
        return resolve_on(device, options, read_config(source), dry_run=lambda: None)
    finally:
        device.close()


def read_config(source: ModelSource) -> ModelConfig:
    """The model's config, if the engine has room for its end tokens."""
    config = load_config(source)
    if len(config.eos_token_ids) > MAX_STOP_IDS:
        raise UnsupportedModel(
            f"{source.path}: {len(config.eos_token_ids)} end-of-sequence tokens (eos_token_id); "
            f"Gapless has room for {MAX_STOP_IDS}"
        )
    return config


def resolve_on(device: Device, options: EngineOptions, model: ModelConfig, dry_run: Callable[[], None]) -> Resolved:
    """The same on a device that is open; `dry_run` shows how much memory a step takes."""
    refuse_unsupported(device, model)
    dtype, kv_dtype = dtypes(options, device)
    num_rows, max_batch_tokens = sizes(options, device)
    longest = max_model_len(options, model)
    size = block_bytes(model.num_layers, options.block_size, model.num_kv_heads, model.head_dim, kv_dtype)
    wanted = -(-longest // options.block_size) * num_rows
    num_blocks = _num_blocks(options, size, wanted, partial(device.kv_budget, dry_run))
    limits = Limits(
        num_rows=num_rows,
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_batch_tokens=max_batch_tokens,
        max_model_len=longest,
        prefix_cache=options.prefix_cache,
    )
    machine = device.torch_device.type, dtype, kv_dtype, num_blocks * size
    native = is_native(options, device, model)
    return Resolved(model, *machine, limits, *native, _candidates(options, device, model, kv_dtype))


def _candidates(options: EngineOptions, device: Device, config: ModelConfig, kv_dtype: torch.dtype) -> tuple[str, ...]:
    if device.torch_device.type in CHOICE_DEVICES:
        from gapless.runner.attention_choice import candidates  # needs Triton, which only GPU installations have

        return candidates(options, config, kv_dtype)
    if options.attention != "auto":
        raise ConfigError(f"attention {options.attention}: only a GPU has it; on a CPU leave it at auto")
    return ()


def dtypes(options: EngineOptions, device: Device) -> tuple[torch.dtype, torch.dtype]:
    """Of the weights and of the KV cache."""
    defaults = DEFAULTS[device.torch_device.type]()
    dtype: torch.dtype = defaults.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    return dtype, defaults.kv_dtype or dtype


def refuse_unsupported(device: Device, model: ModelConfig) -> None:
    """Before any weight is read. Raises UnsupportedModel where layers or attention cannot do what the model needs."""
    if reason := WHY_NOT[device.torch_device.type](model):
        raise UnsupportedModel(f"{model.architecture} cannot run on {device.torch_device.type}: {reason}")


def _why_not_cpu(model: ModelConfig) -> str | None:
    from gapless.attention.reference import ReferenceAttention
    from gapless.models.layers import PlainLayers

    return ReferenceAttention.why_not(model.attention_specs()) or PlainLayers.why_not(model)


def _why_not_cuda(model: ModelConfig) -> str | None:
    from gapless.attention.triton import TritonAttention  # these need Triton, which only GPU installations have
    from gapless.models.skinny_layers import SkinnyLayers

    return TritonAttention.why_not(model.attention_specs()) or SkinnyLayers.why_not(model)


WHY_NOT = {"cpu": _why_not_cpu, "cuda": _why_not_cuda}


def is_native(options: EngineOptions, device: Device, model: ModelConfig) -> tuple[bool, str | None]:
    """Whether steps are native calls, and if not, why, unless that is what the user asked for."""
    if device.torch_device.type not in NATIVE_DEVICES or not options.native:
        return False, None
    reason = why_not(dtypes(options, device)[0], model)
    return reason is None, reason


def sizes(options: EngineOptions, device: Device) -> tuple[int, int]:
    """Rows and tokens of a step at most; every row must fit into one step."""
    defaults = DEFAULTS[device.torch_device.type]()
    tokens = options.max_batch_tokens or defaults.max_batch_tokens
    return min(options.max_num_rows or defaults.max_num_rows, tokens), tokens


def max_model_len(options: EngineOptions, model: ModelConfig) -> int:
    longest, asked = model.max_position_embeddings, options.max_model_len
    if asked is None:
        return min(longest, MAX_AUTO_LEN)
    if asked > longest:
        raise ConfigError(f"max_model_len {asked} is beyond the model's {longest} positions")
    if asked > MAX_LEN:
        raise CapacityError(f"max_model_len {asked} is beyond the {MAX_LEN} tokens that Gapless has tables for")
    return asked


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
