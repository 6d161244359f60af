"""The checking mode on a model with real keys and values: stale memory spoils what is read from it, and is named."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gapless.core.params import SamplingParams
from gapless.device.base import Device
from gapless.pipeline.block_ledger import Touched
from gapless.pipeline.checked import SPOILED, PoisoningRunner, poison_of
from gapless.proof.judge import PLAIN
from gapless.proof.play import Trouble, Watch, play
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.tiny import tiny_stage
from gapless.runner.fill import Filled
from gapless.runner.kits.base import BlockMemory
from gapless.runner.row_store import RowStore

GREEDY = SamplingParams(max_tokens=6, temperature=0)
ASKS = tuple(Ask(f"r{i}", tuple(range(3 * i + 1, 3 * i + 12)), GREEDY, 0, arrival=i) for i in range(4))
SCHEDULE = Schedule(
    ASKS, num_rows=3, num_blocks=14, block_size=4, max_batch_tokens=24, max_model_len=96, depth=2, order=1
)


def test_checking_changes_no_token() -> None:
    stage = tiny_stage("qwen3")
    checked, plain = (play(stage, SCHEDULE, watch) for watch in (Watch(), PLAIN))
    assert checked.trouble is None
    assert checked.tokens == plain.tokens
    assert checked.num_block_reads > 100


def test_a_stale_read_gives_no_token_but_the_name_of_its_row() -> None:
    """From the fourth step on a row's table points at a block that is nobody's, which no plan shows."""
    original, calls = RowStore.apply, []

    def apply(self: RowStore, packed) -> None:
        original(self, packed)
        calls.append(packed)
        if len(calls) > 3:
            self.blocks[0, 0, 0] = 60

    with patch.object(RowStore, "apply", apply):
        played = play(tiny_stage("llama"), SCHEDULE)
    assert played.trouble == Trouble("conflict", "step 4: row 0 (request 'r0') read KV that is not a number")


class Idle:
    """A runner that does nothing."""

    buffers = ()
    mask_words = 1

    def fill(self, plan, out) -> Filled:
        return Filled(plan, 0)

    def step(self, filled, packed_plan: torch.Tensor, out: torch.Tensor) -> None:
        out[:2] = 5


def test_freed_blocks_are_poisoned_and_new_ones_cleaned() -> None:
    pools = [torch.ones(8, 2, 3) for _ in range(2)]
    runner = PoisoningRunner(Idle(), BlockMemory([pool.view(4, 2, 2, 3) for pool in pools]))  # type: ignore[arg-type]
    plan = SimpleNamespace(step=1)
    runner.expect(plan, Touched(np.array([1]), np.array([2]), np.array([[1, 2]])))  # type: ignore[arg-type]
    out = torch.zeros(4, dtype=torch.int32)
    runner.step(Filled(plan, 0), out, out)  # type: ignore[arg-type]
    for pool in pools:
        assert pool.view(4, -1).isnan().all(dim=1).tolist() == [False, True, False, False]
        assert pool.view(4, -1).sum(dim=1)[[0, 2, 3]].tolist() == [12, 0, 12]
    assert out.tolist() == [SPOILED, 5, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_poison_is_not_a_number_where_there_is_such_a_thing(dtype: torch.dtype) -> None:
    value = torch.tensor(poison_of(dtype), dtype=dtype)
    assert value.isnan() == dtype.is_floating_point
    assert SPOILED < 0


def test_nothing_is_wrapped_when_nobody_looks() -> None:
    """What the checking mode adds is not there otherwise: no ledger, no poison, no wrapped device."""
    seen: list[type] = []
    stage = tiny_stage("llama")

    def make(device: Device, runner, limits, num_slots):
        from gapless.pipeline.executor import LocalExecutor

        seen.extend((type(device), type(runner)))
        return LocalExecutor(device, runner, limits, num_slots)

    play(stage, SCHEDULE, PLAIN, make_executor=make)
    assert [kind.__name__ for kind in seen] == ["CpuDevice", "Failing"]
