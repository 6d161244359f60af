"""The output of a response as it grows: its items, and the events that tell of them.

Parts of a reply in, events out. Reasoning, text and calls are items of their own, one open at a time. Knows the wire
format of responses, not where the parts come from.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from gapless.text.deltas import CallArguments, CallBegin, Content, Reasoning, ReplyDelta

ItemEvent = tuple[str, dict[str, Any]]  # its type, and its fields but for the sequence number
Entries = Sequence[dict[str, Any]]  # log-probabilities


class OutputItem(Protocol):
    """One item of the output, while it is written."""

    def begin(self, place: dict[str, Any]) -> Iterator[ItemEvent]: ...

    def end(self, place: dict[str, Any]) -> Iterator[ItemEvent]: ...

    def told(self, status: str) -> dict[str, Any]: ...


class OutputItems:
    """All items of one response."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self.entries: list[dict[str, Any]] = []  # log-probabilities that the next text brings along

    def add(self, delta: ReplyDelta) -> Iterator[ItemEvent]:
        match delta:
            case Reasoning(text):
                yield from self._open_text("reasoning")
                yield from self._write(text)
            case Content(text):
                yield from self._open_text("message")
                yield from self._write(text)
            case CallBegin(_, id, name):
                yield from self._begin(CallItem(id, name))
            case CallArguments(_, text):
                yield from self._write(text)

    def finish(self, status: str) -> Iterator[ItemEvent]:
        """The reply ends. One with nothing in it still has a message, which is empty."""
        if self._open is None and not self.done:
            yield from self._open_text("message")
        if self.entries and isinstance(self._open, TextItem) and self._open.kind == "message":
            yield from self._write("")
        yield from self._end(status)

    def _open_text(self, kind: str) -> Iterator[ItemEvent]:
        if not isinstance(self._open, TextItem) or self._open.kind != kind:
            yield from self._begin(TextItem(kind))

    def _begin(self, item: OutputItem) -> Iterator[ItemEvent]:
        yield from self._end("completed")
        self._open = item
        yield "response.output_item.added", {"output_index": len(self.done), "item": item.told("in_progress")}
        yield from item.begin({"output_index": len(self.done)})

    def _write(self, text: str) -> Iterator[ItemEvent]:
        place = {"output_index": len(self.done)}
        match self._open:
            case TextItem(kind="message") as item:
                entries, self.entries = self.entries, []
                yield item.write(text, place, entries)
            case TextItem() | CallItem() as item:
                yield item.write(text, place)

    def _end(self, status: str) -> Iterator[ItemEvent]:
        if self._open is not None:
            index, item, self._open = len(self.done), self._open, None
            yield from item.end({"output_index": index})
            self.done.append(item.told(status))
            yield "response.output_item.done", {"output_index": index, "item": self.done[-1]}


class TextItem:
    """A message, or reasoning."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._id = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}"
        self._event = "output_text" if kind == "message" else "reasoning_text"
        self._texts: list[str] | None = None  # None: no part yet
        self._entries: list[dict[str, Any]] = []

    def begin(self, place: dict[str, Any]) -> Iterator[ItemEvent]:
        self._texts = []
        yield "response.content_part.added", {**self._place(place), "part": self._part()}

    def write(self, text: str, place: dict[str, Any], entries: Entries = ()) -> ItemEvent:
        assert self._texts is not None
        self._texts.append(text)
        self._entries.extend(entries)
        return f"response.{self._event}.delta", {**self._place(place), "delta": text, **self._scores(entries)}

    def end(self, place: dict[str, Any]) -> Iterator[ItemEvent]:
        place, part = self._place(place), self._part()
        yield f"response.{self._event}.done", {**place, "text": part["text"], **self._scores(self._entries)}
        yield "response.content_part.done", {**place, "part": part}

    def told(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "type": self.kind, "status": status}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | own | {"content": [] if self._texts is None else [self._part()]}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._event, "text": "".join(self._texts or ())}
        return part | {"annotations": [], "logprobs": self._entries} if self.kind == "message" else part

    def _place(self, place: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": self._id, **place, "content_index": 0}

    def _scores(self, entries: Entries) -> dict[str, Any]:
        """In events they come without the bytes."""
        if self.kind != "message":
            return {}
        return {"logprobs": [_without_bytes(entry) for entry in entries]}


class CallItem:
    """A call of a tool."""

    def __init__(self, call_id: str, name: str) -> None:
        self._id = f"fc_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []

    def begin(self, place: dict[str, Any]) -> Iterator[ItemEvent]:
        return iter(())

    def write(self, text: str, place: dict[str, Any]) -> ItemEvent:
        self._arguments.append(text)
        return "response.function_call_arguments.delta", {"item_id": self._id, **place, "delta": text}

    def end(self, place: dict[str, Any]) -> Iterator[ItemEvent]:
        told = {"name": self._name, "arguments": "".join(self._arguments)}
        yield "response.function_call_arguments.done", {"item_id": self._id, **place, **told}

    def told(self, status: str) -> dict[str, Any]:
        call = {"call_id": self._call_id, "name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": "function_call", "status": status, **call}


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    top = [{name: value for name, value in each.items() if name != "bytes"} for each in entry["top_logprobs"]]
    return {name: value for name, value in entry.items() if name != "bytes"} | {"top_logprobs": top}
