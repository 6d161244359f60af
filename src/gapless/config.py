"""Engine options: what a user may set, checked alone here and together with the model when the engine is built.

Owns names, defaults, help texts and limits; the command line and `LLM` both read them from here.
Environment variables are read in this file only: `GAPLESS_LOG` (a logging level), `CXX` (the compiler of the native
step), `XDG_CACHE_HOME` (where what it compiled is kept), `GAPLESS_API_KEY` (of the server),
`OTEL_EXPORTER_OTLP_ENDPOINT` (where traces go), and nothing else.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gapless.errors import ConfigError

DEVICES = ("auto", "cuda", "cpu")
MAX_DEPTH = 8
_POSITIVE = {
    "max_batch_tokens": 2**20,
    "max_num_rows": 2**16,
    "num_blocks": 2**31 - 1,
    "max_model_len": 2**31 - 1,
    "num_threads": 1024,
}
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may set. Immutable, and each value valid once it exists."""

    model: str = _option("smollm2", "name, directory, GGUF file or hub id of the model")
    device: str = _option("auto", "where to run: auto, cuda or cpu")
    dtype: str = _option("auto", "auto, bfloat16, float16 or float32")
    depth: int | Literal["auto"] = _option("auto", "steps in flight: 1 is synchronous, 2 a double buffer; auto tries")
    block_size: int = _option(16, "tokens in a block of the KV cache")
    num_blocks: int | None = _option(None, "blocks in the KV cache; default: what kv_memory holds")
    kv_memory: int | str | None = _option(None, "memory of the KV cache, such as 2GiB; default: part of the free")
    max_batch_tokens: int | None = _option(None, "tokens in a step at most (512 on CPU, 8192 on GPU)")
    max_num_rows: int | None = _option(None, "requests that run at the same time at most (128 on CPU, 256 on GPU)")
    max_step_time: float = _option(
        0.2, "cut prompts so that steps take no more seconds than this while streams run; 0 is no bound"
    )
    max_model_len: int | None = _option(
        None, "prompt and output of a request together at most; default: the model's, up to 1048576"
    )
    seed: int = _option(0, "where the seeds of requests without one come from")
    load_format: Literal["auto", "dummy"] = _option("auto", "auto, or dummy: random weights, needs only a config.json")
    prefix_cache: bool = _option(True, "reuse the KV cache of prompts that begin alike")
    batch_invariant: bool = _option(False, "same bits for a request whoever else is in the batch (slower on a GPU)")
    attention: str = _option("auto", "on a GPU: auto (the fastest installed), triton, flash3 or flashinfer")
    num_threads: int | None = _option(None, "CPU threads of the model; default: one a core")
    native: bool = _option(True, "run CPU steps as one native call, where there is a C++ compiler")
    check: bool = _option(False, "check every overlap of streams and every invariant (slow)")
    record: bool = _option(True, "record what every step took; without it nobody knows when and why the device idled")
    allow_special_tokens: bool = _option(False, "read special tokens in the text of chat messages as such, not as text")
    trace: str | bool | None = _option(None, "write the timeline here (T.json, and T.html beside it) when closed")
    interleave: int | None = _option(None, "a seed: run the streams in any order that events allow (CPU, slow)")

    def __post_init__(self) -> None:
        _choice("device", self.device, DEVICES)
        _choice("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _choice("attention", self.attention, ("auto", "triton", "flash3", "flashinfer"))
        _choice("load_format", self.load_format, ("auto", "dummy"))
        if self.depth != "auto":
            _integer("depth", self.depth, 1, MAX_DEPTH)
        _integer("block_size", self.block_size, 1, 1024)
        for name, high in _POSITIVE.items():
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1, high)
        _seconds("max_step_time", self.max_step_time)
        _integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("prefix_cache", "batch_invariant", "native", "check", "record", "allow_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.interleave is not None:
            _integer("interleave", self.interleave, 0, 2**63 - 1)
        if self.trace is not None and (not isinstance(self.trace, (str, bool)) or self.trace == ""):
            raise ConfigError(f"trace must be the name of a file, or true to record only, got {self.trace!r}")
        if self.trace and not self.record:
            raise ConfigError("trace: there is no timeline to write without record")
        if self.kv_memory is not None:
            parse_bytes("kv_memory", self.kv_memory)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineOptions:
        """Build from keyword arguments; an unknown name is an error."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ConfigError(f"unknown option {name!r}{hint}; known: {', '.join(known)}")
        return cls(**values)


def parse_bytes(name: str, value: int | str) -> int:
    """A memory size: a number of bytes, or text such as 512MiB, 2G, 1.5 GiB."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value).lower())
        if match is None:
            raise ConfigError(f"{name} must be a size such as 2GiB or 512MiB, got {value!r}")
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ConfigError(f"{name} must be above 0, got {value!r}")
    return size


def log_level() -> str:
    """The level at which the command line logs."""
    return os.environ.get("GAPLESS_LOG", "WARNING").upper()


def compilers() -> tuple[str, ...]:
    """C++ compilers to look for, best first."""
    chosen = os.environ.get("CXX")
    return (chosen,) if chosen else ("c++", "g++", "clang++")


def cache_dir() -> Path:
    """Where what can be made again is kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "gapless"


def api_key() -> str | None:
    """A key that clients of the server must send."""
    return os.environ.get("GAPLESS_API_KEY") or None


def trace_endpoint() -> str | None:
    """Where OpenTelemetry traces go; none are made without it."""
    return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _seconds(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigError(f"{name} must be a number of seconds, 0 for no bound, got {value!r}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number between {low} and {high}, got {value!r}")
