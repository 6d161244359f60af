"""Schemas that Gemma's calls cannot be held to: refused at once, whatever their size."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.errors import InvalidRequest
from gapless.text.tools.find import find_format

STEPS = 14
BOMB = {f"a{n}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 4}} for n in range(STEPS)}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"allOf": [{}]}}},
        {"properties": {"a": {"type": "array", "maxItems": 10**9}}},
        {"properties": {"a": {"type": "array", "minItems": 10**9}}},
        {"properties": {f"p{n}": {"type": "null"} for n in range(5000)}},
        {"properties": {"a": {"$ref": "#"}}},
        {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": {**BOMB, f"a{STEPS}": {"type": "null"}}},
        {"properties": {"a": {"enum": [[1]]}}},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        find_format(None, "gemma").arguments_shape({"type": "object", **schema})
