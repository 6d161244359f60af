"""Reasoning at the beginning of a reply, whatever the cuts, and found from the template or the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ConfigError
from gapless.text.deltas import WholeReply
from gapless.text.reasoning import ReasoningCount, find_reasoning
from gapless.text.reply import ReplyFormat
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools.base import Tool
from gapless.text.tools.find import find_format

THINK = find_reasoning(None, lambda tag: False, "think")
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(pieces: Sequence[str], *, is_open: bool = False) -> WholeReply:
    parser = ReplyFormat(find_format(None, "hermes"), THINK).parser([Tool("f", {})], is_reasoning=is_open)
    reply = WholeReply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish())
    for call in reply.calls:
        call.id = ""
    return reply


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content", "num_calls"),
    [
        ("<think>\nhm, well\n</think>\n\nYes.", False, "hm, well", "Yes.", 0),
        ("hm\n</think>\n\nYes.", True, "hm", "Yes.", 0),
        ("  <think></think>Yes.", False, "", "Yes.", 0),
        ("No reasoning, <think> or not", False, "", "No reasoning, <think> or not", 0),
        ("<think>never ends </thi", False, "never ends </thi", "", 0),
        ("<thin", False, "", "<thin", 0),
        (f"<think>{CALL}</think>{CALL}", False, CALL, "", 1),
        (f"{CALL}", False, "", "", 1),
        (f"a b\n</think>\nSo:\n{CALL}", True, "a b", "So:", 1),
    ],
)
def test_a_reply_is_split_at_every_cut(text: str, is_open: bool, reasoning: str, content: str, num_calls: int) -> None:
    whole = read([text], is_open=is_open)
    assert (whole.reasoning, whole.content, len(whole.calls)) == (reasoning, content, num_calls)
    assert read(text, is_open=is_open) == whole
    assert all(read([text[:cut], text[cut:]], is_open=is_open) == whole for cut in range(len(text)))


@given(st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", CALL]), max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_cuts_never_matter(parts: list[str], is_open: bool) -> None:
    text = "".join(parts)
    assert read(parts, is_open=is_open) == read(text, is_open=is_open) == read([text], is_open=is_open)


def test_the_tags_are_found_in_the_template_or_in_the_vocabulary() -> None:
    def found(template: str | None, *tokens: str) -> str | None:
        format = find_reasoning(template, tokens.__contains__)
        return None if format is None else format.name

    assert found("{{ m.content.split('</think>')[-1] }}") == "think"
    assert found(None, "[THINK]", "[/THINK]") == "mistral"
    assert found("{{ messages }}", "<think>") is None
    assert found("<|channel>thought\n<channel|>") == "gemma"
    assert find_reasoning("</think>", lambda tag: True, "none") is None
    with pytest.raises(ConfigError, match="think"):
        find_reasoning(None, lambda tag: False, "thonk")


@pytest.mark.parametrize(
    ("reasoning", "answer", "is_open"),
    [
        ("<think>a b</think>", "\n\nYes", False),
        ("  \n<think></think>", "Yes </think>", False),
        ("a b</think>", "Yes", True),
        ("", "Yes, <think>no</think>", False),
        ("<think>" + "the cat sat. " * 200 + "</think>", "Yes" * 100, False),
        ("<think>never ends", "", False),
        ("", "<thi", False),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_tokens_of_the_reasoning_are_counted(
    reasoning: str, answer: str, is_open: bool, size: int, byte_level: Tokenizer
) -> None:
    assert THINK is not None
    tokenizer = byte_level
    before, after = tokenizer.encode(reasoning), tokenizer.encode(answer)
    tokens = [*before, *after]
    count = ReasoningCount(tokenizer, THINK, is_open=is_open)
    for end in range(size, len(tokens), size):
        assert count.of(tokens[:end]) <= len(before)
    assert count.of(tokens) == count.of(tokens) == len(before)
