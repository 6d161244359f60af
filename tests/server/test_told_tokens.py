"""Which tokens an answer tells of, and where: log-probabilities, bytes and offsets against the text; no engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from flights import EOS, PROMPT, TOKENIZER, play, scored
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.server.logprobs import TokenTexts, prompt_starts, tell_logprobs
from gapless.server.protocol import ChatRequest, CompletionRequest
from gapless.text.tokenizer import Tokenizer

TALK: Any = [{"role": "user", "content": "Hello"}]


@dataclass
class Told:
    text: str
    finish_reason: str
    entries: list[dict[str, Any]]
    token_ids: list[int]


def told(body: Any, *args: Any, **options: Any) -> Told:
    """A choice of the answer; a stream's put together from its chunks."""
    found = play(body, *args, **options)
    choices = [choice for chunk in found for choice in chunk["choices"]] if body.stream else found["choices"]
    text, entries, ids = "", [], []
    for choice in choices:
        text += choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""
        ids += choice.get("token_ids", [])
        logprobs = choice["logprobs"] or {}
        entries += logprobs.get("content", [])
        if "tokens" in logprobs:
            pairs = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            entries += [{"token": token, "offset": offset} for token, offset in pairs]
    return Told(text, choices[-1]["finish_reason"], entries, ids)


@st.composite
def flights(draw: st.DrawFn) -> dict[str, Any]:
    """Tokens that end at the end token or at the limit, in bursts, with stop strings."""
    text = draw(st.text("ab😀é", max_size=8))
    tokens = [token for char in text for token in TOKENIZER.encode(char)]
    tokens = tokens[: draw(st.integers(0, len(tokens)))]  # maybe in the middle of a character
    if draw(st.booleans()):
        tokens.insert(draw(st.integers(0, len(tokens))), EOS)  # one that did not end it
    ends = draw(st.booleans())
    tokens = [*tokens, EOS] if ends else tokens or TOKENIZER.encode("a")
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    bursts = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    stop = draw(st.lists(st.text("ab😀", min_size=1, max_size=2), max_size=2))
    return {"bursts": bursts, "reason": "stop" if ends else "length", "stop": stop}


@given(flight=flights(), stream=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_bytes_of_a_chat_are_its_content(flight: dict[str, Any], stream: bool) -> None:
    body = ChatRequest(messages=TALK, logprobs=True, stream=stream)
    found = told(body, **flight, tells_all=False)
    data = b"".join(bytes(entry["bytes"]) for entry in found.entries)
    assert data.decode("utf-8", "replace") == found.text
    if found.finish_reason == "stop" and found.entries:
        assert len(found.entries) < sum(map(len, flight["bursts"])), "the stop token is listed"


@given(flight=flights(), stream=st.booleans(), echo=st.booleans())
@settings(max_examples=300, deadline=None)
def test_offsets_of_a_completion_are_places_in_its_text(flight: dict[str, Any], stream: bool, echo: bool) -> None:
    body = CompletionRequest(prompt=list(PROMPT), logprobs=0, echo=echo, stream=stream)
    found = told(body, **flight, tells_all=True)
    offsets = [entry["offset"] for entry in found.entries]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(found.text) for offset in offsets)
    start = len(TOKENIZER.decode(PROMPT)) if echo else 0
    generated = [token for burst in flight["bursts"] for token in burst]
    for index, offset in enumerate(offsets[len(PROMPT) if echo else 0 :]):
        shown = TOKENIZER.decode(generated[:index]).rstrip("\ufffd")
        assert offset == start + min(len(shown), len(found.text) - start)


@given(flight=flights())
@settings(max_examples=200, deadline=None)
def test_a_stream_tells_the_tokens_of_the_whole_answer(flight: dict[str, Any]) -> None:
    for kind, tells_all in ((ChatRequest, False), (ChatRequest, True), (CompletionRequest, True)):
        question: Any = {"messages": TALK, "logprobs": True} if kind is ChatRequest else {"prompt": "a", "logprobs": 0}
        whole, stream = (
            told(kind(**question, stream=stream, return_token_ids=True), **flight, tells_all=tells_all)
            for stream in (False, True)
        )
        assert whole == stream
        if tells_all:
            assert len(whole.entries) == len(whole.token_ids)


def test_a_completion_lists_its_stop_token() -> None:
    """Harnesses that ask for one token beside the prompt's drop the last entry."""
    body = CompletionRequest(prompt="a", logprobs=0)
    found = told(body, [[*TOKENIZER.encode("a"), EOS]], "stop", tells_all=True)
    assert found.entries == [{"token": "a", "offset": 0}, {"token": "</s>", "offset": 1}]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_names_by_id(stream: bool) -> None:
    tokens = [*TOKENIZER.encode("é"), EOS]
    question: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream}
    for body in (
        ChatRequest(messages=TALK, logprobs=True, **question),
        CompletionRequest(prompt=list(PROMPT), logprobs=0, **question),
    ):
        found = told(body, [tokens[:1], tokens[1:]], "stop", tells_all=True)
        assert found.token_ids == tokens
        assert [entry["token"] for entry in found.entries] == [f"token_id:{token}" for token in tokens]
        answer = play(body, [tokens], "stop", tells_all=True)
        first = answer[0] if stream else answer
        holder = first if isinstance(body, ChatRequest) else first["choices"][0]
        assert holder["prompt_token_ids"] == list(PROMPT)


def test_log_probabilities_of_a_prompt() -> None:
    expected = [None, {str(PROMPT[1]): {"logprob": -2.0, "rank": 3, "decoded_token": TokenTexts(TOKENIZER).text(6)}}]
    chat = play(ChatRequest(messages=TALK, prompt_logprobs=0), [[7]], "length", tells_all=False)
    assert chat["prompt_logprobs"] == expected
    completion = play(CompletionRequest(prompt="a", prompt_logprobs=0), [[7]], "length", tells_all=True)
    assert completion["choices"][0]["prompt_logprobs"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_echoes_the_assistants_last_words(stream: bool) -> None:
    said: Any = [*TALK, {"role": "assistant", "content": "Well"}]
    for messages, text in ((said, "Wella"), (TALK, "a")):
        body = ChatRequest(messages=messages, echo=True, stream=stream)
        assert told(body, [TOKENIZER.encode("a")], "length", tells_all=False).text == text


def test_usage_so_far_in_each_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for body in (
        ChatRequest(messages=TALK, stream=True, stream_options=options),
        CompletionRequest(prompt="a", stream=True, stream_options=options),
    ):
        chunks = play(body, [TOKENIZER.encode("a"), TOKENIZER.encode("b")], "length", tells_all=False)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert {1, 2} <= set(counts)
        assert chunks[-1]["choices"] == []


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "▁"]
    values = {"model": "llama", "tokens": pieces, "scores": [0.0] * len(pieces), "eos_token_id": 2, "bos_token_id": 1}
    values["token_type"] = [2, 3, 3, *[6] * 256, 1, 1, 1, 1]
    return Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in values.items()})


def test_bytes_of_a_vocabulary_with_spaces_in_front_and_bytes_as_a_fallback() -> None:
    tokenizer = sentencepiece()
    names = ["▁the", "▁cat", "s", "<0xC3>", "<0xA9>", "▁the"]
    tokens = [token for name in names if (token := tokenizer.token_to_id(name)) is not None]
    entries = asyncio.run(tell_logprobs(TokenTexts(tokenizer), list(map(scored, tokens))))
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode() == tokenizer.decode(tokens) == "the catsé the"


def test_special_tokens_of_an_echoed_prompt_take_room() -> None:
    tokens = [*TOKENIZER.encode("é"), EOS, *TOKENIZER.encode("a")]
    assert asyncio.run(prompt_starts(TOKENIZER, tokens)) == [0, 0, 1, 5]
