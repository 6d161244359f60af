"""The compiler: kept grammars, limits, and hostile sources, each in seconds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from gapless.core.structured import read_structured
from gapless.errors import CompilerBusy, InvalidRequest
from gapless.guides import compiler as module
from gapless.guides import grammar as grammar_module
from gapless.guides.compiler import Compiler
from gapless.guides.grammar import Grammar
from gapless.guides.vocabulary import Vocabulary

PATIENCE_S = 20.0


@pytest.fixture(name="compiler")
def compiler_fixture(vocabulary: Vocabulary) -> Any:
    made = Compiler(lambda: vocabulary)
    yield made
    made.close()


def start(compiler: Compiler, **spec: Any) -> Future[Grammar]:
    return compiler.start(read_structured(spec))


def test_a_source_is_compiled_once(compiler: Compiler) -> None:
    first, same = start(compiler, regex="a+"), start(compiler, regex="a+")
    assert first is same
    assert start(compiler, regex="b+") is not first
    assert first.result(PATIENCE_S) is same.result(PATIENCE_S)
    assert start(compiler, regex="a+") is first


def test_a_refusal_is_kept_too(compiler: Compiler) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed"):
            start(compiler, regex="(").result(PATIENCE_S)
    assert compiler.num_compiled == 0


def test_only_so_many_are_kept(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    first = start(compiler, regex="a")
    second = start(compiler, regex="b")
    assert start(compiler, regex="a") is first  # used again, so that the other one is the oldest
    start(compiler, regex="c")
    assert start(compiler, regex="a") is first
    assert start(compiler, regex="b") is not second


def test_automata_with_much_memory_are_dropped(
    compiler: Compiler, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vocabulary.bytes is not None
    shapes = [read_structured({"choice": [f"{number}"]}) for number in range(3)]
    futures = [compiler.start(shape) for shape in shapes]
    mask = np.empty(vocabulary.num_words, np.int32)
    for future in futures:
        future.result(PATIENCE_S).guide().fill(mask)
    assert compiler.start(shapes[0]) is futures[0]  # used again, so that the second one is the oldest
    monkeypatch.setattr(module, "MAX_STATE_BYTES", vocabulary.bytes.num_state_bytes - 1)
    start(compiler, choice=["more"]).result(PATIENCE_S)
    assert compiler.start(shapes[0]) is futures[0]
    assert compiler.start(shapes[2]) is futures[2]
    assert compiler.start(shapes[1]) is not futures[1]


def stick(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Sources that have "slow" are compiled once the event is set."""
    stuck = threading.Event()

    def slow(compiler: Compiler, structured: Any) -> Grammar:
        if "slow" in structured.text:
            stuck.wait(PATIENCE_S)
        return Grammar(structured, vocabulary)

    monkeypatch.setattr(Compiler, "_compile", slow)
    return stuck


def test_one_that_takes_too_long_is_refused_and_others_go_on(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = stick(vocabulary, monkeypatch)
    compiler = Compiler(lambda: vocabulary, time_limit_s=0.2)
    waiting = [start(compiler, regex=f"(?i)slow{i}") for i in range(4)]
    for future in waiting:
        with pytest.raises(InvalidRequest, match="seconds to compile"):
            future.result(PATIENCE_S)
    assert start(compiler, regex="(?i)quick").result(PATIENCE_S)
    stuck.set()
    compiler.close()


def test_one_that_only_waited_is_not_blamed(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal because of others says nothing about the grammar: the next time it is compiled."""
    monkeypatch.setattr(module, "MAX_THREADS", 2)
    stuck = stick(vocabulary, monkeypatch)
    compiler = Compiler(lambda: vocabulary, time_limit_s=0.1)
    blockers = [start(compiler, regex=f"(?i)slow{i}") for i in range(2)]
    waiting = start(compiler, regex="(?i)quick")
    with pytest.raises(InvalidRequest, match="try again"):
        waiting.result(PATIENCE_S)
    assert isinstance(waiting.exception(), CompilerBusy)
    stuck.set()
    assert start(compiler, regex="(?i)quick").result(PATIENCE_S)
    with pytest.raises(InvalidRequest, match="seconds to compile"):  # this one is to blame
        start(compiler, regex="(?i)slow0").result(PATIENCE_S)
    assert start(compiler, regex="(?i)slow0") is blockers[0]
    compiler.close()


def test_time_spent_waiting_is_not_time_to_compile(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take longer than the limit, each of them does not."""

    def slow(compiler: Compiler, structured: Any) -> Grammar:
        time.sleep(0.7)
        return Grammar(structured, vocabulary)

    monkeypatch.setattr(module, "NUM_THREADS", 1)
    monkeypatch.setattr(Compiler, "_compile", slow)
    compiler = Compiler(lambda: vocabulary, time_limit_s=1.0)
    for future in [start(compiler, regex=f"(?i){text}") for text in "ab"]:
        assert future.result(PATIENCE_S)
    compiler.close()


def test_time_to_load_is_not_time_to_compile(vocabulary: Vocabulary) -> None:
    """The first grammar of a process may wait for a library that is built; that is not its fault."""

    def load() -> Vocabulary:
        time.sleep(0.9)  # longer than it may compile, and than it may wait
        return vocabulary

    compiler = Compiler(load, time_limit_s=0.5)
    assert start(compiler, regex="a").result(PATIENCE_S)
    compiler.close()


def test_more_matchers_keep_nobody_waiting(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled one at a time, and not at all where one takes long."""
    monkeypatch.setattr(grammar_module, "MAX_MATCHERS", 4)
    later: list[Any] = []
    grammar = Grammar(read_structured({"regex": "a+"}), vocabulary, later.append)
    for _ in range(2):
        grammar.guide()
    for number in range(2, 5):
        (job,) = later
        later.clear()
        job()
        assert len(grammar._matchers) == number
    assert later == []
    monkeypatch.setattr(grammar_module, "SLOW_S", 0.0)
    slow = Grammar(read_structured({"regex": "b+"}), vocabulary, later.append)
    for _ in range(3):
        slow.guide()
    assert later == []


def test_the_vocabulary_is_loaded_once_and_its_failure_is_told(vocabulary: Vocabulary) -> None:
    loads: list[int] = []

    def load() -> Vocabulary:
        loads.append(1)
        if len(loads) == 1:
            raise InvalidRequest("no tokenizer", "structured")
        return vocabulary

    compiler = Compiler(load)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        start(compiler, regex="a").result(PATIENCE_S)
    for text in ("b", "c"):
        start(compiler, regex=text).result(PATIENCE_S)
    assert len(loads) == 2
    compiler.close()


def test_a_grammar_in_use_gets_more_matchers(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one matcher wait for each other."""
    monkeypatch.setattr(grammar_module, "MAX_MATCHERS", 3)
    grammar = start(compiler, regex="(?i)a+").result(PATIENCE_S)
    guides = [grammar.guide() for _ in range(6)]
    deadline_s = time.monotonic() + PATIENCE_S
    while len(grammar._matchers) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert len({guide.taken()[1] for guide in guides}) == 3


def test_a_grammar_that_reached_a_limit_is_compiled_again(compiler: Compiler) -> None:
    """Its automaton is shared by all guides, and stays as large as it is."""
    first = start(compiler, regex="(?i)ab")
    guide = first.result(PATIENCE_S).guide()
    with pytest.raises(InvalidRequest):
        guide.advance(np.array([5, 6], np.int32))
    assert start(compiler, regex="(?i)ab") is not first
    assert start(compiler, regex="(?i)ab").result(PATIENCE_S).is_spent is False


def chain(length: int) -> dict[str, Any]:
    """A schema whose references double with every step: 2 ** length leaves if they were written out."""
    defs: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"},
            "additionalProperties": False,
        }
        for i in range(length)
    }
    return {"$defs": defs | {f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "an optional letter, very often": {"regex": "a?" * 8000},
    "repetitions of repetitions": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}b"},
    "the letter before the last thousand": {"regex": "(a|b)*a(a|b){1000}"},
    "a doubling chain of references": {"json_schema": chain(2500)},
    "a long chain of rules": {
        "grammar": "start: b0\n" + "\n".join(f"b{i}: b{i + 1}" for i in range(8000)) + '\nb8000: "x"'
    },
    "rules that double": {
        "grammar": "start: b0\n" + "\n".join(f"b{i}: b{i + 1} b{i + 1}" for i in range(50)) + '\nb50: "x"'
    },
    "alternatives that multiply": {
        "json_schema": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(6)]} for i in range(7)]}
    },
    "an enum as large as allowed": {"json_schema": {"enum": [f"v{i}" for i in range(40_000)]}},
    "an optional symbol, very often": {"grammar": "start: " + "a? " * 8000 + '\na: "x"'},
    "letters repeated twice": {"grammar": 'start: A\nA: ("a"{1000}){1000}'},
    "thousands of optional properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(3000)}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_are_compiled_or_refused_within_seconds(compiler: Compiler, name: str) -> None:
    began_s = time.monotonic()
    future = start(compiler, **HOSTILE[name])
    while not future.done():  # this thread goes on meanwhile: the interpreter lock is not held
        before_s = time.monotonic()
        time.sleep(0.001)
        assert time.monotonic() - before_s < 1.0
    assert time.monotonic() - began_s < PATIENCE_S
    if (error := future.exception()) is not None:
        assert isinstance(error, InvalidRequest)
