"""Engine options: each value is checked here, and checked against the model when the engine is built.

Owns names, defaults, help texts and limits. The command line and `LLM` both read them from here.
Environment variables are read in this file only: `GAPLESS_LOG` (a logging level), `CXX` (the compiler of the native
step), `XDG_CACHE_HOME` (the cache of compiled libraries), `GAPLESS_API_KEY` (a key of the server),
`OTEL_EXPORTER_OTLP_ENDPOINT` (the collector of traces), `XDG_STATE_HOME` (the history of `gapless chat`), `NO_COLOR`
and `TERM` (whether a terminal shows colours), `CUDA_VISIBLE_DEVICES` (the GPUs of tensor parallel ranks), and nothing
else.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gapless.errors import ConfigError

GPU = "cuda"
DEVICES = ("auto", GPU, "cpu")
MAX_DEPTH = 8
_POSITIVE = {
    "max_batch_tokens": 2**20,
    "max_num_rows": 2**16,
    "num_blocks": 2**31 - 1,
    "max_model_len": 2**31 - 1,
    "num_threads": 1024,
    "tensor_parallel": 1024,
}
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine. Immutable, and each value is valid once it exists."""

    model: str = _option("smollm2", "name, directory, GGUF file or hub id of the model")
    device: str = _option("auto", "where to run: auto, cuda or cpu")
    dtype: str = _option("auto", "auto, bfloat16, float16 or float32")
    depth: int | Literal["auto"] = _option(
        "auto", "steps in flight: 1 is synchronous, 2 a double buffer, auto measures"
    )
    kv_dtype: Literal["auto", "fp8"] = _option(
        "auto", "type of the KV cache: auto (that of the weights; float32 on CPU), or fp8: 8 bits, for more blocks"
    )
    block_size: int = _option(16, "tokens in a block of the KV cache")
    num_blocks: int | None = _option(None, "blocks in the KV cache; default: as many as fit into kv_memory")
    kv_memory: int | str | None = _option(None, "size of the KV cache, such as 2GiB; default: part of the free memory")
    max_batch_tokens: int | None = _option(None, "most tokens in a step (512 on CPU, 8192 on GPU)")
    max_num_rows: int | None = _option(None, "most requests that run at the same time (128 on CPU, 256 on GPU)")
    max_step_time: float = _option(
        0.2, "target in seconds for the longest step while a request streams: splits prompts into chunks; 0 is no limit"
    )
    max_model_len: int | None = _option(
        None, "most tokens of a request, prompt and output together; default: the model's limit, up to 1048576"
    )
    seed: int = _option(0, "seed from which requests without a seed get theirs")
    load_format: Literal["auto", "dummy"] = _option("auto", "auto, or dummy: random weights from a config.json")
    quantization: Literal["auto", "none", "fp8"] = _option(
        "auto", "auto: weights as the checkpoint stores them; fp8: 8 bits for the matrices of layers; none: made whole"
    )
    prefix_cache: bool = _option(True, "reuse the KV cache of common prompt prefixes")
    batch_invariant: bool = _option(False, "same bits for a request in any batch (slower on a GPU)")
    attention: str = _option("auto", "on a GPU: auto (the fastest installed), triton, flash3 or flashinfer")
    num_threads: int | None = _option(None, "CPU threads of the model; default: one per core")
    tensor_parallel: int = _option(
        1, "ranks that hold the model together, each with a GPU, or a share of the CPU, of its own"
    )
    rank_timeout: float = _option(120.0, "seconds after which a rank that does not answer ends its group")
    ranks_on_ray: str | None = _option(
        None, "have a Ray cluster place the ranks: HOST:PORT of its head, local, or auto; rank 0 stays in this process"
    )
    rank_placement: Literal["strict_pack", "pack", "spread"] = _option(
        "strict_pack", "nodes for ranks_on_ray: strict_pack (one alone), pack (as few as possible) or spread"
    )
    native: bool = _option(True, "run CPU steps as one native call; needs a C++ compiler")
    check: bool = _option(False, "check every overlap of streams and every invariant (slow)")
    record: bool = _option(True, "record the times of every step, and why the device idled")
    allow_special_tokens: bool = _option(False, "recognize special tokens in the text of chat messages")
    trace: str | bool | None = _option(None, "write the timeline to this file, T.json, and to T.html, at the end")
    interleave: int | None = _option(None, "seed for a random order of streams that the events allow (CPU, slow)")

    def __post_init__(self) -> None:
        _choice("device", self.device, DEVICES)
        _choice("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _choice("attention", self.attention, ("auto", "triton", "flash3", "flashinfer"))
        _choice("load_format", self.load_format, ("auto", "dummy"))
        _choice("quantization", self.quantization, ("auto", "none", "fp8"))
        _choice("rank_placement", self.rank_placement, ("strict_pack", "pack", "spread"))
        if self.ranks_on_ray is not None and (not isinstance(self.ranks_on_ray, str) or not self.ranks_on_ray):
            raise ConfigError(f"ranks_on_ray must be HOST:PORT, local or auto, got {self.ranks_on_ray!r}")
        if self.rank_placement != "strict_pack" and self.ranks_on_ray is None:
            raise ConfigError(f"rank_placement {self.rank_placement}: Ray places ranks with ranks_on_ray alone")
        _choice("kv_dtype", self.kv_dtype, ("auto", "fp8"))
        if self.depth != "auto":
            _integer("depth", self.depth, 1, MAX_DEPTH)
        _integer("block_size", self.block_size, 1, 1024)
        for name, high in _POSITIVE.items():
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1, high)
        if self.ranks_on_ray is not None and self.tensor_parallel == 1:
            raise ConfigError("ranks_on_ray: there is one rank; use tensor_parallel, or leave it out")
        _seconds("max_step_time", self.max_step_time)
        _seconds("rank_timeout", self.rank_timeout)
        if self.rank_timeout == 0:
            raise ConfigError("rank_timeout must be above 0: nobody waits for ever")
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


def set_kernel_cache(folder: str) -> None:
    """Have Triton keep compiled kernels in this folder, in this process and in those that it starts."""
    os.environ["TRITON_CACHE_DIR"] = folder


def see_one_gpu(place: int) -> None:
    """Let this process see the GPU at this place alone, among those that its parent sees."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[place] if place < len(seen) else str(place)


def see_gpus(names: Sequence[str]) -> None:
    """Let this process see these GPUs alone. Has no effect once it uses one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def log_level() -> str:
    """The level at which the command line logs."""
    return os.environ.get("GAPLESS_LOG", "WARNING").upper()


def compilers() -> tuple[str, ...]:
    """C++ compilers to look for, best first."""
    chosen = os.environ.get("CXX")
    return (chosen,) if chosen else ("c++", "g++", "clang++")


def cache_dir() -> Path:
    """The folder for files that can be made again."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "gapless"


def state_dir() -> Path:
    """The folder for files that are kept from run to run, and are no results."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "gapless"


def wants_colour() -> bool:
    """Whether a terminal may be sent colours."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def api_key() -> str | None:
    """A key that clients of the server must send."""
    return os.environ.get("GAPLESS_API_KEY") or None


def trace_endpoint() -> str | None:
    """The collector of OpenTelemetry traces; None: no traces."""
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
