"""Logits processors in Python, as their users see them: facts, order, errors, and the page about them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, RowFacts, SamplingParams
from gapless.errors import ConfigError, InvalidRequest
from tiny import CPU, PROMPTS, ids

PAGE = Path(__file__).parent.parent / "docs" / "logits-processors.md"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1, seed=3, ignore_eos=True)


class Processor:
    """Calls a function, and checks what every processor may rely on."""

    def __init__(
        self,
        change: Callable[[torch.Tensor, Sequence[RowFacts]], Any],
        *,
        name: str = "test",
        needs_newest: bool = True,
        applies: Callable[[SamplingParams], bool] = lambda params: True,
    ) -> None:
        self.name, self.needs_newest, self.applies, self._change = name, needs_newest, applies, change
        self.known: dict[str, list[int]] = defaultdict(list)  # generated tokens at each call, by request

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowFacts]) -> Any:
        assert logits.dtype == torch.float32
        assert len(logits) == len(rows) > 0
        for row in rows:
            assert not row.tokens.flags.writeable
            assert row.tokens.min() >= 0, "a placeholder"
            self.known[row.request_id].append(len(row.tokens) - row.num_prompt)
        return self._change(logits, rows)


def no_echo(logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
    """Neither of the two last tokens."""
    for index, row in enumerate(rows):
        logits[index, torch.from_numpy(row.tokens[-2:].copy()).long()] = -torch.inf
    return logits


def open_llm(model: Path, *processors: Any, **options: Any) -> LLM:
    return LLM(model, logits_processors=processors, **CPU | {"check": True} | options)


def tokens_of(model: Path, *processors: Any, params: Any = GREEDY, **options: Any) -> list[tuple[int, ...]]:
    with open_llm(model, *processors, **options) as llm:
        found = llm.generate(PROMPTS, params)
    assert [item.error for item in found] == [None] * len(found)
    return [item.token_ids for item in found]


@pytest.mark.parametrize("native", [True, False])
def test_the_newest_token_is_known_at_any_depth(tiny_dir: Path, native: bool) -> None:
    params = [GREEDY, DRAWN] * len(PROMPTS)
    expected: list[tuple[int, ...]] | None = None
    for options in (
        {"depth": 1},
        {"depth": 2},
        {"depth": 3, "max_num_rows": 3},
        {"depth": 2, "interleave": 4},
        {"depth": "auto"},
    ):
        processor = Processor(no_echo)
        found = tokens_of(tiny_dir, processor, params=params[: len(PROMPTS)], native=native, **options)
        expected = expected or found
        assert found == expected
        for tokens, prompt in zip(found, PROMPTS, strict=True):
            whole = [*ids(prompt)[-2:], *tokens]
            assert all(
                token not in whole[max(0, i - 2) : i] for i, token in enumerate(whole) if i >= len(whole) - len(tokens)
            )
        assert all(counts == list(range(12)) for counts in processor.known.values())
    assert expected != tokens_of(tiny_dir, params=params[: len(PROMPTS)], native=native)


def test_a_processor_without_the_newest_token_keeps_the_depth(tiny_dir: Path) -> None:
    """At depth 3 some tokens are in flight when it is called; what it does without them is right all the same."""
    processor = Processor(lambda logits, rows: logits.negative_(), needs_newest=False)
    assert tokens_of(tiny_dir, processor, depth=3) == tokens_of(tiny_dir, processor, depth=1)
    lags = {max(range(12), key=lambda i: i - counts[i]) for counts in processor.known.values()}
    assert lags - {0}, "every token was known"


def test_only_requests_of_its_own_are_changed(tiny_dir: Path) -> None:
    params = [GREEDY if i % 2 else DRAWN for i in range(len(PROMPTS))]
    processor = Processor(no_echo, applies=lambda params: params.temperature == 0)
    free, changed = (tokens_of(tiny_dir, *some, params=params, depth=2) for some in ((), (processor,)))
    assert [a == b for a, b in zip(free, changed, strict=True) if a] != [True] * len(free)
    assert all(a == b for a, b, p in zip(free, changed, params, strict=True) if p is DRAWN)


def test_they_run_in_order_and_parameters_come_after(tiny_dir: Path) -> None:
    """The second sees what the first left; a bias of the request is added to what the last one left."""
    first = Processor(lambda logits, rows: torch.zeros_like(logits), name="first")
    second = Processor(lambda logits, rows: logits.index_fill(1, torch.tensor([7]), 5.0), name="second")
    assert tokens_of(tiny_dir, first, second) == [(7,) * 12] * len(PROMPTS)
    biased = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logit_bias={9: 10.0})
    assert tokens_of(tiny_dir, first, second, params=biased) == [(9,) * 12] * len(PROMPTS)


def test_the_order_does_not_depend_on_neighbours(tiny_dir: Path) -> None:
    """A request of the second processor alone comes first in the batch; the others have both."""

    def raise_one(logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
        logits[:, 7] += 1000
        return logits

    first = Processor(raise_one, name="first", applies=lambda params: params.temperature == 0)
    second = Processor(lambda logits, rows: -logits, name="second")
    params = [GREEDY if i % 2 else DRAWN for i in range(len(PROMPTS))]
    with open_llm(tiny_dir, first, second) as llm:
        together = [item.token_ids for item in llm.generate(PROMPTS, params)]
        alone = [llm.generate(prompt, each)[0].token_ids for prompt, each in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert not any(7 in tokens for tokens in together[1::2])


def test_log_probabilities_stay_the_models(tiny_dir: Path) -> None:
    scored = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=3)
    with open_llm(tiny_dir) as llm:
        free = llm.generate(PROMPTS[0], scored)[0]
    with open_llm(tiny_dir, Processor(lambda logits, rows: logits.negative_())) as llm:
        changed = llm.generate(PROMPTS[0], scored)[0]
    assert free.logprobs is not None
    assert changed.logprobs is not None
    assert changed.token_ids != free.token_ids
    assert changed.logprobs[0].top == free.logprobs[0].top


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda logits, rows: {}[7], "KeyError: 7"),
        (lambda logits, rows: None, "TypeError: it returned NoneType instead of a tensor"),
        (lambda logits, rows: logits[:, :-1], "ValueError: it returned a tensor"),
        (lambda logits, rows: logits.double(), "torch.float64"),
    ],
)
def test_an_error_fails_its_requests_by_name_and_no_others(
    tiny_dir: Path, change: Callable[..., Any], words: str, native: bool
) -> None:
    params = [GREEDY if i % 2 else DRAWN for i in range(len(PROMPTS))]
    free = tokens_of(tiny_dir, params=params, native=native)
    processor = Processor(change, name="bad", applies=lambda params: params.temperature == 0)
    for depth in (1, 2, 3):
        with open_llm(tiny_dir, processor, depth=depth, native=native) as llm:
            found = llm.generate(PROMPTS, params)
            ledger = llm.engine.monitor.ledger()
            assert llm.generate(PROMPTS[0], DRAWN)[0].error is None
        for item, tokens, wanted in zip(found, free, params, strict=True):
            if wanted is DRAWN:
                assert (item.error, item.token_ids) == (None, tokens)
            else:
                assert (item.finish_reason, item.token_ids) == ("error", ())
                assert item.error is not None
                assert item.error.startswith("logits processor bad failed: ")
                assert words in item.error
        assert ledger["logits processor bad: failures"] >= 1
        assert "step failed" not in ledger


def test_an_error_does_not_reach_the_processors_behind(tiny_dir: Path) -> None:
    """One that cannot bear NaN shares a row with one that failed, and other rows with nobody."""

    def finite(logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
        assert logits.isfinite().all()
        return logits

    bad = Processor(lambda logits, rows: None, name="bad", applies=lambda params: params.temperature == 0)
    params = [GREEDY if i % 2 else DRAWN for i in range(len(PROMPTS))]
    with open_llm(tiny_dir, bad, Processor(finite, name="strict")) as llm:
        found = llm.generate(PROMPTS, params)
    for item, wanted in zip(found, params, strict=True):
        assert (item.finish_reason == "error") == (wanted is GREEDY)
        assert item.error is None or "bad failed" in item.error


def test_the_ledger_counts_calls_and_time(tiny_dir: Path) -> None:
    calls = Counter[str]()

    def count(logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
        calls["all"] += 1
        return logits

    with open_llm(tiny_dir, Processor(count, name="counted")) as llm:
        llm.generate(PROMPTS, GREEDY)
        ledger = llm.engine.monitor.ledger()
    assert ledger["logits processor counted: calls"] == calls["all"] > 0
    assert ledger["logits processor counted: µs"] > 0
    assert "logits processor counted: failures" not in ledger
    assert ledger["two halves: logits processors"] == calls["all"]
    assert 0 < ledger["two halves: behind the step before"] < calls["all"]
    assert "two halves: masks" not in ledger


@pytest.mark.parametrize(
    ("processors", "words"),
    [
        ([object()], "object has no name"),
        ([no_echo], "function has no name"),
        ([Processor(no_echo), Processor(no_echo)], "the name 'test' comes twice"),
        ([type("Lazy", (), {"name": "a", "needs_newest": 1})()], "Lazy has no needs_newest of type bool"),
        ([type("Mute", (), {"name": "a", "needs_newest": True})()], "Mute lacks a method"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_processor_is_refused(tiny_dir: Path, processors: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_llm(tiny_dir, *processors)


def test_a_request_is_refused_where_a_processor_cannot_tell(tiny_dir: Path) -> None:
    def applies(params: SamplingParams) -> bool:
        raise KeyError("what")

    llm = open_llm(tiny_dir, Processor(no_echo, name="torn", applies=applies))
    with llm, pytest.raises(InvalidRequest, match="logits processor torn: KeyError: 'what'"):
        llm.generate(PROMPTS[0], GREEDY)


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    exec(compile(source, PAGE.name, "exec"), {"__name__": "page"})
    said = capsys.readouterr().out.split()
    assert said
    assert all(a != b for a, b in pairwise(said))
