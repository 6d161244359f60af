"""Options, resolved against a model and a machine.

Owns the sizes: lengths, and how many blocks fit. The device's kit has the defaults. Loads no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gapless.config import EngineOptions, parse_bytes
from gapless.core.limits import Limits
from gapless.core.params import MAX_STOP_IDS
from gapless.device import open_device, pick_device
from gapless.device.base import Device
from gapless.errors import CapacityError, ConfigError, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.cut import cut_config
from gapless.models.loader import load_config
from gapless.models.source import ModelSource
from gapless.runner.kits import kit_for
from gapless.runner.kits.base import Resolved, Settings
from gapless.runner.kv_store import block_bytes
from gapless.runner.layer_groups import LayerGroups

__all__ = ["Resolved", "resolve"]


MAX_AUTO_LEN = 2**20  # tokens of a request, unless the user asks for more: tables grow with it
MAX_LEN = 2**24


def resolve(options: EngineOptions, source: ModelSource) -> Resolved:
    """The values that `build` would use. No weights are loaded, and their memory is not accounted for."""
    settings = settle(options, read_config(source))
    device = open_device(settings.device_name, check=False)
    try:
        return resolve_on(device, options, settings, dry_run=lambda: None)
    finally:
        device.close()


def settle(options: EngineOptions, model: ModelConfig, rank: int = 0) -> Settings:
    """The settings of the device that these options name, for one rank of those that hold the model."""
    return kit_for(pick_device(options.device)).settings(options, cut(options, model, rank))


def cut(options: EngineOptions, model: ModelConfig, rank: int = 0) -> ModelConfig:
    """The part of one rank. Raises ConfigError where the model cannot be divided. Touches no device."""
    if options.tensor_parallel == 1:
        return model
    _check_ranks(options)
    return cut_config(model, rank, options.tensor_parallel)


def _check_ranks(options: EngineOptions) -> None:
    """Raises ConfigError for options that several ranks cannot follow."""
    if options.batch_invariant:
        raise ConfigError("batch_invariant: sums over tensor parallel ranks depend on the batch; use tensor_parallel 1")
    if options.quantization == "fp8":
        raise ConfigError("quantization fp8: parts of a weight would get other scales; use tensor_parallel 1")


def read_config(source: ModelSource) -> ModelConfig:
    """The model's config, if the engine has room for its end tokens."""
    config = load_config(source)
    if len(config.eos_token_ids) > MAX_STOP_IDS:
        raise UnsupportedModel(
            f"{source.path}: {len(config.eos_token_ids)} end-of-sequence tokens (eos_token_id); "
            f"Gapless has room for {MAX_STOP_IDS}"
        )
    return config


def resolve_on(device: Device, options: EngineOptions, settings: Settings, dry_run: Callable[[], None]) -> Resolved:
    """The settings with the sizes that fit on the device; `dry_run` shows how much memory a step takes."""
    model, block_size = settings.model, options.block_size
    longest = max_model_len(options, model)
    groups = LayerGroups.single(model.num_layers)
    if settings.grouped:
        groups = LayerGroups.of([spec.window for spec in model.attention_specs()], longest)
    size = block_bytes(groups.num_places, block_size, model.num_kv_heads, model.head_dim, settings.kv_dtype)
    wanted = -(-longest // block_size) * len(groups.windows) * settings.num_rows
    num_blocks = _num_blocks(options, size, wanted, partial(device.kv_budget, dry_run), settings.num_sharing)
    limits = Limits(
        num_rows=settings.num_rows,
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_model_len=longest,
        prefix_cache=options.prefix_cache,
        windows=groups.windows,
    )
    return Resolved.of(settings, num_blocks * size, limits, groups)


def max_model_len(options: EngineOptions, model: ModelConfig) -> int:
    longest, asked = model.max_position_embeddings, options.max_model_len
    if asked is None:
        return min(longest, MAX_AUTO_LEN)
    if asked > longest:
        raise ConfigError(f"max_model_len {asked} is beyond the model's {longest} positions")
    if asked > MAX_LEN:
        raise CapacityError(f"max_model_len {asked} is beyond the {MAX_LEN} tokens that Gapless has tables for")
    return asked


def _num_blocks(options: EngineOptions, size: int, wanted: int, budget: Callable[[], int], num_sharing: int) -> int:
    """num_sharing: engines or ranks that share the memory."""
    if options.num_blocks is not None:
        return options.num_blocks
    memory = budget() // num_sharing if options.kv_memory is None else parse_bytes("kv_memory", options.kv_memory)
    if memory < size:
        raise CapacityError(
            f"the KV cache has {memory} bytes, and one block of {options.block_size} tokens takes {size}; "
            "raise kv_memory or lower block_size"
        )
    return min(memory // size, wanted)
