"""Templates of offline chats: in a process that is stopped when it takes too long or too much."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from gapless.errors import CorruptModel, InvalidRequest, PromptTooLong
from gapless.text.chat import Conversation
from gapless.text.local_chat import LocalChat
from gapless.text.parts import TokenizerParts
from gapless.text.render_process import RenderProcess, TemplateSource
from gapless.text.tokenizer import Tokenizer

TALK = [{"role": "user", "content": "the </s> cat"}]
MakeChat = Callable[..., tuple[LocalChat, Tokenizer]]


@pytest.fixture
def make(backend: Backend) -> Iterator[MakeChat]:
    made: list[LocalChat] = []

    def make(template: str | None, **options: Any) -> tuple[LocalChat, Tokenizer]:
        tokenizer = Tokenizer(TokenizerParts(backend, "<s>", "</s>", chat_template=template))
        made.append(LocalChat(tokenizer, **options))
        return made[-1], tokenizer

    yield make
    for chat in made:
        chat.close()


def test_encodes_as_the_template_says(make: MakeChat) -> None:
    chat, tokenizer = make("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    ids = chat.encode(TALK, 100)
    assert [id for id in ids if id in tokenizer.special_ids] == [0, 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the </s> cat</s>"


def test_special_tokens_may_be_allowed(make: MakeChat) -> None:
    chat, _ = make("{{ messages[0].content }}", allow_special_tokens=True)
    assert 1 in chat.encode(TALK, 100)


def test_what_a_template_must_not_take(make: MakeChat) -> None:
    with pytest.raises(InvalidRequest, match=r"memory|could not be rendered"):
        make("{{ 'x' * 10 ** 10 }}")[0].encode(TALK, 100)
    with pytest.raises(CorruptModel, match="does not parse"):
        make("{% for %}")[0].encode(TALK, 100)
    with pytest.raises(InvalidRequest, match="no chat template"):
        make(None)[0].encode(TALK, 100)
    with pytest.raises(PromptTooLong):
        make("{{ messages[0].content * 9999 }}")[0].encode(TALK, 100)


def test_a_template_that_never_ends_is_stopped() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    process = RenderProcess(TemplateSource(loops), timeout_s=0.3)
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"longer than 0\.3 s"):
        process.render([Conversation(TALK, {})])
    assert process.pid is None
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("value", [object(), b"x", {1, 2}, 10**5000], ids=["object", "bytes", "set", "number"])
def test_messages_are_what_json_can_hold(make: MakeChat, value: object) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        make("{{ messages[0].content }}")[0].encode([{**TALK[0], "other": value}], 100)


def test_one_process_for_all_and_a_new_one_when_it_died(make: MakeChat) -> None:
    chat, _ = make("{{ messages[0].content }}")
    ids = chat.encode(TALK, 100)
    first = chat._process.pid
    assert chat.encode(TALK, 100) == ids
    assert chat._process.pid == first is not None
    os.kill(first, signal.SIGKILL)
    assert chat.encode(TALK, 100) == ids
    assert chat._process.pid != first
    chat.close()
    assert chat._process.pid is None


def test_many_threads_share_it(make: MakeChat) -> None:
    chat, tokenizer = make("{{ messages[0].content }}")
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = tokenizer.decode(chat.encode([{"role": "user", "content": f"n {number}"}], 100))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"n {number}" for number in range(4)}
