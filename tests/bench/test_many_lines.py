"""The measurement of memory over many lines, over few."""

from __future__ import annotations

import pytest

from gapless.bench.many_lines import main


def test_lines_are_counted_and_memory_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lines", "500"]) == 0
    assert "500 lines in" in capsys.readouterr().out
