"""Errors as the OpenAI API tells them: a status, and an object with message, type, param and code.

Knows no engine. Every answer of the server that is not a success goes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from gapless.errors import CorruptModel, InvalidRequest, PromptTooLong, TemplateBusy

TEMPLATE_RETRY_S = 1
_encode = msgspec.json.Encoder().encode
_TYPE = re.compile(r"str|int|constrained-.*|.*\[.*\]")  # a type in the place of a finding, no name of a parameter


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)


def timed_out() -> ApiError:
    return ApiError(408, "the request took longer than its timeout", code="timeout")


def first_finding(errors: Sequence[Mapping[str, Any]]) -> tuple[tuple[str | int, ...], str]:
    """The place and the text of pydantic's first finding.

    Where a value may have one of several types, pydantic has a finding for each, with the type in the place. The one
    that looked deepest into the value is told, without the type; of equally deep ones, all.
    """
    places = [tuple(part for part in error["loc"] if not _TYPE.fullmatch(str(part))) for error in errors]
    related = [place for place in places if place[: len(places[0])] == places[0]]
    deepest = max(related, key=len)
    texts = dict.fromkeys(str(error["msg"]) for error, place in zip(errors, places, strict=True) if place == deepest)
    first, *others = texts
    return deepest, " or ".join([first, *(text.removeprefix("Input should be ") for text in others)])


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object."""
    return {"error": {"message": message, "type": _kind(status), "param": param, "code": code}}


def error_response(error: ApiError) -> Response:
    return Response(dump(error.body), error.status, error.headers, "application/json")


def dump(value: Any) -> bytes:
    """JSON that can always be sent: lone surrogates, which clients may have sent us, stay escaped."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), default=msgspec.json.decode).encode("ascii")


async def dump_early(value: Any) -> msgspec.Raw:
    """A part of an answer, dumped before the rest: others have their turn afterwards."""
    data = msgspec.Raw(dump(value))
    await asyncio.sleep(0)
    return data


def _kind(status: int) -> str:
    known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    if status >= 500:
        return "server_error"
    return known.get(status, "invalid_request_error")


@contextlib.contextmanager
def refused(text: str = "prompt") -> Iterator[None]:
    """Turn errors into what the client is told. `text`: what the client calls its prompt or its messages."""
    try:
        yield
    except (InvalidRequest, CorruptModel) as error:
        raise _refusal(error, text) from None


def _refusal(error: InvalidRequest | CorruptModel, text: str) -> ApiError:
    named = error.param if isinstance(error, InvalidRequest) else None
    param = text if named in (None, "prompt", "messages") else named
    if isinstance(error, TemplateBusy):
        return ApiError(503, str(error), param=param, code="template_busy", retry_after_s=TEMPLATE_RETRY_S)
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(400, str(error), param=param, code=code)
