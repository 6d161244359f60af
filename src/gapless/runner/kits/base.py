"""The protocol of a kit: all that the kind of device decides, from defaults and layers to sampler and runner.

A kit answers for one kind of device: `settings` before anything is loaded, then `load`, then `assemble`. The values
that pass between them are here too. Knows no device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import torch

from gapless.attention.base import FP8
from gapless.config import EngineOptions
from gapless.core.limits import Limits
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device.base import Buffer, Device
from gapless.errors import ConfigError, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.decoder import CausalLM
from gapless.models.loader import LoadFormat, Quantization
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.source import ModelSource
from gapless.models.spec import Feature, KVUnits
from gapless.models.transformers_model import TransformersLM
from gapless.runner.fill import Filled
from gapless.runner.kv_store import KVStore
from gapless.runner.layer_groups import LayerGroups
from gapless.runner.native_model import NativeModel
from gapless.runner.steering import Steering

BuildProgress = Callable[[int, int], None]
LoadedModel = CausalLM | NativeModel | TransformersLM


@dataclass(frozen=True, slots=True)
class Settings:
    """All that is known before a model is loaded: the options over the device's defaults."""

    model: ModelConfig
    device_name: str
    dtype: torch.dtype  # of the weights
    kv_dtype: torch.dtype
    num_rows: int  # at most; every row fits into one step
    max_batch_tokens: int
    batch_invariant: bool
    native: bool = False  # steps are native calls
    slow_reason: str | None = None  # why they are not, where the user did not say so
    attention: tuple[str, ...] = ()  # names of which the fastest will run, where there is a choice
    stored: bool = False  # matrices of a GGUF stay as they are stored
    grouped: bool = False  # layers with a window keep only its blocks
    num_sharing: int = 1  # ranks that share this device's memory and cores

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        model: ModelConfig,
        device_name: str,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        max_batch_tokens: int,
        max_num_rows: int,
    ) -> Settings:
        """The options over these defaults. `kv_dtype` None: that of the weights."""
        chosen: torch.dtype = dtype if options.dtype == "auto" else getattr(torch, options.dtype)
        kv_chosen = FP8 if options.kv_dtype == "fp8" else kv_dtype or chosen
        tokens = options.max_batch_tokens or max_batch_tokens
        num_rows = min(options.max_num_rows or max_num_rows, tokens)
        return cls(model, device_name, chosen, kv_chosen, num_rows, tokens, options.batch_invariant)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options, resolved against a model and a machine."""

    model: ModelConfig
    device_name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_bytes: int
    limits: Limits
    groups: LayerGroups
    native: bool  # steps are native calls
    slow_reason: str | None = None  # why they are not, where the user did not say so
    attention: tuple[str, ...] = ()  # names of which the fastest will run, where there is a choice
    batch_invariant: bool = False  # a request's bits do not depend on its batch
    stored: bool = False  # matrices of a GGUF stay as they are stored

    @property
    def weights(self) -> str:
        """What most weights are in memory: a dtype, or a kind of a GGUF."""
        return self.model.kinds[0] if self.stored else str(self.dtype).removeprefix("torch.")

    @classmethod
    def of(cls, settings: Settings, kv_bytes: int, limits: Limits, groups: LayerGroups) -> Resolved:
        """The settings, and the sizes that fit."""
        return cls(
            settings.model,
            settings.device_name,
            settings.dtype,
            settings.kv_dtype,
            kv_bytes,
            limits,
            groups,
            native=settings.native,
            slow_reason=settings.slow_reason,
            attention=settings.attention,
            batch_invariant=settings.batch_invariant,
            stored=settings.stored,
        )


class WeightOptions(TypedDict):
    """Where weights go and how they are read, as arguments of `load_model`."""

    dtype: torch.dtype
    device: torch.device
    load_format: LoadFormat
    seed: int
    quantization: Quantization
    max_positions: int
    progress: BuildProgress | None


class BatchRunner(Protocol):
    """Runs one batch at a time on one device."""

    buffers: Sequence[Buffer]
    mask_words: int  # of a row's mask
    ledger: Counter[str]  # steps that missed a faster runner, by reason
    num_padding: int  # tokens computed only to fill up captured shapes

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        """Pack the plan."""

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        """Run the packed plan on the compute stream; leave its results at the head of `out`."""

    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        """The first half of `step`, up to the logits."""

    def sample(self, filled: Filled, packed_plan: torch.Tensor, new: Steering, out: torch.Tensor) -> None:
        """The second half, from the logits on, with new masks."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """The KV memory as the checking mode sees it."""

    places: Sequence[torch.Tensor]  # of a group of layers: blocks first, however a block is laid out
    last_group: int = 0  # of the model's last layer
    last_place: int = -1

    @classmethod
    def of(cls, places: Sequence[torch.Tensor], groups: LayerGroups) -> BlockMemory:
        return cls(places, groups.of_layer[-1], groups.places[-1])


@dataclass(frozen=True, slots=True)
class Built:
    """A device with a model on it, ready to run steps."""

    resolved: Resolved
    device: Device
    runner: BatchRunner
    kv: BlockMemory
    capture_cost: str = ""  # what capturing graphs took, in words
    attention: str = ""  # which one runs and why, in words
    chunk_cost: float = 0.0  # by how much of its time a chunk of a few tokens delays a decode step


class Kit(Protocol):
    """All that depends on the kind of device."""

    block_sizes: tuple[int, ...]  # that `gapless check` plays; each is a runner of its own
    exact_dtypes: tuple[torch.dtype, ...]  # of steps in torch whose tokens depend on their batch by rounding alone
    collectives: str  # the library by which ranks on such devices talk

    def settings(self, options: EngineOptions, model: ModelConfig) -> Settings:
        """The settings for these options. Raises ConfigError for an option that the device cannot follow."""

    def load(
        self, source: ModelSource, settings: Settings, weights: WeightOptions, group: RankGroup = ONE_RANK
    ) -> LoadedModel:
        """The model, or a rank's part of it, with its weights on the device."""

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
        """A runner for a loaded model, with rows and KV memory of its own. processed: with logits processors."""


def refuse(model: ModelConfig, device_name: str, reason: str | None) -> None:
    """Raises UnsupportedModel where there is a reason that layers or attention cannot do what the model needs."""
    if reason is not None:
        raise UnsupportedModel(f"{model.architecture} cannot run on {device_name}: {reason}")


def check_quantization(options: EngineOptions, model: ModelConfig) -> None:
    """Raises ConfigError where the weights that quantization is for are not all there are of their kind."""
    if options.quantization == "fp8" and model.is_general:
        raise ConfigError(f"quantization fp8: {model.architecture} takes the {Feature.GENERAL}, which has none")
    if options.quantization == "fp8" and Feature.EXPERTS in model.features():
        raise ConfigError(f"quantization fp8: {model.architecture} has experts, whose weights it leaves as they are")


def make_kv_store(device: Device, resolved: Resolved, *, heads_first: bool) -> KVStore:
    """KV memory for the model and the limits."""
    config, limits = resolved.model, resolved.limits
    return KVStore(
        device,
        places=resolved.groups.places,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=resolved.kv_dtype,
        heads_first=heads_first,
    )


def kv_units(model: LoadedModel) -> Sequence[KVUnits] | None:
    """What a 1 in each layer's FP8 cache stands for, where the checkpoint says so; None: 1."""
    return (model.kv_units or None) if isinstance(model, CausalLM) else None


def in_blocks(kv: KVStore, resolved: Resolved) -> BlockMemory:
    """The memory, blocks first."""
    size = resolved.limits.block_size
    return BlockMemory.of([place.view(-1, size, *place.shape[1:]) for place in kv.memory], resolved.groups)
