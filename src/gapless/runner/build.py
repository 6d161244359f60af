"""Builds everything that one device needs to run a model: loads it, sizes its memory, assembles its runner.

The device's kit says how, `resolve` says in what sizes. Nothing here runs once the engine does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from gapless.attention.base import Rotation
from gapless.config import EngineOptions
from gapless.core.params import MAX_LOGPROBS
from gapless.device import open_device
from gapless.device.base import Device
from gapless.errors import ConfigError
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.source import ModelSource
from gapless.runner.kits import kit_for
from gapless.runner.kits.base import BuildProgress, Built, LoadedModel, Resolved, Settings, WeightOptions
from gapless.runner.logprobs import score
from gapless.runner.memory import shortage_named
from gapless.runner.native_model import NativeModel
from gapless.runner.resolve import max_model_len, read_config, resolve_on, settle

__all__ = ["Built", "assemble", "build", "load"]
ALL_THREADS = torch.get_num_threads()  # before any engine has taken a share of them


@shortage_named("the model")
def build(
    options: EngineOptions,
    source: ModelSource,
    progress: BuildProgress | None = None,
    *,
    processed: bool = False,
    group: RankGroup = ONE_RANK,
) -> Built:
    """Load the model and lay out its memory. `progress(done, total)` counts weights, then graphs.

    processed: logits processors may come between the halves of a step. group: the ranks that hold the model, each of
    which builds its part now.
    """
    if group.size != options.tensor_parallel:
        raise ConfigError(f"tensor_parallel {options.tensor_parallel}: one rank alone is built here; use 1")
    settings = settle(options, read_config(source), group.rank)
    device = open_device(settings.device_name, seed=options.interleave, check=options.check)
    try:
        model = load(options, source, settings, device, progress, group)
        resolved = resolve_on(device, options, settings, partial(_dry_run, model, settings, device.torch_device))
        return assemble(
            device, model, agreed(resolved, group, device.torch_device), progress, processed=processed, group=group
        )
    except BaseException:
        device.close()
        raise


def load(
    options: EngineOptions,
    source: ModelSource,
    settings: Settings,
    device: Device,
    progress: BuildProgress | None = None,
    group: RankGroup = ONE_RANK,
) -> LoadedModel:
    """The model, or a rank's part of it, with its weights on the device."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    elif settings.num_sharing > 1:
        torch.set_num_threads(max(1, ALL_THREADS // settings.num_sharing))
    weights = WeightOptions(
        dtype=settings.dtype,
        device=device.torch_device,
        load_format=options.load_format,
        seed=options.seed,
        quantization=options.quantization,
        max_positions=max_model_len(options, settings.model),
        progress=progress,
    )
    return kit_for(settings.device_name).load(source, settings, weights, group)


def assemble(
    device: Device,
    model: LoadedModel,
    resolved: Resolved,
    progress: BuildProgress | None = None,
    *,
    processed: bool = False,
    group: RankGroup = ONE_RANK,
) -> Built:
    """A runner for a loaded model, with rows and KV memory of its own."""
    kit = kit_for(resolved.device_name)
    return kit.assemble(device, model, resolved, progress, processed=processed, group=group)


def agreed(resolved: Resolved, group: RankGroup, device: torch.device) -> Resolved:
    """With as many KV blocks as fit on every rank: plans name blocks, and mean the same ones on all of them."""
    limits = resolved.limits
    fitting = group.gather(torch.tensor([limits.num_blocks], device=device))
    num_blocks = int(fitting.min())
    return replace(
        resolved,
        limits=replace(limits, num_blocks=num_blocks),
        kv_bytes=resolved.kv_bytes // limits.num_blocks * num_blocks,
    )


@torch.inference_mode()
def _dry_run(model: LoadedModel, settings: Settings, device: torch.device) -> None:
    """The largest step there can be, without attention: no step allocates much more than this."""
    if isinstance(model, NativeModel):
        return  # has its memory already
    config, num_rows = settings.model, settings.num_rows
    ids = torch.zeros(settings.max_batch_tokens, dtype=torch.int64, device=device)

    def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return heads[:, : config.num_heads].reshape(len(heads), -1)

    hidden = model.forward(ids, ids, attend)
    logits = model.logits(hidden[:num_rows])
    logits.float().softmax(dim=1, dtype=torch.float64).cumsum(dim=1)
    score(model.logits(hidden[:num_rows]), ids[:num_rows], min(MAX_LOGPROBS, config.vocab_size))  # a slice of a prompt
