"""A short share of the part-file fuzz; and that it finds what it is there to find."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest

from gapless import part_file
from gapless.proof.fuzz import main
from gapless.proof.part_files import Wrong, fuzz_part_files


@pytest.fixture(autouse=True)
def fast_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("part_file", "result_file"):
        monkeypatch.setattr(f"gapless.{module}.sync", lambda descriptor: None)


def test_a_share_of_the_fuzz() -> None:
    counts = fuzz_part_files(20.0, seed=3, most_cases=400)
    assert counts["cases"] == 400
    for outcome in ("resumed", "skipped", "refused", "restarted"):
        assert counts[outcome] > 20, counts


def test_a_case_is_its_seed() -> None:
    assert fuzz_part_files(20.0, seed=4, most_cases=20) == fuzz_part_files(20.0, seed=4, most_cases=20)


def trusting(raw: bytes, seed: int) -> part_file.Record:
    """The mutant: a checksum that is not compared."""
    try:
        found = json.loads(raw[: -part_file.CRC_LENGTH - 1] + b"}")
    except ValueError as error:
        raise part_file._Damage(str(error)) from None
    assert isinstance(found, dict)
    return found


def test_ghost_lines_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        patch.object(part_file, "_unseal", trusting),
        pytest.raises(Wrong, match=r"case 3/\d+: AssertionError: .* is not \(b"),
    ):
        fuzz_part_files(20.0, seed=3)
    with patch.object(part_file, "_unseal", trusting):
        assert main(["--target", "part-files", "--seconds", "20", "--seed", "3"]) == 1
    assert "FAIL: case 3/" in capsys.readouterr().out


def test_a_torn_end_that_is_not_repaired_is_found() -> None:
    def begin(self: part_file.PartFile) -> None:
        if not self._began and self._contents.end == 0:
            self._write(part_file._seal(part_file.to_json({"part_of": self._belongs_to}), 0))
        self._began = True

    with patch.object(part_file.PartFile, "_begin", begin), pytest.raises(Wrong):
        fuzz_part_files(20.0, seed=3)
