"""The CPU's kit: steps as native calls where there is a C++ compiler, in torch where not."""

from __future__ import annotations

import dataclasses

import torch

from gapless.attention.base import FP8
from gapless.attention.reference import ReferenceAttention
from gapless.config import EngineOptions
from gapless.device.base import Device
from gapless.errors import ConfigError
from gapless.models.config import ModelConfig
from gapless.models.layers import PLAIN, PlainLayers
from gapless.models.loader import LoadFormat, Quantization, load_model, open_weights, why_not_stored
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.ranked_layers import on_ranks
from gapless.models.source import ModelSource
from gapless.models.transformers_model import load_transformers
from gapless.runner.kits.base import (
    BlockMemory,
    BuildProgress,
    Built,
    LoadedModel,
    Resolved,
    Settings,
    WeightOptions,
    check_quantization,
    in_blocks,
    kv_units,
    make_kv_store,
    refuse,
)
from gapless.runner.native_model import NativeModel, why_not
from gapless.runner.native_runner import NativeRunner
from gapless.runner.runner import Runner
from gapless.runner.sampler import pick
from gapless.runner.shared_draw import shared
from gapless.runner.step import Step


class CpuKit:
    """Torch's layers and reference attention, or the native library in place of both."""

    block_sizes: tuple[int, ...] = (4, 8, 16)
    exact_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    collectives = "gloo"

    def settings(self, options: EngineOptions, model: ModelConfig) -> Settings:
        if options.attention != "auto":
            raise ConfigError(f"attention {options.attention}: only a GPU has it; on a CPU leave it at auto")
        check_quantization(options, model)
        refuse(model, "cpu", ReferenceAttention.why_not(model.attention_specs()) or PlainLayers.why_not(model))
        settings = Settings.of(
            options,
            model,
            "cpu",
            dtype=torch.bfloat16 if _multiplies_bfloat16() else torch.float32,
            kv_dtype=torch.float32,  # attention over bfloat16 is many times slower on a CPU
            max_batch_tokens=512,
            max_num_rows=128,
        )
        reason = why_not(settings.dtype, model) if options.native or model.is_general else None
        if options.kv_dtype == "fp8" and options.native and not model.is_general:
            reason = "it has no FP8 KV cache"
        if model.shard is not None:
            settings = dataclasses.replace(settings, num_sharing=model.shard.num_ranks)
            reason = "tensor parallel ranks run in torch" if options.native else None
        native = options.native and reason is None
        if options.batch_invariant and options.kv_dtype == "fp8":
            raise ConfigError("batch_invariant: on a CPU only native steps are, and they have no FP8 KV cache")
        if options.batch_invariant and not native:
            raise ConfigError("batch_invariant: on a CPU only native steps are (option native, and a C++ compiler)")
        as_is = all(getattr(options, name) == "auto" for name in ("dtype", "load_format", "quantization"))
        stored = native and as_is and why_not_stored(model) is None
        dtype = torch.float32 if stored else settings.dtype  # of what is not stored as blocks: norms and biases
        return dataclasses.replace(
            settings, dtype=dtype, native=native, slow_reason=reason, stored=stored, grouped=True
        )

    def load(
        self, source: ModelSource, settings: Settings, weights: WeightOptions, group: RankGroup = ONE_RANK
    ) -> LoadedModel:
        if settings.model.is_general:
            return load_transformers(source, settings.model, **weights)
        if settings.native:
            return load_native(source, settings.model, **weights, stored=settings.stored)
        layers = on_ranks(PLAIN, group, settings.model.vocab_size)
        return load_model(source, settings.model, layers=layers, narrow_kv=settings.kv_dtype == FP8, **weights)

    def assemble(
        self,
        device: Device,
        model: LoadedModel,
        resolved: Resolved,
        progress: BuildProgress | None,
        *,
        processed: bool = False,
        group: RankGroup = ONE_RANK,
    ) -> Built:
        config, limits = resolved.model, resolved.limits
        kv = make_kv_store(device, resolved, heads_first=True)  # the reference gathers the KV cache head by head
        if isinstance(model, NativeModel):
            groups = resolved.groups
            places = kv.buffer.tensor.view(limits.num_blocks + 1, groups.num_places, -1).unbind(1)
            runner = NativeRunner(device, limits, model, kv, groups)
            return Built(resolved, device, runner, BlockMemory.of(places, groups))
        specs = config.attention_specs()
        attention = ReferenceAttention(kv.pools, limits.block_size, specs, resolved.groups.of_layer, kv_units(model))
        reason = resolved.slow_reason if config.is_general else _no_native_call(resolved.slow_reason)
        plain = Runner(device, limits, kv, Step(model, attention, shared(pick, group)), reason)
        return Built(resolved, device, plain, in_blocks(kv, resolved))


def _no_native_call(reason: str | None) -> str | None:
    return None if reason is None else f"no native call: {reason}"


def load_native(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    quantization: Quantization = "auto",
    max_positions: int | None = None,
    progress: BuildProgress | None = None,
    stored: bool = False,
) -> NativeModel:
    """The model for native steps; no second copy of its weights remains. FP8 weights are made whole, MXFP4 ones not.

    Weights that a file has in the form that steps want are mapped, and packed while the first steps run.

    stored: as in `open_weights`.
    """
    read = open_weights(
        source,
        config,
        dtype=dtype,
        device=device,
        load_format=load_format,
        seed=seed,
        quantization=quantization,
        keeps_mxfp4=True,
        progress=progress,
        stored=stored,
        mapped=True,
    )
    with torch.inference_mode():
        return NativeModel(config, read, max_positions, narrow_experts=read.has_narrow_experts(config))


def _multiplies_bfloat16() -> bool:
    """Whether this CPU's products of bfloat16 are fast."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
