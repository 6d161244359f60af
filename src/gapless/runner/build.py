"""Builds everything that one device needs to run a model: loads it, sizes its memory, assembles its runner.

The device's kit says how, `resolve` says in what sizes. Nothing here runs once the engine does.
"""

from __future__ import annotations

from functools import partial

import torch

from gapless.attention.base import Rotation
from gapless.config import EngineOptions
from gapless.core.params import MAX_LOGPROBS
from gapless.device import open_device
from gapless.device.base import Device
from gapless.models.source import ModelSource
from gapless.runner.kits import kit_for
from gapless.runner.kits.base import BuildProgress, Built, LoadedModel, Resolved, Settings, WeightOptions
from gapless.runner.logprobs import score
from gapless.runner.memory import shortage_named
from gapless.runner.native import NativeModel
from gapless.runner.resolve import max_model_len, read_config, resolve_on, settle

__all__ = ["Built", "assemble", "build", "load"]


@shortage_named("the model")
def build(
    options: EngineOptions, source: ModelSource, progress: BuildProgress | None = None, *, processed: bool = False
) -> Built:
    """Load the model and lay out its memory. `progress(done, total)` counts weights, then graphs.

    processed: logits processors may come between the halves of a step.
    """
    settings = settle(options, read_config(source))
    device = open_device(settings.device_name, seed=options.interleave, check=options.check)
    try:
        model = load(options, source, settings, device, progress)
        resolved = resolve_on(device, options, settings, partial(_dry_run, model, settings, device.torch_device))
        return assemble(device, model, resolved, progress, processed=processed)
    except BaseException:
        device.close()
        raise


def load(
    options: EngineOptions,
    source: ModelSource,
    settings: Settings,
    device: Device,
    progress: BuildProgress | None = None,
) -> LoadedModel:
    """The model, with its weights on the device."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    weights = WeightOptions(
        dtype=settings.dtype,
        device=device.torch_device,
        load_format=options.load_format,
        seed=options.seed,
        quantization=options.quantization,
        max_positions=max_model_len(options, settings.model),
        progress=progress,
    )
    return kit_for(settings.device_name).load(source, settings, weights)


def assemble(
    device: Device,
    model: LoadedModel,
    resolved: Resolved,
    progress: BuildProgress | None = None,
    *,
    processed: bool = False,
) -> Built:
    """A runner for a loaded model, with rows and KV memory of its own."""
    return kit_for(resolved.device_name).assemble(device, model, resolved, progress, processed=processed)


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
