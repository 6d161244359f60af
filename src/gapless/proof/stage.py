"""Stages for schedules: a model loaded once, and a runner for each block size.

A runner is made for the largest schedule and reused. Scheduler, streams and checker are new for each schedule. Owns the
model and the memory. Knows no schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gapless.config import EngineOptions
from gapless.core.limits import Limits
from gapless.core.windows import NO_WINDOWS, Windows, most_blocks
from gapless.device import ORDERED, open_device
from gapless.device.base import Device
from gapless.device.checker import CheckedDevice
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.models.config import ModelConfig
from gapless.models.decoder import CausalLM
from gapless.models.source import ModelSource
from gapless.pipeline.executor import StepRunner
from gapless.runner.build import assemble, load
from gapless.runner.kits import kit_for
from gapless.runner.kits.base import BlockMemory, LoadedModel
from gapless.runner.layer_groups import LayerGroups
from gapless.runner.native_model import NativeModel
from gapless.runner.resolve import Resolved, resolve, settle
from gapless.text.tokenizer import Tokenizer

LONE_BLOCK_SIZE = 16  # every device has it


@dataclass(frozen=True, slots=True)
class Room:
    """The most that a schedule on this stage may need."""

    num_rows: int
    num_places: int  # of the KV cache, in tokens
    max_batch_tokens: int
    max_model_len: int
    windows: Windows = NO_WINDOWS  # of the model's groups of layers, each of which has room for all tokens

    def limits(self, block_size: int) -> Limits:
        return Limits(
            num_rows=self.num_rows,
            num_blocks=-(-self.num_places // block_size) * len(self.windows),
            block_size=block_size,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
            windows=self.windows,
        )

    def least_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks with which a request of so many tokens can run."""
        return most_blocks(min(num_tokens, self.max_model_len), 1, self.windows, block_size)


@dataclass(frozen=True, slots=True)
class Cast:
    """A runner, and the KV memory it works on."""

    runner: StepRunner
    kv: BlockMemory
    limits: Limits


class Stage(Protocol):
    """Everything that playing a schedule needs."""

    room: Room
    tokenizer: Tokenizer | None

    def cast(self, block_size: int) -> Cast:
        """The runner for this block size; the same one each time."""

    def device(self, order: int | None, *, threads: bool, check: bool) -> Device:
        """A fresh device, whose streams run in the order, or with the delays, of a seed; None: no overlap at all."""


class ModelStage:
    """A stage with a real model."""

    def __init__(self, model: LoadedModel, resolved: Resolved, room: Room, tokenizer: Tokenizer | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._kit = kit_for(resolved.device_name)
        self.resolved = resolved
        self.make_room(room)

    def make_room(self, room: Room) -> None:
        """Schedules may need so much from now on. Layers are grouped for its lengths, if they are at all."""
        groups = self.resolved.groups
        if groups.windows != NO_WINDOWS:
            specs = self.resolved.model.attention_specs()
            groups = LayerGroups.of([spec.window for spec in specs], room.max_model_len)
        self.room = dataclasses.replace(room, windows=groups.windows)
        self._groups = groups
        self._casts: dict[int, Cast] = {}

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        source: ModelSource,
        room: Room,
        tokenizer: Tokenizer | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ModelStage:
        """Read the model's weights once for all schedules."""
        resolved = resolve(options, source)
        device = open_device(resolved.device_name)
        model = load(options, source, settle(options, resolved.model), device, progress)
        device.close()
        return cls(model, resolved, room, tokenizer)

    @property
    def config(self) -> ModelConfig:
        return self.resolved.model

    @property
    def exact(self) -> bool:
        """Whether a token may not depend on what else is in the batch. Native steps never do."""
        return self.resolved.batch_invariant or isinstance(self.model, NativeModel) or self.has_ties

    @property
    def has_ties(self) -> bool:
        """Whether it may after all where two tokens are equal to within the rounding of float32."""
        return isinstance(self.model, CausalLM) and self.resolved.dtype in self._kit.exact_dtypes

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes that schedules may ask for; a runner is made for each."""
        return self._kit.block_sizes

    def dense_model(self) -> CausalLM:
        """The model as plain torch, for a second opinion on ties."""
        assert isinstance(self.model, CausalLM)
        return self.model

    def cast(self, block_size: int) -> Cast:
        if block_size not in self._casts:
            limits = self.room.limits(block_size)
            device = open_device(self.resolved.device_name)
            resolved = dataclasses.replace(self.resolved, limits=limits, groups=self._groups)
            built = assemble(device, self.model, resolved)
            device.close()
            self._casts[block_size] = Cast(built.runner, built.kv, limits)
        return self._casts[block_size]

    def device(self, order: int | None, *, threads: bool, check: bool) -> Device:
        return fresh_device(self.resolved.device_name, order, threads=threads, check=check)


def fresh_device(name: str, order: int | None, *, threads: bool, check: bool) -> Device:
    """Streams in a seeded order, where the device lets us choose it, or with seeded delays where not."""
    if threads or name not in ORDERED:
        return open_device(name, jitter=order, check=check)
    if order is not None:
        return open_device(name, seed=order, check=check)
    device = CpuDevice(driver=InlineDriver())
    return CheckedDevice(device) if check else device
