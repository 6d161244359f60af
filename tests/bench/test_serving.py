"""`gapless bench serve`: loads come from their seed, numbers mean what they say, and a real run leaves its files."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapless.bench import idle
from gapless.bench.idle import between, format_idle
from gapless.bench.load import make_load, read_range
from gapless.bench.openai_client import Endpoint, Sample, complete
from gapless.bench.own_server import engine_flags
from gapless.bench.waits import format_part, format_summary, split, spread, summarize
from gapless.bench.workload_jobs import SHAPES, WORKLOADS
from gapless.cli import build_parser, engine_options, main
from gapless.errors import ConfigError


def arguments(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "serve", *flags])


def test_the_load_comes_from_its_seed() -> None:
    args = arguments("--requests", "200", "--rate", "50", "--input-length", "3-9", "--output-length", "4")
    load = make_load(args, 100)
    assert load == make_load(args, 100)
    assert load != make_load(arguments("--requests", "200", "--rate", "50", "--load-seed", "1"), 100)
    assert {len(str(ask.prompt).split()) for ask in load} == set(range(3, 10))
    assert {ask.max_tokens for ask in load} == {4}
    delays = [ask.delay_s for ask in load]
    assert delays == sorted(delays)
    assert 2.5 < delays[-1] < 6.0  # 200 arrivals at 50 a second
    ids = make_load(arguments("--requests", "5", "--prompts", "ids"), 97)
    assert all(isinstance(ask.prompt, list) and max(ask.prompt) < 97 for ask in ids)


@pytest.mark.parametrize("text", ["0", "5-3", "a", "3-", "-4", ""])
def test_a_wrong_range(text: str) -> None:
    if text == "3-":
        assert read_range("--x", text) == (3, 3)
        return
    with pytest.raises(ConfigError, match="--x must be N or LOW-HIGH"):
        read_range("--x", text)


def sample(due_s: float, first_s: float, end_s: float, tokens: int, error: str | None = None) -> Sample:
    return Sample(due_s, first_s, end_s, 10, tokens, [first_s, end_s], error)


def test_only_the_most_frequent_errors_are_shown() -> None:
    samples = [sample(0, 0, 0, 0, f"no {i // 2}") for i in range(19)] + [sample(0, 0, 0, 0, "never") for _ in range(3)]
    found = summarize(samples, slo_ttft_ms=200, slo_tpot_ms=150)
    lines = format_summary(found, "limits").splitlines()
    assert [line.partition(": ")[0] for line in lines if line.startswith("error")] == ["error, 3 times"] + [
        "error, 2 times"
    ] * 4
    assert lines[-1] == "and 6 other errors; --json has all of them"


def test_the_numbers_mean_what_they_say() -> None:
    samples = [sample(0, 0.1, 1.1, 11), sample(1, 1.5, 2.0, 6), sample(2, 2.1, 4.0, 2), sample(3, 3, 3, 0, "no")]
    found = summarize(samples, slo_ttft_ms=200, slo_tpot_ms=150)
    assert (found.num_requests, found.num_errors, found.errors) == (4, 1, {"no": 1})
    assert found.seconds == 4.0
    assert found.output_tokens_per_s == 19 / 4
    assert found.ttft_ms["max"] == pytest.approx(500)
    assert found.tpot_ms["p50"] == pytest.approx(100)
    assert found.whole_ms["mean"] == pytest.approx((1100 + 1000 + 2000) / 3)
    assert found.good_share == 0.25  # the second was late at first, the third later, the fourth failed
    assert found.goodput_per_s == 0.25


def test_the_first_answers_are_reported_on_their_own() -> None:
    samples = [sample(0, 0.5, 4, 2), sample(0, 0.1, 1, 2), sample(0, 0.2, 2, 2), sample(1, 1.1, 3, 2)]
    parts = split(samples, 2, 1000, 1000)
    assert [part.num_requests for part in parts.values()] == [2, 2]
    assert [part.seconds for part in parts.values()] == [2.0, 2.0]  # by the end of the second, and from there on
    assert format_part("first", parts["first"]) == "first 2: 1.00 requests/s; ms to the first token: p50 200, p99 200"
    assert set(split(samples, 9, 1000, 1000)) == {"first"}


def test_a_workload_is_a_load() -> None:
    args = arguments("--workload", "X")
    work = WORKLOADS["X"]
    load = make_load(args, 49152)
    assert [ask.prompt for ask in load] == work.prompts()
    assert [ask.max_tokens for ask in load] == work.counts()
    assert {ask.delay_s for ask in load} == {0.0}
    assert make_load(arguments("--workload", "X", "--requests", "5"), 49152) == load[:5]
    delays = [ask.delay_s for ask in make_load(arguments("--workload", "X", "--rate", "50"), 49152)]
    assert delays[0] == 0.0
    assert delays == sorted(delays)
    assert 18 < delays[-1] < 23  # 1024 arrivals at 50 a second


def test_a_workload_is_served_by_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "num_requests": 6,
        "prompt_tokens": 20,
        "max_tokens": 5,
        "least_prompt": 4,
        "least_answer": 2,
        "num_rows": 2,
    }
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 32, "intermediate_size": 64, "vocab_size": 31000}  # fmt: skip
    monkeypatch.setitem(WORKLOADS, "X", replace(WORKLOADS["X"], **small))
    monkeypatch.setitem(SHAPES, "0.6B-49k", {**SHAPES["0.6B-49k"], **tiny})
    flags = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "64", "--depth", "2", "--concurrency", "3"]
    path = tmp_path / "x.json"
    assert main(["bench", "serve", "--workload", "X", "--first", "2", "--idle", *flags, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "6 requests in" in out
    assert "\nfirst 2: " in out
    assert "\nlater 4: " in out
    assert "device idle with work to do:" in out
    found = json.loads(path.read_text())
    assert found["summary"]["output_tokens"] == sum(WORKLOADS["X"].counts())
    assert (found["first"]["num_requests"], found["later"]["num_requests"]) == (2, 4)
    assert main(["bench", "serve", "--workload", "X", "--requests", "1", *flags]) == 0
    assert "1 requests in" in capsys.readouterr().out


def test_idle_time_with_nothing_to_run_does_not_count() -> None:
    before = {"nothing to run": 5.0, "host: fill": 1.0, "copy late": 1.0}
    served = between(before, {"nothing to run": 9.0, "host: fill": 1.2, "copy late": 1.0, "new": 0.1}, 10.0)
    assert served.by_cause == pytest.approx({"host: fill": 0.2, "new": 0.1})
    assert served.share == pytest.approx(0.03)
    text = format_idle(served=served, offline=between(before, before, 10.0))
    assert "3.00% served, 0.00% offline, +3.00 points" in text
    assert "host: fill" in text


def test_percentiles() -> None:
    found = spread([i / 1000 for i in range(100, 0, -1)])
    assert found == pytest.approx({"mean": 50.5, "p50": 51, "p90": 91, "p99": 100, "max": 100})
    assert spread([]) == {}


def test_the_engine_options_reach_the_server() -> None:
    flags = ["--model", "x", "--depth", "2", "--no-prefix-cache", "--kv-memory", "1GiB"]
    options = engine_options(arguments(*flags))
    assert engine_options(build_parser().parse_args(["serve", *engine_flags(options)])) == options


async def _answer(data: bytes) -> Sample:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        return await complete(Endpoint.from_url(f"http://127.0.0.1:{port}/v1"), {}, 0.0, 10.0)


USAGE = b'{"prompt_tokens": 3, "completion_tokens": 7}'
STREAM = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [], "usage": ' + USAGE + b"}"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (OK + b"\r\n" + STREAM + b"\n\ndata: [DONE]\n\n", None),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n" + b"%x\r\n%b\r\n" % (len(STREAM) - 5, STREAM[5:])
         + b"10\r\n\n\ndata: [DONE]\n\n\r\n0\r\n\r\n", None),
        (OK + b"\r\n" + STREAM, "ended before"),
        (OK + b'\r\ndata: {"error": {"message": "broke"}}\n\n', "broke"),
        (b"HTTP/1.1 429 Too Many\r\n\r\nslow down", "status 429: slow down"),
        (b"nonsense", "bytes"),
        (b"", "bytes"),
    ],
    ids=range(7),
)  # fmt: skip
def test_any_servers_stream_is_read(answer: bytes, error: str | None) -> None:
    found = asyncio.run(_answer(answer))
    if error is None:
        assert (found.error, found.num_output_tokens, found.num_prompt_tokens, len(found.chunk_s)) == (None, 7, 3, 1)
    else:
        assert error in (found.error or "")


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (
        (["--url", "ftp://x"], "--url must be like"),
        (["--url", "http://127.0.0.1:1"], "does not list its models"),
        (
            ["--workload", "L"],
            "--workload: unknown or not greedy: 'L'; known: A, B, C, D, E, F, G, H, I, M, N1, N8, Q1, Q32, X",
        ),
        (["--workload", "X", "--requests", "1025"], "--requests: workload X has 1024, got 1025"),
        (["--workload", "X", "--model", "m"], "--model does not go with --workload"),
        (["--workload", "X", "--input-length", "8"], "--input-length does not go with --workload"),
        (["--workload", "X", "--output-length", "8"], "--output-length does not go with --workload"),
        (["--first", "-1"], "--first must be at least 0"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--url", "http://x", "--idle"], "leave --url out"),
        (["--rate", "-1"], "--rate must be a number above 0"),
        (["--rate", "nan"], "--rate must be a number above 0"),
        (["--timeout", "0"], "--timeout must be a number above 0"),
        (["--slo-ttft", "inf"], "--slo-ttft must be a number above 0"),
        (["--plot", "/"], "it is a folder"),
        (["--url", "127.0.0.1:8000"], "--url must be like"),
        (["--url", "http://127.0.0.1:x"], "Port could not be cast"),
        (["--url", "http://[::1"], "Invalid IPv6 URL"),
    ):
        assert main(["bench", "serve", *flags]) == 2
        assert words in capsys.readouterr().err


def test_a_whole_run(tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(tiny_dir), "--device", "cpu", "--dtype", "float32", "--num-blocks", "512", "--depth", "2"]
    load = [
        "--requests",
        "12",
        "--concurrency",
        "4",
        "--input-length",
        "8",
        "--output-length",
        "10",
        "--prompts",
        "ids",
    ]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"), "--idle", "--prompts", "ids"]
    assert main(["bench", "serve", *flags, *load, *files]) == 0
    out = capsys.readouterr().out
    assert "12 requests in" in out
    assert "\nidle: " in out
    assert "device idle with work to do:" in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["summary"]["output_tokens"] == 120
    assert found["summary"]["prompt_tokens"] == 96
    assert set(found["idle"]) == {"served", "offline"}
    assert all(0 <= run["share"] <= 1 for run in found["idle"].values())
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_an_engine_that_was_not_heard_of_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between ready and the first pulse of an engine, a server cannot tell its time."""
    times = iter([None, None, 1.0, 1.1, 9.0])

    async def fetch(endpoint: Endpoint, path: str) -> dict[str, Any]:
        return {"running": 0, "waiting": 0, "engine_time_s": next(times), "idle_s": {"launch": 0.5}}

    monkeypatch.setattr(idle, "fetch", fetch)
    assert asyncio.run(idle._settled(Endpoint("127.0.0.1", 1, False, ""))) == {"launch": 0.5}
    assert next(times, None) is None
