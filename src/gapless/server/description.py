"""The part of `/openapi.json` that FastAPI does not find out: statuses and content types as they really are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from gapless.server.answers import ErrorResponse

Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503)
}
STREAM: Responses = {
    200: {"description": "the answer, or with `stream` its events", "content": {"text/event-stream": {}}}
}


def describe(app: FastAPI) -> None:
    """Make the description of a complete application: wrong bodies get status 400 here, never 422."""
    found = app.openapi()
    for path in found["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        found["components"]["schemas"].pop(name, None)
    app.openapi_schema = found
