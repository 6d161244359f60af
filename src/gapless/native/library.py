"""The native library: built with the machine's own compiler on first use, kept in the user's cache, called by ctypes.

Owns the build, its key in the cache, and the C signatures. Without a compiler there is no library, and a reason.
Knows nothing of models or steps.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from gapless.config import cache_dir, compilers
from gapless.errors import CapacityError, NativeUnavailable

SOURCES = Path(__file__).parent
STEP, AUTOMATON = "step", "automaton"  # each is a source, and a library of its own
FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
BUILD_TIME_S = 300.0  # past this a compiler is taken to hang
PARTS = (
    *("EMBEDDING", "POSITIONS", "HEAD", "LAST_NORM", "LAST_NORM_BIAS"),
    *("FIRST_NORM", "FIRST_NORM_BIAS", "SECOND_NORM", "SECOND_NORM_BIAS", "FIRST_AFTER", "SECOND_AFTER"),
    *("QKV", "OUT", "GATE", "UP", "DOWN", "Q_NORM", "K_NORM", "SINKS"),
    *("ROUTER", "EXPERT_GATE", "EXPERT_UP", "EXPERT_DOWN"),
)  # model.h has the same list
WEIGHTS = ("FLOAT32", "BFLOAT16", "QUANTIZED")  # step.cpp has the same list


class CShape(Structure):
    """model.h"""

    _fields_ = [
        *((name, c_int32) for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim", "inner_size", "tied", "head_norm", "layer_norm", "norm_before")),
        *((name, c_int32) for name in ("norm_after", "parallel", "gated", "activation")),
        *((name, c_int32) for name in ("num_experts", "num_chosen", "shared_size", "shares_of_all", "num_positions")),
        *((name, c_float) for name in ("eps", "last_eps", "embedding_scale", "logit_cap")),
    ]


class CLayerShape(Structure):
    """model.h"""

    _fields_ = [
        *((name, c_int32) for name in ("rope", "window", "has_sinks")),
        *((name, c_float) for name in ("soft_cap", "scale")),
    ]


class Cache(Structure):
    """attention.h"""

    _fields_ = [
        *((name, c_void_p) for name in ("memory", "groups", "places")),
        *((name, c_int32) for name in ("num_places", "block_size", "num_kv_heads", "head_dim")),
    ]


class Rows(Structure):
    """step.cpp"""

    _fields_ = [
        *((name, c_void_p) for name in ("last_token", "length", "blocks")),
        *((name, c_int64) for name in ("num_groups", "num_rows", "max_blocks")),
    ]


class Rotary(Structure):
    """step.cpp"""

    _fields_ = [("tables", c_void_p), ("num_positions", c_int64)]


class Sizes(Structure):
    """step.cpp"""

    _fields_ = [(name, c_int32) for name in ("max_tokens", "max_samples", "num_threads")]


class CSections(Structure):
    """step.cpp"""

    _fields_ = [
        *((name, c_int32) for name in ("num_decodes", "num_chunk_tokens", "num_chunks", "num_samples")),
        *((name, c_int32) for name in ("num_score_samples", "num_targets", "num_new_blocks")),
    ]


_FAILURES = {
    1: "a token id outside the vocabulary",
    2: "a position beyond the rope table",
    3: "more tokens or samples than the engine has room for",
}
_NO_MEMORY = 4

Signatures = dict[str, tuple[object, list[object]]]  # of each function: result, arguments

SIGNATURES: Signatures = {
    "gapless_model": (c_void_p, [POINTER(CShape), POINTER(CLayerShape), c_int32, c_int32]),
    "gapless_set_matrix": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "gapless_lend_matrix": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int64]),
    "gapless_pack_lent": (c_int32, [c_void_p]),
    "gapless_num_unpacked": (c_int32, [c_void_p]),
    "gapless_set_vector": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int32]),
    "gapless_drop_model": (None, [c_void_p]),
    "gapless_engine": (c_void_p, [c_void_p, *(POINTER(x) for x in (Cache, Rows, Rotary, Sizes))]),
    "gapless_step": (c_int32, [c_void_p, c_void_p, POINTER(CSections), c_void_p, c_void_p]),
    "gapless_predict": (c_int32, [c_void_p, c_int32, c_int32, c_void_p]),
    "gapless_mask": (None, [c_void_p, c_int64, c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64]),
    "gapless_drop_engine": (None, [c_void_p]),
}
AUTOMATON_SIGNATURES: Signatures = {
    "gapless_vocabulary": (c_void_p, [c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32]),
    "gapless_automaton": (c_void_p, [c_void_p, c_int32, c_char_p, c_int64, c_int32]),
    "gapless_walker": (c_void_p, [c_void_p]),
    "gapless_advance": (None, [c_void_p, c_void_p, c_int32, c_void_p]),
    "gapless_fill": (None, [c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_void_p]),
    "gapless_forced": (None, [c_void_p, c_int32, c_void_p, c_void_p]),
    "gapless_automaton_bytes": (c_int64, [c_void_p]),
    "gapless_state_bytes": (c_int64, [c_void_p]),
    "gapless_drop_vocabulary": (None, [c_void_p]),
    "gapless_drop_automaton": (None, [c_void_p]),
    "gapless_drop_walker": (None, [c_void_p]),
}


def check(status: int) -> None:
    """Raise what a status stands for; step.cpp has the same numbers."""
    if status == _NO_MEMORY:
        raise CapacityError("no memory for the native step")
    if status != 0:
        raise RuntimeError(f"the plan holds {_FAILURES[status]}")


@cache
def load_library() -> ctypes.CDLL:
    """The library of steps, built unless the cache has it. Raises NativeUnavailable with the reason."""
    return open_library(build_library(compilers(), _directory()), SIGNATURES)


@cache
def load_automata() -> ctypes.CDLL:
    """The library of automata, likewise."""
    return open_library(build_library(compilers(), _directory(), AUTOMATON), AUTOMATON_SIGNATURES)


@cache
def load_automata_held() -> ctypes.CDLL:
    """The same, for short calls: they keep the interpreter lock, which takes longer to get back than they take."""
    path = build_library(compilers(), _directory(), AUTOMATON)
    return open_library(path, AUTOMATON_SIGNATURES, ctypes.PyDLL)


def _directory() -> Path:
    try:
        return cache_dir()
    except RuntimeError as error:
        raise NativeUnavailable("there is no home directory to keep it in, nor an XDG_CACHE_HOME") from error


@cache
def why_unavailable() -> str | None:
    """Why there is no library; None where there is one."""
    try:
        load_library()
    except NativeUnavailable as error:
        return str(error)
    return None


def build_library(commands: Sequence[str], directory: Path, name: str = STEP) -> Path:
    """Path of a library that fits sources, compiler and processor."""
    compiler = next((found for command in commands if (found := shutil.which(command))), None)
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler ({', '.join(commands)})")
    path = directory / f"{name}-{_key(compiler)}.so"
    try:
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            _compile(compiler, SOURCES / f"{name}.cpp", path)
    except OSError as error:
        raise NativeUnavailable(f"{directory} cannot be written ({error.strerror})") from error
    return path


def open_library(path: Path, signatures: Signatures, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Load it and declare its functions. kind: whether calls keep the interpreter lock."""
    try:
        library = kind(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded ({error})") from error
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Write to a name of our own, then rename: two processes may build at once, and neither sees half a file."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    command = [compiler, *FLAGS, str(source), "-o", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIME_S)
        if done.returncode != 0:
            raise NativeUnavailable(f"{compiler} failed: {_first_error(done.stderr)}")
        Path(name).replace(path)
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"{compiler} took longer than {BUILD_TIME_S:.0f} s") from None
    finally:
        Path(name).unlink(missing_ok=True)


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "without a message")


def _key(compiler: str) -> str:
    """A library is used again only if nothing that went into it differs."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(path.read_bytes())
    digest.update(_output(compiler, "--version"))
    digest.update(_cpu_features().encode())
    return digest.hexdigest()[:20]


def _output(*command: str) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, timeout=BUILD_TIME_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return b""


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("flags", "Features", "model name", "CPU part")
    found = sorted({line for line in lines if line.startswith(kinds)})
    return "\n".join([platform.machine(), platform.processor(), *found])
