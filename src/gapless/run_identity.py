"""Which run results belong to: its model, its parameters and the content of its input.

Two runs with the same identity give the same results, so one may go on from where the other stopped. No others may.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

UNSET = object()
CONTENTS = {"input": "the prompts", "model_files": "the files of the model"}  # digests
MODEL_FILES = (".safetensors", ".gguf", ".json", ".jinja", ".model")
SAMPLE_BYTES = 1 << 16
LONGEST_VALUE = 60  # characters of a value in a message


@dataclass(frozen=True)
class RunIdentity:
    """Settings by name; `input` and `model_files` are digests."""

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


def digest_of_model(model: str) -> str | None:
    """Of the files that a model has on this machine; None for a name.

    Samples of each file are enough to tell weights apart, and cost nothing beside loading them.
    """
    place = Path(model)
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
    digest = hashlib.sha256()
    for path in files:
        if path.suffix in MODEL_FILES and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name if place.is_dir() else ''} {size}\n".encode())
            with path.open("rb") as file:
                for begin in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                    file.seek(begin)
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16] if files else None


def _tell(name: str, before: object, now: object) -> str:
    if before == now:
        return ""
    if name in CONTENTS:
        return f"{CONTENTS[name]} have changed"
    return f"{name} was {_value(before)}, now {_value(now)}"


def _value(value: object) -> str:
    if value is UNSET or value is None:
        return "not set"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
