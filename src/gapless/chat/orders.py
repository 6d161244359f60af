"""Commands of a conversation: lines that begin with a slash.

Owns their names, their help and what each does to a session.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapless.chat.dialogue import load, save
from gapless.errors import InvalidRequest

if TYPE_CHECKING:
    from gapless.chat.session import Session

_SETTING = re.compile(r"(\w+)=")


@dataclass(frozen=True, slots=True)
class Order:
    """A command."""

    usage: str
    text: str
    run: Callable[[Session, str], None]


def obey(session: Session, line: str) -> None:
    """Run the command of a line. Raises InvalidRequest."""
    name, _, rest = line.partition(" ")
    head, *more = name.split("\n", 1)  # a command whose text begins on the next line
    order = ORDERS.get(ALIASES.get(head, head))
    if order is None:
        close = difflib.get_close_matches(head, [*ORDERS, *ALIASES], n=1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
        raise InvalidRequest(f"unknown command {head}; {hint} A message that begins with a slash is typed with two.")
    order.run(session, " ".join([*more, rest]).strip())


def _help(session: Session, rest: str) -> None:
    width = max(len(order.usage) for order in ORDERS.values())
    lines = [f"{order.usage:<{width}}  {order.text}" for order in ORDERS.values()]
    session.screen.tell("\n".join([*lines, "", *KEYS]))


def _system(session: Session, rest: str) -> None:
    if rest:
        session.dialogue.system = None if rest == "none" else rest
    session.screen.note(f"system message: {session.dialogue.system or 'none'}")


def _clear(session: Session, rest: str) -> None:
    session.dialogue.forget()
    session.screen.note("(a new conversation; the system message stays)")


def _retry(session: Session, rest: str) -> None:
    if not session.dialogue.take_back_answer():
        raise InvalidRequest("there is no question to answer again")
    session.answer()


def _undo(session: Session, rest: str) -> None:
    if not session.dialogue.take_back_question():
        raise InvalidRequest("there is nothing to take back")
    session.screen.note(f"(taken back; {len(session.dialogue.turns)} messages remain)")


def _params(session: Session, rest: str) -> None:
    if rest:
        session.set_params(_changed(session.params, rest))
    shown = " ".join(f"{name}={json.dumps(value)}" for name, value in session.params.items())
    session.screen.note(f"parameters: {shown or 'defaults'}")


def _changed(params: dict[str, Any], rest: str) -> dict[str, Any]:
    """Parameters after `name=value ...`; a value is JSON or a word, and a name without one has its default again."""
    changed = dict(params)
    while rest:
        found = _SETTING.match(rest)
        if found is None:
            raise InvalidRequest(f"write name=value, or name= for the default; got {rest.split()[0]!r}")
        value, rest = _value(rest[found.end() :])
        if value == "":
            changed.pop(found[1], None)
        else:
            changed[found[1]] = value
    return changed


def _value(text: str) -> tuple[Any, str]:
    """The value at the beginning of a text, and the rest after it."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        end = 0
    if end == 0 or not (text[end:] == "" or text[end].isspace()):
        value = "" if text[:1].isspace() else text.split(maxsplit=1)[0] if text else ""
        end = len(value)
    return value, text[end:].lstrip()


def _show(session: Session, rest: str) -> None:
    for message in session.dialogue.messages:
        session.screen.note(f"{message['role']}:")
        session.screen.tell(message["content"] or json.dumps(message.get("tool_calls")))
    if not session.dialogue.messages:
        session.screen.note("(nothing was said yet)")


def _tools(session: Session, rest: str) -> None:
    lines = [f"{tool.name}: {tool.description or 'no description'}" for tool in session.tools]
    session.screen.note("\n".join(lines) or "no tools; --tools FILE names some")


def _stats(session: Session, rest: str) -> None:
    session.screen.note(f"{session.partner.description}\nlast answer: {session.figures or 'none yet'}")


def _save(session: Session, rest: str) -> None:
    if not rest:
        raise InvalidRequest("/save needs the name of a file")
    session.screen.note(f"saved to {save(rest, session.dialogue, session.params)}")


def _load(session: Session, rest: str) -> None:
    if not rest:
        raise InvalidRequest("/load needs the name of a file")
    dialogue, params = load(rest)
    session.set_params(params)
    session.dialogue = dialogue
    session.screen.note(f"loaded {rest}: {len(dialogue.messages)} messages")


def _exit(session: Session, rest: str) -> None:
    session.leave()


ORDERS = {
    "/help": Order("/help", "show this list", _help),
    "/system": Order("/system [TEXT]", "show or set the system message; none removes it", _system),
    "/clear": Order("/clear", "begin a new conversation", _clear),
    "/retry": Order("/retry", "answer the last question again", _retry),
    "/undo": Order("/undo", "take the last question and its answer back", _undo),
    "/params": Order("/params [NAME=VALUE ...]", "show or set sampling parameters; NAME= is the default", _params),
    "/tools": Order("/tools", "list the tools that the model may call", _tools),
    "/show": Order("/show", "show the conversation", _show),
    "/stats": Order("/stats", "show the model, and sizes and speed of the last answer", _stats),
    "/save": Order("/save FILE", "write the conversation to a file, as a line for `gapless run`", _save),
    "/load": Order("/load FILE", "go on with a conversation from a file", _load),
    "/exit": Order("/exit", "leave; Ctrl-D does too", _exit),
}
ALIASES = {"/?": "/help", "/regenerate": "/retry", "/quit": "/exit", "/bye": "/exit", "/reset": "/clear"}
KEYS = (
    "Ctrl-C stops an answer. A backslash at the end of a line continues the message on the next line.",
    'Three quotes (""") open a message of several lines, and three quotes close it.',
)
NAMES = (*ORDERS, *ALIASES)
