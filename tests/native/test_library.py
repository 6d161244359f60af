"""The build of the native library: its cache, and the reasons there may be none. Compilers here are small scripts."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from gapless.errors import NativeUnavailable
from gapless.native import library


def compiler(directory: Path, body: str, name: str = "cxx") -> str:
    """A script that says its name for --version, and otherwise does what `body` says; $out is the file to write."""
    script = directory / name
    script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo {name}; exit; fi\nfor out; do :; done\n{body}\n')
    script.chmod(0o755)
    return str(script)


def test_a_library_is_built_once(tmp_path: Path) -> None:
    command = compiler(tmp_path, f'echo x >> {tmp_path}/calls; echo built > "$out"')
    first, second = (library.build_library([command], tmp_path / "cache") for _ in range(2))
    assert first == second
    assert first.read_text() == "built\n"
    assert (tmp_path / "calls").read_text() == "x\n"
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_another_compiler_builds_another_library(tmp_path: Path) -> None:
    paths = {library.build_library([compiler(tmp_path, 'echo > "$out"', name)], tmp_path) for name in ("one", "two")}
    assert len(paths) == 2


def test_the_first_compiler_that_is_there_is_taken(tmp_path: Path) -> None:
    command = compiler(tmp_path, 'echo mine > "$out"')
    assert library.build_library(["/no/such/compiler", command], tmp_path).read_text() == "mine\n"


def test_no_compiler() -> None:
    with pytest.raises(NativeUnavailable, match=r"^no C\+\+ compiler \(/no/such, /nor/such\)$"):
        library.build_library(["/no/such", "/nor/such"], Path("/tmp"))


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    command = compiler(tmp_path, 'echo "note: x" >&2; echo "step.cpp:1: error: boom" >&2; exit 1')
    with pytest.raises(NativeUnavailable, match=r"cxx failed: step.cpp:1: error: boom"):
        library.build_library([command], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailable, match="cannot be written"):
        library.build_library([compiler(tmp_path, "exit 0")], tmp_path / "file")


def test_a_cache_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(NativeUnavailable, match="Permission denied"):
        library.build_library([compiler(tmp_path, "exit 0")], tmp_path)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(NativeUnavailable, match="no home directory"):
        library.load_library.__wrapped__()


def test_a_library_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "step.so"
    path.write_text("text")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        library.open_library(path, library.SIGNATURES)


def test_parts_are_numbered_as_in_the_source() -> None:
    source = (library.SOURCES / "model.h").read_text()
    names = source.split("enum Part {")[1].split("}")[0]
    assert tuple(name.strip() for name in names.split(",")) == library.PARTS


def test_calls_release_the_interpreter_lock() -> None:
    if (reason := library.why_unavailable()) is not None:
        pytest.skip(reason)
    assert not isinstance(library.load_library(), ctypes.PyDLL)
