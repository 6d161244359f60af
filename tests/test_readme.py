"""The README keeps its word: short, its Python runs, its commands parse, its figures are measured, its links
lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gapless.cli import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 150


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Arguments of every call of a program in the shell blocks."""
    calls = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    return [call[1:] for call in calls if call and call[0] == program]


def test_is_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks("python")
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", commands("gapless"), ids=" ".join)
def test_command_parses(arguments: list[str]) -> None:
    assert callable(build_parser().parse_args(arguments).handler)


def test_every_command_is_shown() -> None:
    shown = {call[0] for call in commands("gapless")}
    assert shown == {"run", "generate", "trace", "compare", "info", "check", "compile", "serve", "bench", "chat"}
    assert {call[1] for call in commands("gapless") if call[0] == "bench"} == {
        "accuracy",
        "host",
        "offline",
        "serve",
        "structured",
    }


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [call[0] for call in commands("make")] == ["run", "test"]
    for call in commands("make"):
        assert re.search(rf"^{call[0]}:", makefile, flags=re.MULTILINE)


def test_prompt_lines_are_valid() -> None:
    from gapless.core.params import SamplingParams
    from gapless.formats.base import Line
    from gapless.prompt_file import read_lines

    lines = [line for block in blocks("json") for line in read_lines(block.encode().split(b"\n"))]
    assert lines
    for line in lines:
        assert isinstance(line, Line), line
        SamplingParams.from_dict(line.params)


def test_results_are_those_of_the_benchmarks() -> None:
    benchmarks = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    results = README.split("## Results")[1].split("\n## ")[0]
    rows = [line.split("|")[2:-1] for line in results.splitlines() if line.startswith("|")][2:]
    figures = [cell.strip(" *‡") for row in rows for cell in row]
    assert len(figures) >= 3 * 11
    for figure in filter(None, figures):
        assert re.search(rf"[|(] ?{re.escape(figure)}(?: \||,| s\)|$)", benchmarks), figure


PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = re.findall(r"`([a-z_0-9/.]+\.(?:py|h|cpp|toml|yaml))`", text)
    assert len(files) > 30
    for file in files:
        assert (ROOT / file).exists() or (ROOT / "src/gapless" / file).exists(), file
