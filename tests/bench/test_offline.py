"""`gapless bench offline`: wrong arguments are refused before anything is loaded; a small run writes all it should."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gapless.bench import offline
from gapless.cli import build_parser, main
from gapless.errors import ConfigError

SMALL = ["--num-prompts", "3", "--prompt-tokens", "5", "--max-tokens", "4", "--threads", "1", "--rounds", "2"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--prompt-tokens", "-3"], "--prompt-tokens must be at least 1, got -3"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--batch", "4", "0"], "--batch must be at least 1, got 0"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--warmup", "-1"], "--warmup must be at least 0, got -1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--depth", "0"], "depth must be a whole number between 1 and 8, got 0"),
        (["--depth", "deep"], "depth must be"),
        (["--dtype", "int4"], "dtype must be one of auto, bfloat16, float16, float32, got 'int4'"),
        (["--peers", "nobody"], "unknown peer 'nobody'; known: generate, generate_batch"),
        (["--python", "vllm=/no/such/file"], "takes PEER=PATH of an interpreter"),
        (["--python", "nobody=/bin/sh"], "takes PEER=PATH of an interpreter"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
        (["--plot", "/no/such/folder/x.svg"], "no such folder"),
        (["--logs", "/dev/null/logs"], "--logs: cannot be made"),
        (["--kernels"], "--kernels goes with --workload"),
        (["--workload", "D", "--peers", "vllm"], "--peers does not go with --workload"),
        (["--workload", "D", "--json", "/no/such/folder/x.json"], "no such folder"),
        (["--prompt-tokens", "100", "--max-tokens", "100"], "200 tokens a request; .* takes 128 at most"),
    ],
)
def test_wrong_arguments(tiny_dir: Path, flags: list[str], message: str) -> None:
    args = build_parser().parse_args(["bench", "offline", "--model", str(tiny_dir), *flags])
    with pytest.raises(ConfigError, match=message):
        offline.main(args)


def test_a_run_prints_a_table_and_writes_its_files(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.svg"), "--logs", str(tmp_path / "logs")]
    flags = ["--batch", "2", "--depth", "2", "--dtype", "float32", "--warmup", "0", "--peers", "generate", "xllamacpp"]
    assert main(["bench", "offline", "--model", str(tiny_dir), *SMALL, *flags, *files]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["job"]["num_prompts"] == 3
    assert found["machine"]["num_cpus"] >= 1
    check_rows({(row["engine"], row["weights"]): row for row in found["rows"]}, out)
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    assert sorted(path.suffix for path in (tmp_path / "logs").iterdir()) == [".log"] * 3


def check_rows(rows: dict[tuple[str, str], dict[str, Any]], out: str) -> None:
    ours = rows["Gapless depth 2", "fp32"]
    assert ours["error"] is None
    assert ours["overlap"]["depth"] == 2
    assert len(ours["round_s"]) == 2
    assert ours["vs_gapless"] == ours["same_tokens"] == 1.0
    peer = rows["transformers generate", "fp32"]
    assert peer["error"] is None, peer
    assert peer["same_tokens"] == 1.0
    assert "transformers generate" in out
    assert "xllamacpp" in out  # not installed, or not for a directory


def test_a_failure_of_gapless_itself_is_an_exit_code(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_dir / "config.json").read_text())
    assert main(["bench", "offline", "--model", str(broken), *SMALL, "--depth", "1"]) == 1
    assert "failed: Gapless depth 1" in capsys.readouterr().out
