"""Builds everything that one device needs to run a model: resolves options against model and machine.

Owns the sizing: data types, lengths, and how many blocks fit. Nothing here runs once the engine does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gapless.attention.reference import ReferenceAttention
from gapless.config import EngineOptions, parse_bytes
from gapless.core.limits import Limits
from gapless.device.base import Device
from gapless.device.checker import CheckedDevice
from gapless.device.cpu import CpuDevice
from gapless.errors import CapacityError, ConfigError
from gapless.models.config import ModelConfig
from gapless.models.loader import load_config, load_model
from gapless.models.source import ModelSource
from gapless.runner.kv_store import KVStore, block_bytes
from gapless.runner.runner import Runner

KV_SHARE = 1 / 3  # of the free memory
KV_CAP_BYTES = 8 * 2**30  # by default; a user may ask for more


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options, resolved against a model and a machine."""

    model: ModelConfig
    device_name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_bytes: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class Built:
    """A device with a model on it, ready to run steps."""

    resolved: Resolved
    device: Device
    runner: Runner


def resolve(options: EngineOptions, source: ModelSource) -> Resolved:
    """Decide data types and sizes; raise when they cannot work."""
    model = load_config(source)
    dtype = _dtype(options.dtype)
    kv_dtype = torch.float32  # attention over bfloat16 is many times slower on a CPU
    max_model_len = _max_model_len(options, model)
    size = block_bytes(model.num_layers, options.block_size, model.num_kv_heads, model.head_dim, kv_dtype)
    wanted = -(-max_model_len // options.block_size) * options.max_num_rows
    num_blocks = _num_blocks(options, size, wanted)
    limits = Limits(
        num_rows=min(options.max_num_rows, options.max_batch_tokens),
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_batch_tokens=options.max_batch_tokens,
        max_model_len=max_model_len,
        prefix_cache=options.prefix_cache,
    )
    return Resolved(model, "cpu", dtype, kv_dtype, num_blocks * size, limits)


def build(options: EngineOptions, source: ModelSource, progress: Callable[[int, int], None] | None = None) -> Built:
    """Load the model and lay out its memory. `progress(done, total)` counts weights."""
    resolved = resolve(options, source)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device = _device(options)
    model = load_model(
        source,
        resolved.model,
        dtype=resolved.dtype,
        device=device.torch_device,
        load_format=options.load_format,
        max_positions=resolved.limits.max_model_len,
        seed=options.seed,
        progress=progress,
    )
    config, limits = resolved.model, resolved.limits
    kv = KVStore(
        device,
        num_layers=config.num_layers,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=resolved.kv_dtype,
    )
    attention = ReferenceAttention(kv.pools, limits.block_size, config.num_heads, config.head_dim**-0.5)
    return Built(resolved, device, Runner(device, limits, model, kv, attention))


def available_memory() -> int:
    """Bytes that can be had without swapping; half of all memory where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _device(options: EngineOptions) -> Device:
    device = CpuDevice(seed=options.interleave)
    return CheckedDevice(device) if options.check else device


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _max_model_len(options: EngineOptions, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if options.max_model_len is None:
        return longest
    if options.max_model_len > longest:
        raise ConfigError(f"max_model_len {options.max_model_len} is beyond the model's {longest} positions")
    return options.max_model_len


def _num_blocks(options: EngineOptions, size: int, wanted: int) -> int:
    if options.num_blocks is not None:
        return options.num_blocks
    if options.kv_memory is not None:
        memory = parse_bytes("kv_memory", options.kv_memory)
    else:
        memory = min(int(available_memory() * KV_SHARE), KV_CAP_BYTES)
    if memory < size:
        raise CapacityError(
            f"the KV cache has {memory} bytes, and one block of {options.block_size} tokens takes {size}; "
            "raise kv_memory or lower block_size"
        )
    return min(memory // size, wanted)
