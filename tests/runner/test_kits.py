"""A kind of device is a device, a kit and a line in each registry: here one that computes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gapless import LLM, SamplingParams, config, device
from gapless.config import EngineOptions
from gapless.core.plan import Plan
from gapless.core.request import IntArray
from gapless.device.base import Buffer, Device
from gapless.device.cpu import CpuDevice
from gapless.models.config import ModelConfig
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.source import ModelSource
from gapless.models.source import resolve as find
from gapless.runner import kits
from gapless.runner.fill import Filled
from gapless.runner.kits.base import BlockMemory, BuildProgress, Built, LoadedModel, Resolved, Settings, WeightOptions
from gapless.runner.resolve import resolve
from gapless.runner.steering import Steering

ANSWER = 7


class NullRunner:
    """Says the same token whatever it is asked."""

    def __init__(self) -> None:
        self.buffers: Sequence[Buffer] = ()
        self.mask_words = 0
        self.ledger: Counter[str] = Counter()

    def fill(self, plan: Plan, out: IntArray) -> Filled:
        return Filled(plan, 0)

    def step(self, filled: Filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        out[: filled.plan.num_samples] = ANSWER
        self.ledger["nothing computed"] += 1

    def forward(self, filled: Filled, packed_plan: torch.Tensor) -> None:
        raise AssertionError("no request has a guide")

    def sample(self, filled: Filled, packed_plan: torch.Tensor, new: Steering, out: torch.Tensor) -> None:
        raise AssertionError("no request has a guide")


class NullKit:
    """Loads nothing, and has no KV memory."""

    block_sizes = (16,)
    exact_dtypes = ()

    def settings(self, options: EngineOptions, model: ModelConfig) -> Settings:
        return Settings.of(
            options, model, "null", dtype=torch.float16, kv_dtype=None, max_batch_tokens=64, max_num_rows=3
        )

    def load(
        self, source: ModelSource, settings: Settings, weights: WeightOptions, group: RankGroup = ONE_RANK
    ) -> LoadedModel:
        return None  # type: ignore[return-value]

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
        return Built(resolved, device, NullRunner(), BlockMemory(()))


@pytest.fixture(autouse=True)
def null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "DEVICES", (*config.DEVICES, "null"))
    monkeypatch.setitem(device.DEVICES, "null", lambda seed: CpuDevice())
    monkeypatch.setitem(kits.KITS, "null", NullKit)


def test_an_engine_runs_on_a_kit_of_its_own(tiny_dir: Path) -> None:
    with LLM(tiny_dir, device="null", kv_memory="1MiB", depth=2) as llm:
        found = llm.generate([[1, 2, 3]] * 5, SamplingParams(max_tokens=4, ignore_eos=True))
        assert [list(item.token_ids) for item in found] == [[ANSWER] * 4] * 5
        assert llm.engine.monitor.ledger()["nothing computed"] > 0
        assert llm.engine.resolved.device_name == "null"


def test_its_defaults_hold_where_the_user_did_not_say(tiny_dir: Path) -> None:
    options = EngineOptions(model=str(tiny_dir), device="null", kv_memory="1MiB", max_batch_tokens=2)
    found = resolve(options, find(tiny_dir))
    assert (found.dtype, found.kv_dtype) == (torch.float16, torch.float16)
    assert (found.limits.num_rows, found.limits.max_batch_tokens) == (2, 2)


def test_every_device_has_a_kit() -> None:
    assert set(kits.KITS) == set(device.DEVICES) == set(config.DEVICES) - {"auto"}
