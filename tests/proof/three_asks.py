"""A small schedule of three prompts, and a stage for it: what several tests of the proof play."""

from __future__ import annotations

import pytest

from gapless.core.params import SamplingParams
from gapless.proof.schedule import Ask, Schedule
from gapless.proof.stage import ModelStage
from gapless.proof.tiny import tiny_stage

SIZES = {"num_rows": 3, "num_blocks": 40, "block_size": 4, "max_batch_tokens": 12, "max_model_len": 96}


class Inexact(ModelStage):
    """A stage that says of itself that rounding may depend on the batch."""

    exact = False  # type: ignore[assignment]


def three_asks(params: SamplingParams) -> tuple[Ask, ...]:
    return tuple(Ask(f"r{i}", tuple(range(7 * i + 1, 7 * i + 10)), params, 0, arrival=i) for i in range(3))


def schedule_of(asks: tuple[Ask, ...]) -> Schedule:
    return Schedule(asks, **SIZES, depth=2, order=4)


@pytest.fixture(scope="module")
def stage() -> ModelStage:
    return tiny_stage("llama")
