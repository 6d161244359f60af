"""Checked access to the keys of config.json or of GGUF metadata: an error names the file, the key and the value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapless.errors import CorruptModel
from gapless.models.files import INT32_MAX, shown

_FLOAT32_MAX = 3.4e38


class Keys:
    """One mapping. A key whose value is null counts as missing."""

    def __init__(
        self, raw: Mapping[str, Any], where: str | Path, prefix: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        """prefix: of all keys of the mapping; names: how those are called there whose name differs."""
        self.raw, self.where, self._prefix, self._names = raw, where, prefix, names or {}

    def renamed(self, names: Mapping[str, str]) -> "Keys":
        """The same, with more keys whose name differs in the mapping."""
        return Keys(self.raw, self.where, self._prefix, {**names, **self._names})

    @property
    def is_gguf(self) -> bool:
        """Whether these are metadata of a GGUF."""
        return bool(self._prefix)

    def full(self, key: str) -> str:
        """The name of a key in the mapping."""
        return self._prefix + self._names.get(key, key)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(self.full(key))
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """Whether the key is there and says that there is nothing."""
        return self.full(key) in self.raw and self.raw[self.full(key)] is None

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
            raise CorruptModel(f"{self.where}: the key {self.full(key)} is missing")
        if type(value) not in (int, float) or not 0 < value < _FLOAT32_MAX:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def numbers(self, key: str) -> list[float]:
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list of numbers")
        for item in value:
            if type(item) not in (int, float) or not 0 < item < _FLOAT32_MAX:
                raise self.wrong(key, "a list of positive numbers")
        return [float(item) for item in value]

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value > INT32_MAX:
            raise self.wrong(key, f"a whole number up to {INT32_MAX}", value)
        return int(value)

    def count(self, key: str, default: int) -> int:
        """A size that may be 0."""
        return 0 if type(self.get(key)) is int and self.get(key) == 0 else self.size(key, default)

    def wrong(self, key: str, expected: str, value: object = None) -> CorruptModel:
        found = self.get(key, value)
        return CorruptModel(f"{self.where}: {self.full(key)} is {shown(found)}, not {expected}")
