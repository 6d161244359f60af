"""Greedy tokens of SmolLM2 equal those of transformers' `generate`, in float32, however the engine is driven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch

import oracles
from gapless import LLM, SamplingParams
from gapless.models import loader
from gapless.models.source import resolve
from gapless.runner.kits import cpu

COUNT = 24
BATCH = 36  # prompts that transformers takes at a time: all but the longest
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0)
TIE = 1e-4  # a token that wins by less than this is decided by rounding

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "What is the capital of Italy? Answer with one word."}],
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Where is the treasure?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
]
LONG = (
    "The history of computing is longer than the history of computing hardware and modern computing technology, and "
    "includes the history of methods intended for pen and paper or for chalk and slate, with or without the aid of "
    "tables. "
)
TEXTS = [
    "Hi",
    "Paris",
    "Once",
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "Water boils at",
    "The three primary colors are",
    "To be, or not to be,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 2 + 2?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "3.14159265358979",
    "2024-01-01, 2024-01-02, 2024-01-03,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "born": 1815, "languages": [',
    "<html>\n<head>\n<title>",
    "Les sanglots longs des violons de l'automne",
    "Der schnelle braune Fuchs springt über",
    "¿Cuál es la capital de España?",
    "Съешь же ещё этих мягких французских булок",
    "今日はとても良い天気ですね。",
    "人工智能是计算机科学的一个分支",
    "السلام عليكم ورحمة الله",
    "שלום עולם",
    "I love pizza 🍕 and coffee ☕ and",
    "🎉🎉🎉 👩‍👩‍👧‍👦",
    "   leading spaces and\ttabs\t",
    "\n\n\n",
    "    ",
    LONG + "In short,",
    LONG * 2 + "To sum up:",
    LONG * 6 + "In conclusion:",
]


@dataclass(frozen=True)
class Question:
    name: str
    tokens: tuple[int, ...]


@dataclass
class Reference:
    """What transformers says to each question, and how clearly."""

    model: Any
    questions: list[Question]

    @cached_property
    def answers(self) -> list[tuple[int, ...]]:
        found: dict[Question, tuple[int, ...]] = {}
        by_length = sorted(self.questions, key=lambda question: len(question.tokens))
        for start in range(0, len(by_length), BATCH):
            found |= _generate(self.model, by_length[start : start + BATCH])
        return [found[question] for question in self.questions]

    def margin(self, prompt: Sequence[int], so_far: Sequence[int]) -> float:
        """How far the best token lies before the second best after these tokens."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *so_far]])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return best - second


@pytest.fixture(scope="module")
def reference() -> Reference:
    transformers = pytest.importorskip("transformers")
    path = resolve("smollm2").path
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    return Reference(model, questions())


def _generate(model: Any, batch: list[Question]) -> dict[Question, tuple[int, ...]]:
    """Left-padded, as transformers wants it; cut after the end token, as we count it."""
    width = max(len(question.tokens) for question in batch)
    ids = torch.full((len(batch), width), model.generation_config.eos_token_id)
    mask = torch.zeros_like(ids)
    for row, question in enumerate(batch):
        ids[row, width - len(question.tokens) :] = torch.tensor(question.tokens)
        mask[row, width - len(question.tokens) :] = 1
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=COUNT, do_sample=False)
    eos = model.generation_config.eos_token_id
    rows = [row[width:].tolist() for row in out]
    ended = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    return {question: tuple(row) for question, row in zip(batch, ended, strict=True)}


@cache
def questions() -> list[Question]:
    """The prompts as token ids, made by our tokenizer (tests/text compares it with others)."""
    from gapless.text import load_tokenizer
    from gapless.text.chat import ChatTemplate

    tokenizer = load_tokenizer(resolve("smollm2"))
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    texts = [(text[-20:], tokenizer.encode(text)) for text in TEXTS]
    chats = [(talk[-1]["content"], tokenizer.encode(template.render(talk), add_special_tokens=False)) for talk in CHATS]
    return [Question(name, tuple(tokens)) for name, tokens in [*texts, *chats]]


@pytest.fixture(scope="module", autouse=True)
def load_once() -> Iterator[None]:
    """All engines here have the same weights in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "load_model", cache(lambda *args, progress=None, **kw: loader.load_model(*args, **kw)))
        load_native = cpu.load_native
        patch.setattr(cpu, "load_native", cache(lambda *args, progress=None, **kw: load_native(*args, **kw)))
        yield


def make(**options: Any) -> LLM:
    """An engine of 1024 positions: more are not needed, and the rest is memory."""
    return LLM("smollm2", **{"device": "cpu", "dtype": "float32", "max_model_len": 1024, "num_threads": 1} | options)


def ask(llm: LLM, reference: Reference, chosen: Sequence[int] | None = None) -> None:
    """Ask the chosen questions in one batch and compare; a mismatch says how close the tokens were."""
    numbers = list(range(len(reference.questions)) if chosen is None else chosen)
    prompts = [list(reference.questions[n].tokens) for n in numbers]
    problems = []
    for number, completion in zip(numbers, llm.generate(prompts, PARAMS), strict=True):
        found, expected = completion.token_ids, reference.answers[number]
        if found != expected:
            same = next(i for i in range(COUNT) if found[: i + 1] != expected[: i + 1])
            margin = reference.margin(reference.questions[number].tokens, expected[:same])
            kind = "a tie" if margin < TIE else "wrong"
            problems.append(f"{reference.questions[number].name!r} at token {same}: {kind}, margin {margin:.2e}")
    assert not problems, "\n".join(problems)


def test_there_are_enough_questions_and_they_differ(reference: Reference) -> None:
    lengths = [len(question.tokens) for question in reference.questions]
    assert len({question.tokens for question in reference.questions}) == len(reference.questions) >= 32
    assert min(lengths) == 1
    assert max(lengths) > 250
    assert len(set(reference.answers)) > 30


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_all_at_once_with_the_prefix_cache_cold_and_warm(reference: Reference, depth: int) -> None:
    with make(depth=depth) as llm:
        ask(llm, reference)
        cold = llm.stats()
        ask(llm, reference, [31, 32, 33])
        assert (llm.stats() - cold).num_cached_tokens > 300


def test_alone(reference: Reference) -> None:
    with make(depth=2, max_num_rows=1) as llm:
        for number in (0, 13, 26, 33, 36):
            ask(llm, reference, [number])


def test_in_chunks_of_16(reference: Reference) -> None:
    with make(depth=3, max_batch_tokens=16, max_num_rows=16) as llm:
        ask(llm, reference, [*range(0, 31, 3), 31, 33, 34, 37])


@pytest.mark.parametrize("depth", [1, 3])
def test_with_so_few_blocks_that_requests_give_way(reference: Reference, depth: int) -> None:
    with make(depth=depth, num_blocks=20, max_batch_tokens=128) as llm:
        ask(llm, reference, [*range(1, 31, 3), 32, 35, 36])
        assert llm.stats().num_preemptions > 0


def test_checked_and_interleaved(reference: Reference) -> None:
    with make(depth=2, check=True, interleave=7) as llm:
        ask(llm, reference, [0, 14, 22, 27, 34])


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 3, "max_batch_tokens": 16, "num_blocks": 8}])
def test_log_probabilities(reference: Reference, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=0, logprobs=5, prompt_logprobs=3)
    numbers = [3, 13, 26, 31]
    with make(**options) as llm:
        found = llm.generate([list(reference.questions[n].tokens) for n in numbers], params)
        assert ("num_blocks" in options) == (llm.stats().num_preemptions > 0)
    for number, done in zip(numbers, found, strict=True):
        tokens = [*done.prompt_token_ids, *done.token_ids]
        assert done.token_ids == reference.answers[number]
        with torch.inference_mode():
            logits = reference.model(torch.tensor([tokens])).logits[0].numpy()
        given = [*(done.prompt_logprobs or ()), *(done.logprobs or ())]
        assert (len(given), given[0]) == (len(tokens), None)
        for place in range(1, len(tokens)):
            num_top = 3 if place < len(done.prompt_token_ids) else 5
            oracles.check_logprob(given[place], tokens[place], logits[place - 1], num_top, atol=1e-4)
