"""Which run results belong to: its model, its parameters and the content of its input.

Two runs with the same identity give the same results, so one may go on from where the other stopped. No others may.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

UNSET = object()
LONGEST_VALUE = 60  # characters of a value in a message


@dataclass(frozen=True)
class RunIdentity:
    """Settings by name; `input` is the digest of the prompts."""

    values: Mapping[str, Any]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.values), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, earlier: object) -> str:
        """What an earlier run, as read from a file, had otherwise; in words."""
        if not isinstance(earlier, Mapping):
            return "other prompts, model or parameters"
        ours = json.loads(json.dumps(dict(self.values)))
        names = dict.fromkeys((*ours, *earlier))
        told = [_tell(name, earlier.get(name, UNSET), ours.get(name, UNSET)) for name in names]
        return "; ".join(filter(None, told)) or "other prompts, model or parameters"


def _tell(name: str, before: object, now: object) -> str:
    if before == now:
        return ""
    if name == "input":
        return "the prompts have changed"
    return f"{name} was {_value(before)}, now {_value(now)}"


def _value(value: object) -> str:
    if value is UNSET or value is None:
        return "not set"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
