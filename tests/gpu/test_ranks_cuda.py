"""Collectives by NCCL inside captured steps. With one GPU there is one rank, which still makes every call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.client import Completion
from gapless.models.ranked_layers import RankedLayers
from gapless.ranks.torch_group import TorchGroup, host_store
from gapless.runner.shared_draw import SharedSampler
from tiny import write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPTS = ["hello", "how are you today my friend", "xyz"]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


class CountedGroup(TorchGroup):
    """A group that knows how often it was called from Python."""

    calls: Counter[str]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls["add"] += 1
        return super().add(tensor)

    def share(self, tensor: torch.Tensor) -> None:
        self.calls["share"] += 1
        super().share(tensor)


def complete(model: Path) -> tuple[list[Completion], int]:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_blocks": 256, "max_num_rows": 8}
    with LLM(model, **options, max_batch_tokens=256) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        return found, llm.engine.monitor.stats().num_steps


def test_a_captured_step_with_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024)
    plain, num_steps = complete(model)
    group = CountedGroup("nccl", host_store(60), 0, 1, 60)
    group.calls = Counter()
    group.gather(torch.ones(1, device="cuda"))  # the communicator must exist before a capture
    kit = "gapless.runner.kits.cuda"
    monkeypatch.setattr(f"{kit}.on_ranks", lambda layers, _, vocab_size: RankedLayers(layers, group, vocab_size))
    monkeypatch.setattr(f"{kit}.shared", lambda sampler, _: SharedSampler(sampler, group))
    before = group.calls.copy()
    ranked, _ = complete(model)
    assert [done.token_ids for done in ranked] == [done.token_ids for done in plain]
    during = group.calls - before
    assert during["add"] > 0 < during["share"]
    adds_of_a_step = 1 + 2 * 2  # the embedding, and two in each of two layers
    assert during["add"] < adds_of_a_step * num_steps, "steps are not replayed"
