"""The kit of NVIDIA GPUs: layers fused where they can be, the fastest attention, steps as CUDA graphs.

Needs Triton, which only GPU installations have: `kit_for` imports this file when a GPU is chosen.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from gapless.attention.base import FP8, Attention
from gapless.attention.invariant import InvariantAttention
from gapless.attention.triton import TritonAttention
from gapless.config import EngineOptions
from gapless.device.base import Device
from gapless.device.cuda import device_count, replay_s
from gapless.errors import ConfigError
from gapless.kernels.ahead import hashed_meanwhile
from gapless.kernels.cublas import product_shapes
from gapless.kernels.keys import settle_keys
from gapless.kernels.launch import has_fp8
from gapless.kernels.products import Workspace
from gapless.models.config import ModelConfig
from gapless.models.general_layers import GeneralLayers
from gapless.models.invariant_layers import InvariantLayers
from gapless.models.layers import Layers
from gapless.models.loader import load_model
from gapless.models.narrow_layers import NarrowLinear
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.ranked_layers import on_ranks
from gapless.models.skinny_layers import SkinnyLayers
from gapless.models.source import ModelSource
from gapless.models.spec import Feature, KVUnits
from gapless.models.transformers_model import load_transformers
from gapless.runner.attention_choice import candidates, make_attention
from gapless.runner.draw import pick, score
from gapless.runner.graphs import GraphRunner
from gapless.runner.kits.base import (
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
from gapless.runner.kv_store import KVStore
from gapless.runner.native_model import NativeModel
from gapless.runner.runner import Runner
from gapless.runner.shared_draw import shared
from gapless.runner.step import Step

log = logging.getLogger(__name__)

# transformers' own code, where it waits for the device or copies to it, which no graph can hold
NOT_CAPTURED = f"{Feature.GENERAL}, not captured"
CHUNK_COST = 0.9  # of a decode step's time: chunks have attention of their own, and steps of few rows are short


class CudaKit:
    """Triton's kernels and cuBLAS; batch-invariant ones if asked for."""

    block_sizes: tuple[int, ...] = (16,)  # a runner captures its graphs, which takes a while
    exact_dtypes: tuple[torch.dtype, ...] = ()  # kernels are chosen by the size of the batch
    collectives = "nccl"

    def settings(self, options: EngineOptions, model: ModelConfig) -> Settings:
        refuse(model, "cuda", TritonAttention.why_not(model.attention_specs()) or GeneralLayers.why_not(model))
        reason = SkinnyLayers.why_not(model)
        if options.batch_invariant and (missing := InvariantAttention.why_not(model.attention_specs())):
            raise ConfigError(f"batch_invariant: {model.architecture} cannot run so: {missing}")
        if options.batch_invariant and (missing := InvariantLayers.why_not(model)):
            raise ConfigError(f"batch_invariant: {model.architecture} needs other layers than these: {missing}")
        check_quantization(options, model)
        check_ranks(options, model)
        settings = Settings.of(
            options, model, "cuda", dtype=torch.bfloat16, kv_dtype=None, max_batch_tokens=8192, max_num_rows=256
        )
        check_fp8(options, model, settings.dtype)
        check_kv_dtype(options, settings.dtype)
        return dataclasses.replace(
            settings, attention=candidates(options, model, settings.kv_dtype), slow_reason=reason, grouped=True
        )

    def load(
        self, source: ModelSource, settings: Settings, weights: WeightOptions, group: RankGroup = ONE_RANK
    ) -> LoadedModel:
        settle_keys()
        if settings.model.is_general:
            return load_transformers(source, settings.model, **weights)
        layers: Layers = GeneralLayers()
        fp8_linear = None
        if settings.slow_reason is None:
            layers = make_layers(weights["device"], settings.dtype, batch_invariant=settings.batch_invariant)
        else:
            fp8_linear = NarrowLinear.maker(Workspace(weights["device"]))
        layers = on_ranks(layers, group, settings.model.vocab_size)
        with hashed_meanwhile():
            return load_model(
                source,
                settings.model,
                layers=layers,
                fp8_linear=fp8_linear,
                keeps_mxfp4=True,
                narrow_kv=settings.kv_dtype == FP8,
                **weights,
            )

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
        assert not isinstance(model, NativeModel)
        limits = resolved.limits
        kv = make_kv_store(device, resolved, heads_first=False)
        attention, choice = choose_attention(device, kv, resolved, kv_units(model))
        step = Step(model, attention, shared(pick, group), score)
        runner = Runner(device, limits, kv, step, NOT_CAPTURED if resolved.model.is_general else None)
        reason = f"no fused layers: {resolved.slow_reason}" if resolved.slow_reason else None
        if resolved.model.is_general:
            reason = str(Feature.GENERAL)
        try:
            graphs = GraphRunner(runner, step, limits, device, progress, reason, processed=processed)
        except RuntimeError as error:
            if not resolved.model.is_general or "captur" not in str(error):
                raise
            log.warning("%s: steps are not captured: %s", resolved.model.architecture, str(error).split("\n")[0])
            return Built(resolved, device, runner, in_blocks(kv, resolved), attention=choice)
        device.late.watch_names("first product", product_shapes)
        return Built(resolved, device, graphs, in_blocks(kv, resolved), str(graphs.cost), choice, CHUNK_COST)


def check_ranks(options: EngineOptions, model: ModelConfig) -> None:
    """Raises ConfigError where the ranks of a model cannot run here."""
    if model.shard is None:
        return
    num_ranks, num_gpus = model.shard.num_ranks, device_count()
    is_local = options.ranks_on_ray is None  # else Ray counts them
    if is_local and model.shard.rank == 0 and num_gpus < num_ranks:  # the others see their own alone
        raise ConfigError(f"tensor_parallel {num_ranks}: this machine has {num_gpus} GPU{'s' if num_gpus != 1 else ''}")
    if Feature.EXPERTS in model.features():
        raise ConfigError(f"tensor_parallel {num_ranks}: experts are not cut on GPUs; use 1")


def check_fp8(options: EngineOptions, model: ModelConfig, dtype: torch.dtype) -> None:
    """Raises ConfigError where products with FP8 weights, which the options or the checkpoint ask for, cannot run."""
    is_stored = model.fp8 is not None and options.quantization != "none"
    if not is_stored and options.quantization != "fp8":
        return
    hint = "; quantization none makes the weights of the checkpoint whole" if is_stored else ""
    if not has_fp8():
        raise ConfigError(f"FP8 weights need a GPU of compute capability 8.9 or above{hint}")
    if dtype != torch.bfloat16:
        raise ConfigError(f"FP8 weights need dtype bfloat16 on a GPU, not {str(dtype).removeprefix('torch.')}{hint}")
    if options.batch_invariant:
        raise ConfigError(f"batch_invariant: products with FP8 weights depend on the number of rows{hint}")


def check_kv_dtype(options: EngineOptions, dtype: torch.dtype) -> None:
    """Raises ConfigError where the KV cache cannot be what the options ask for."""
    if options.kv_dtype != "fp8":
        return
    if not has_fp8():
        raise ConfigError("kv_dtype fp8 needs a GPU of compute capability 8.9 or above")
    if dtype == torch.float32:
        raise ConfigError("kv_dtype fp8 needs dtype bfloat16 or float16 on a GPU, not float32")
    if options.batch_invariant:
        raise ConfigError("kv_dtype fp8: the attention kernels of batch_invariant have none")


def make_layers(device: torch.device, dtype: torch.dtype, *, batch_invariant: bool) -> Layers:
    """The parts of a decoder layer. Batch-invariant: a row's result does not depend on other rows."""
    fused = dtype != torch.float32
    return InvariantLayers(device, fused=fused) if batch_invariant else SkinnyLayers(device, fused=fused)


def choose_attention(
    device: Device, kv: KVStore, resolved: Resolved, units: Sequence[KVUnits] | None = None
) -> tuple[Attention, str]:
    """The attention, and in words which one it is and why."""
    limits, config = resolved.limits, resolved.model
    sizes = kv.pools, limits.block_size, config.attention_specs(), limits.num_rows, device.num_cores
    if resolved.batch_invariant:
        return InvariantAttention(*sizes, limits.max_model_len), "attention: triton (batch-invariant)"
    own = TritonAttention(*sizes, resolved.groups.of_layer, units)
    attention, choice = make_attention(own, limits, resolved.attention, replay_s, device.as_launch)
    log.info("%s", choice)
    return attention, str(choice)
