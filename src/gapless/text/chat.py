"""Chat messages to prompt text, by the model's own Jinja template.

Knows the form of messages and the functions that transformers offers to templates, so that both render the same text.
Templates come with models and are not trusted: they run in Jinja's immutable sandbox. Does not know tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gapless.errors import CorruptModel, InvalidRequest

_END = "FINAL_MESSAGE_ENDS_HERE "  # its space tells whether the template trims messages


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template: messages, and further values."""

    messages: list[dict[str, Any]]
    extra: Mapping[str, Any]


class ChatTemplate:
    def __init__(self, template: str | None, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self._template = _compile(template) if template is not None else None
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # A missing token must be undefined in the template: None would be written out as "None".
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt text. It already contains the special tokens: encode it with `add_special_tokens=False`.

        With `continue_final_message` it ends where the final message does, so that the model continues it.
        """
        if self._template is None:
            raise InvalidRequest("the model has no chat template; send a plain prompt instead of messages", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        talk = check_messages(messages)
        final = str(talk[-1]["content"])
        if continue_final_message:
            talk[-1]["content"] += _END
        values = {"tools": None, "documents": None, **self._tokens, **extra}
        values |= {"messages": talk, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(values)
        except MemoryError:
            raise InvalidRequest("the chat template needs too much memory for the messages", "messages") from None
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from error
        return _cut_after(final, text) if continue_final_message else text


def _cut_after(final: str, text: str) -> str:
    """A rendering up to its end mark; without the spaces before it if the template trims messages."""
    before, mark, after = text.rpartition(_END.rstrip())
    if not mark or final.strip() not in text:
        message = "continue_final_message: the chat template does not write the final message as it is"
        raise InvalidRequest(message, "continue_final_message")
    return before if after.startswith(" ") else before.rstrip()


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise CorruptModel(f"the model's chat template does not parse: line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError) as error:
        raise CorruptModel("the model's chat template is nested too deeply to be parsed") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages whose content is text. Raises InvalidRequest."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest(f"messages must be a list, not {type(messages).__name__}", "messages")
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _checked_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"{where} must be an object with role and content, not {type(message).__name__}", "messages"
        )
    calls = bool(message.get("tool_calls"))
    for key in ("role", "content"):
        if key not in message and not (calls and key == "content"):
            raise InvalidRequest(f"{where} has no {key}", "messages")
    if not isinstance(message["role"], str):
        raise InvalidRequest(f"{where}.role must be a string, not {type(message['role']).__name__}", "messages")
    content = message.get("content")
    if calls and content is None:
        content = ""
    return {**message, "content": _content(f"{where}.content", content)}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where} must be a string or a list of text parts, not {type(content).__name__}", "messages"
        )
    return "\n".join(_part_text(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(
            f'{where} must be {{"type": "text", "text": ...}}; {kind!r} parts are not supported', "messages"
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string, not {type(part.get('text')).__name__}", "messages")
    return str(part["text"])
