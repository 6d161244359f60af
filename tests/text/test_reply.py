"""The form of replies, from a tokenizer: special tokens in the text, and prompts that open the reasoning."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from gapless.text.deltas import WholeReply
from gapless.text.parts import TokenizerParts
from gapless.text.reply import find_reply_format
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools.base import Tool
from gapless.text.transcript import Transcript

SPECIAL = ("</s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]")
TEMPLATE = "{{ tools }}{{ messages }}[TOOL_CALLS]name[ARGS]"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(TokenizerParts(backend, None, "</s>", chat_template=TEMPLATE))


def test_tags_that_are_special_tokens_are_read(tokenizer: Tokenizer) -> None:
    format = find_reply_format(tokenizer)
    assert format.tools.name == "mistral-args"
    assert format.reasoning is not None
    assert format.reasoning.name == "mistral"
    tokens = tokenizer.encode('[THINK]hm[/THINK]ok[INST][TOOL_CALLS]f[ARGS]{"a": 1}</s>')

    def reply(*tools: Tool) -> WholeReply:
        found = WholeReply()
        shown = format.shown_ids(tokenizer, with_tools=bool(tools))
        transcript = Transcript(tokenizer, shown=shown)
        parser = format.parser(tools, is_reasoning=False)
        for token in tokens:
            found.add(parser.push(transcript.take([token]).text))
        found.add(parser.push(transcript.take([], "stop").text))
        found.add(parser.finish())
        return found

    called = reply(Tool("f", {}))
    assert (called.reasoning, called.content) == ("hm", "ok")
    assert [(call.name, call.arguments) for call in called.calls] == [("f", '{"a": 1}')]
    plain = reply()
    assert (plain.reasoning, plain.content, plain.calls) == ("hm", 'okf{"a": 1}', [])


@pytest.mark.parametrize(
    ("prompt", "begun", "is_open"),
    [
        ("a[THINK]", "", True),
        ("a[THINK]\n\n", "", True),
        ("a[THINK]hm", "", False),
        ("a[THINK][/THINK]", "", False),
        ("a", "[THINK]well, ", True),
        ("a", "[THINK]well[/THINK] so", False),
        ("", "", False),
    ],
)
def test_a_prompt_may_open_the_reasoning(tokenizer: Tokenizer, prompt: str, begun: str, is_open: bool) -> None:
    format = find_reply_format(tokenizer)
    assert format.is_reasoning(tokenizer, tokenizer.encode("x" * 100 + prompt), begun) is is_open
    none = find_reply_format(tokenizer, reasoning="none")
    assert none.is_reasoning(tokenizer, tokenizer.encode(prompt), begun) is False


def test_a_template_can_be_replaced(tokenizer: Tokenizer) -> None:
    other = tokenizer.with_template("{{ tools }}<tool_call></think>")
    assert find_reply_format(other).tools.name == "hermes"
    assert find_reply_format(other, "json", "seed").tools.name == "json"
    assert tokenizer.chat_template == TEMPLATE
    assert other.encode("[INST]a") == tokenizer.encode("[INST]a")
