"""Conversations with a partner that is told what to say: commands, errors, what is shown and what is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from partners import DONE, ListedLines, ScriptedPartner, calls, said

from gapless.chat.dialogue import Dialogue
from gapless.chat.orders import ALIASES, ORDERS
from gapless.chat.reply import ReplyEnd
from gapless.chat.screen import Screen
from gapless.chat.session import Session
from gapless.errors import EngineClosed, InvalidRequest, PromptTooLong
from gapless.text.deltas import CallArguments, CallBegin, Content, Reasoning

Captured = pytest.CaptureFixture[str]


def talk(partner: ScriptedPartner, *lines: str) -> Session:
    session = Session(partner, ListedLines(*lines), Screen(colour=True), Dialogue(), {"temperature": 0.7})
    session.run(stoppable=False)
    return session


def test_each_question_is_asked_with_all_that_was_said(capsys: Captured) -> None:
    partner = ScriptedPartner(said("Hel", "lo."), said("Bye.\n"))
    session = talk(partner, "Hi", "", "   ", "And?")
    assert [[message["content"] for message in asked] for asked in partner.asked] == [["Hi"], ["Hi", "Hello.", "And?"]]
    assert partner.params == [{"temperature": 0.7}] * 2
    assert capsys.readouterr().out == "Hello.\nBye.\n"
    assert session.num_errors == 0


def test_without_a_terminal_only_answers_are_on_standard_output(capsys: Captured) -> None:
    answer = [Reasoning("hm"), Reasoning("m"), Content("\x1b[1mYes"), DONE]
    cut = [Content("No"), ReplyEnd("length")]
    talk(ScriptedPartner(answer, cut), "a", "/system x", "b")
    captured = capsys.readouterr()
    assert captured.out == "\x1b[1mYes\nNo\n"
    assert captured.err.splitlines()[:2] == ["hmm", "gapless: system message: x"]
    assert "cut: the answer reached max_tokens" in captured.err


def test_system_clear_undo_and_retry(capsys: Captured) -> None:
    partner = ScriptedPartner(*(said(str(number)) for number in range(5)))
    session = talk(partner, "/system be brief", "a", "/retry", "b", "/undo", "c", "/clear", "/regenerate", "d")
    assert [[message["content"] for message in asked] for asked in partner.asked] == [
        ["be brief", "a"],
        ["be brief", "a"],
        ["be brief", "a", "1", "b"],
        ["be brief", "a", "1", "c"],
        ["be brief", "d"],
    ]
    assert session.num_errors == 1
    assert "no question to answer again" in capsys.readouterr().err


def test_parameters_are_changed_by_name(capsys: Captured) -> None:
    partner = ScriptedPartner(said("a"), said("b"))
    talk(partner, '/params top_k=5 stop=["x"] temperature=', "a", "/params top_k= ignore_eos=true", "b")
    assert partner.params == [{"stop": ["x"], "top_k": 5}, {"stop": ["x"], "ignore_eos": True}]
    assert 'parameters: top_k=5 stop=["x"]' in capsys.readouterr().err


def test_values_of_parameters_may_have_spaces(capsys: Captured) -> None:
    partner = ScriptedPartner(said("a"))
    talk(partner, '/params stop=["a b", "c"] logit_bias={"5": -100} seed= temperature=1e-1', "a")
    assert partner.params == [{"stop": ["a b", "c"], "logit_bias": {"5": -100}, "temperature": 0.1}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/params temprature=1", "did you mean 'temperature'"),
        ("/params temperature=hot", "temperature must be a number"),
        ("/params temperature", "write name=value"),
        ("/params n=2", "n must be 1"),
        ("/params logprobs=2", "logprobs is not shown"),
        ("/sytem x", "did you mean /system?"),
        ("/xyzzy", "/help lists the commands"),
        ("/save", "needs the name of a file"),
        ("/load", "needs the name of a file"),
        ("/load no/such/file", "no such file"),
        ("/save no/such/folder/file", "nothing to save yet"),
        ("/undo", "nothing to take back"),
        ("/retry", "no question"),
    ],
)
def test_a_mistake_is_told_and_changes_nothing(line: str, words: str, capsys: Captured) -> None:
    partner = ScriptedPartner(said("a"))
    session = talk(partner, line, "a")
    assert words in capsys.readouterr().err
    assert session.num_errors == 1
    assert partner.params == [{"temperature": 0.7}]


def test_a_question_that_cannot_be_answered_is_forgotten(capsys: Captured) -> None:
    partner = ScriptedPartner(
        said("1"), [PromptTooLong(8, "9 tokens")], [Content("half"), InvalidRequest("no")], said("2")
    )
    session = talk(partner, "a", "b", "c", "d")
    assert [message["content"] for message in partner.asked[-1]] == ["a", "1", "d"]
    captured = capsys.readouterr()
    assert "9 tokens. /undo takes the last exchange back" in captured.err
    assert captured.out == "1\nhalf\n2\n"
    assert session.num_errors == 2
    assert partner.num_closed == 4


def test_a_dead_engine_ends_the_conversation() -> None:
    with pytest.raises(EngineClosed):
        talk(ScriptedPartner([EngineClosed("died")]), "a", "b")


def test_save_and_load(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "a talk.json"
    partner = ScriptedPartner(said("1"), said("2"), said("3"))
    talk(
        partner, "/system s", "/params top_k=3", "a", f"/save {path}", "/clear", "/params top_k=4", f"/load {path}", "b"
    )
    assert [message["content"] for message in partner.asked[-1]] == ["s", "a", "1", "b"]
    assert partner.params[-1] == {"temperature": 0.7, "top_k": 3}
    assert "loaded" in capsys.readouterr().err


def test_two_slashes_are_one(capsys: Captured) -> None:
    partner = ScriptedPartner(said("a"), said("b"))
    talk(partner, "//etc/hosts", "a // b")
    assert [asked[-1]["content"] for asked in partner.asked] == ["/etc/hosts", "a // b"]


def test_help_show_stats_and_exit(capsys: Captured) -> None:
    partner = ScriptedPartner(said("yes"))
    talk(partner, "/stats", "/show", "a", "/show", "/stats", "/?", "/exit", "b")
    captured = capsys.readouterr()
    assert len(partner.asked) == 1
    for name in ORDERS:
        assert f"\n{name}" in captured.out
    assert "none yet" in captured.err
    assert "nothing was said yet" in captured.err
    assert "7 tokens of conversation, 3 tokens of answer, first after" in captured.err
    assert set(ALIASES.values()) <= set(ORDERS)


def test_results_of_calls_are_typed_and_go_back(capsys: Captured) -> None:
    two = calls(("x", "add", '{"a": 1}'), ("y", "now", "{}"))
    partner = ScriptedPartner([Content("Hm."), *two], calls(("z", "add", "{}")), said("3"), said("bye"))
    talk(partner, "sum?", "2", "noon", '"""three', 'lines"""', "thanks")
    assert partner.asked[2] == [
        {"role": "user", "content": "sum?"},
        {
            "role": "assistant",
            "content": "Hm.",
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "y", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "2"},
        {"role": "tool", "tool_call_id": "y", "content": "noon"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "z", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "z", "content": "three\nlines"},
    ]
    assert capsys.readouterr().out == 'Hm.\n-> add {"a": 1}\n-> now {}\n-> add {}\n3\nbye\n'


def test_half_a_call_and_a_call_without_result_are_forgotten(capsys: Captured) -> None:
    cut = [CallBegin(0, "x", "add"), CallArguments(0, '{"a'), ReplyEnd("length")]
    partner = ScriptedPartner(cut, said("ok"), calls(("x", "add", "{}")))
    session = talk(partner, "a", "b", "c")
    assert partner.asked[1] == [{"role": "user", "content": "b"}]
    assert len(session.dialogue.turns) == 2
    err = capsys.readouterr().err
    assert "raise max_tokens if they were cut" in err
    assert "the input ended before the result of add" in err
