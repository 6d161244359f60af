"""Bodies made from the OpenAPI schema, right and wrong: the server answers each of them, as it says it would."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from servers import Server

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/state")


def operations(server: Server) -> dict[str, Any]:
    """What the server says of itself, by path."""
    raw = json.loads(server.get("/openapi.json")[1])
    raw["paths"] = {path: raw["paths"][path] for path in PATHS}
    schema = schemathesis.openapi.from_dict(raw)
    return {path: next(iter(schema[path].values())) for path in PATHS}


def fuzz(server: Server, path: str, max_examples: int) -> None:
    strategy = operations(server)[path].as_strategy()
    common: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}

    @settings(max_examples=max_examples, database=None, **common)
    @given(case=strategy)
    def run(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)

    run()
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("path", PATHS)
def test_bodies_from_the_schema(server: Server, path: str) -> None:
    fuzz(server, path, 15)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_many_bodies_from_the_schema(server: Server, path: str) -> None:
    fuzz(server, path, 400)
