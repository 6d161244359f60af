"""Checked access to the keys of config.json or of GGUF metadata: an error names the file, the key and the value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapless.errors import CorruptModel
from gapless.models.files import INT32_MAX, shown

_FLOAT32_MAX = 3.4e38


class Keys:
    """One mapping. A key whose value is null counts as missing."""

    def __init__(self, raw: Mapping[str, Any], where: str | Path, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(self.prefix + key)
        return default if value is None else value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return value

    def string(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise CorruptModel(f"{self.where}: the key {self.prefix}{key} is missing")
        if type(value) not in (int, float) or not 0 < value < _FLOAT32_MAX:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value > INT32_MAX:
            raise self.wrong(key, f"a whole number up to {INT32_MAX}", value)
        return int(value)

    def wrong(self, key: str, expected: str, value: object = None) -> CorruptModel:
        found = self.get(key, value)
        return CorruptModel(f"{self.where}: {self.prefix}{key} is {shown(found)}, not {expected}")
