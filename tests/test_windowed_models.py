"""Models whose layers have windows: their tokens are transformers', and they cost what their windows hold."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from family_cases import CASES, GEMMA3, GPT_OSS, Case, check, random_tokens, save_hf
from gapless import LLM, SamplingParams
from gapless.core.plan import Plan
from gapless.core.scheduler import Scheduler
from gapless.runner.layer_groups import LayerGroups

WINDOW, LENGTH, COUNT = 8, 44, 20
CPU = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 64, "check": True}
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
PLAIN = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
MODELS = {
    "gemma3": GEMMA3 | {"num_hidden_layers": 6, "sliding_window": WINDOW},  # one layer sees everything
    "mistral": CASES["mistral"] | {"sliding_window": WINDOW},
    "gpt oss": GPT_OSS | {"sliding_window": WINDOW},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "depth 2, chunks": {"depth": 2, "max_batch_tokens": 7},
    "depth 3, few blocks": {"depth": 3, "num_blocks": 60},
    "depth 4, any order": {"depth": 4, "interleave": 5, "max_batch_tokens": 16},
    "in torch, few blocks": {"depth": 2, "native": False, "num_blocks": 60},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    found = {}
    for name, changes in MODELS.items():
        path = tmp_path_factory.mktemp("model")
        model = save_hf(path, **changes)
        model.set_attn_implementation("eager")  # the others leave out sinks
        found[name] = Case(path, model)
    return found


def prompts() -> list[list[int]]:
    """Some begin alike, for more blocks than a window has; one is short."""
    tokens = random_tokens(count=LENGTH).tolist()
    return [tokens, [*tokens[:33], 5], tokens[:3], [*tokens[:26], 9, 8, 7]]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_past_the_window_are_those_of_transformers(cases: dict[str, Case], options: dict[str, Any]) -> None:
    """Chunks, prefix hits, preemption and any depth; the second round finds what the first left."""
    case = cases["gemma3"]
    with LLM(case.path, **CPU, **options) as llm:
        assert llm.engine.resolved.limits.windows == (*[WINDOW] * 5, None)
        first, second = llm.generate(prompts(), PARAMS), llm.generate(prompts(), PLAIN)
        assert [done.token_ids for done in second] == [done.token_ids for done in first]
        assert sum(done.num_cached_tokens for done in second) > 0
        assert ("num_blocks" in options) == (llm.stats().num_preemptions > 0)
    for done in first:
        check(case, done)


@pytest.mark.parametrize("name", ["mistral", "gpt oss"])
def test_models_of_other_shapes(cases: dict[str, Case], name: str) -> None:
    """All layers have a window; every second one has, with sinks."""
    with LLM(cases[name].path, **CPU, depth=2, max_batch_tokens=16, num_blocks=24) as llm:
        assert set(llm.engine.resolved.limits.windows) == ({WINDOW} if name == "mistral" else {WINDOW, None})
        first, second = llm.generate(prompts(), PARAMS), llm.generate(prompts(), PLAIN)
    assert [done.token_ids for done in second] == [done.token_ids for done in first]
    for done in first:
        check(cases[name], done)


def test_a_request_is_resumed_past_its_window(cases: dict[str, Case]) -> None:
    """Tokens that another engine sampled are fed like a prompt."""
    with LLM(cases["gemma3"].path, **CPU, depth=2) as llm:
        whole = llm.generate(prompts()[:1], PLAIN)[0].token_ids
    with LLM(cases["gemma3"].path, **CPU, depth=3, max_batch_tokens=9) as llm:
        request, over = llm.engine.make_request(prompts()[0], PLAIN, generated=whole[:13]), Event()
        llm.engine.submit(request, lambda event: over.set())
        assert over.wait(60)
    assert request.tokens[LENGTH:].tolist() == list(whole)


def test_the_same_memory_runs_more_requests(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 120 tokens: six layers keep them all, or one does and five keep three or four blocks of 4."""
    most: dict[str, int] = {}
    options = CPU | {"check": False, "max_model_len": 120, "kv_memory": "600KB", "max_num_rows": 32, "depth": 2}
    tokens = random_tokens(count=200).tolist()
    for kind in ("windows", "whole"):
        if kind == "whole":
            monkeypatch.setattr(LayerGroups, "of", lambda windows, length: LayerGroups.single(len(windows)))
        with LLM(cases["gemma3"].path, **options) as llm:
            plans = noted(llm.engine._scheduler)
            found = llm.generate([tokens[i : i + 100] for i in range(32)], PLAIN)
            assert all(len(done.token_ids) == COUNT for done in found)
        most[kind] = max(plan.num_decodes for plan in plans)
    assert most == {"windows": 11, "whole": 3}


def noted(scheduler: Scheduler) -> list[Plan]:
    """The plans that the scheduler makes from now on."""
    plans: list[Plan] = []
    promise = scheduler._promise

    def note(*args: Any) -> Plan:
        plans.append(promise(*args))
        return plans[-1]

    scheduler._promise = note  # type: ignore[method-assign]
    return plans
