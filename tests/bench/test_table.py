"""Medians, spreads, ratios, and rows that failed."""

from xml.etree import ElementTree

import pytest

from gapless.bench.chart import bar_chart
from gapless.bench.contest import Result
from gapless.bench.job import Contender, Overlap, Round
from gapless.bench.table import chart_groups, format_overlap, format_rows, make_rows

NUM_TOKENS = 100
TOKENS = [[1, 2], [3, 4], [5, 6], [7, 8]]
OURS = Contender("gapless", "Gapless depth 2", "gapless", "gapless", "auto", mode="2")
PEER = Contender("peer", "Peer <1>", "peer", "peer", "fp32")


def result(
    contender: Contender,
    times: tuple[float, ...],
    *,
    batch: int = 16,
    weights: str = "fp32",
    tokens: list[list[int]] | None = TOKENS,
    overlap: Overlap | None = None,
    error: str | None = None,
) -> Result:
    rounds = tuple(Round(time, int(time * 2**20), tokens, overlap) for time in times)
    return Result(contender, batch, weights, "1.0", 0.5, rounds, error)


def test_a_row_has_the_median_round_and_the_spread() -> None:
    (row,) = make_rows([result(OURS, (2.0, 1.0, 5.0))], NUM_TOKENS)
    assert row.seconds == 2.0
    assert (row.tokens_per_s, row.tokens_per_s_min, row.tokens_per_s_max) == (50.0, 20.0, 100.0)
    assert row.round_s == (2.0, 1.0, 5.0)
    assert row.peak_bytes == 5 * 2**20
    assert (row.vs_gapless, row.same_tokens) == (1.0, 1.0)


def test_of_two_rounds_the_slower_counts() -> None:
    (row,) = make_rows([result(OURS, (1.0, 2.0))], NUM_TOKENS)
    assert row.seconds == 2.0


def test_ratios_are_against_gapless_at_the_same_batch_size() -> None:
    results = [
        result(OURS, (1.0,)),
        result(OURS, (0.5,)),
        result(PEER, (4.0,)),
        result(OURS, (8.0,), batch=1),
        result(PEER, (4.0,), batch=1),
    ]
    assert [row.vs_gapless for row in make_rows(results, NUM_TOKENS)] == [1.0, 2.0, 0.25, 1.0, 2.0]


def test_tokens_are_compared_within_the_same_weights() -> None:
    other = [[1, 2], [3, 4], [5, 0], [7, 8]]
    results = [
        result(OURS, (1.0,), weights="bf16"),
        result(OURS, (1.0,), weights="fp32", tokens=other),
        result(PEER, (1.0,), weights="fp32"),
        result(PEER, (1.0,), weights="BF16"),
        result(PEER, (1.0,), weights="Q4_1"),
        result(PEER, (1.0,), weights="fp32", tokens=None),
    ]
    assert [row.same_tokens for row in make_rows(results, NUM_TOKENS)] == [1.0, 1.0, 0.75, 1.0, None, None]


def test_without_gapless_there_is_no_ratio() -> None:
    rows = make_rows([result(OURS, (), error="out of luck"), result(PEER, (1.0,))], NUM_TOKENS)
    assert rows[0].error == "out of luck"
    assert (rows[1].vs_gapless, rows[1].same_tokens) == (None, None)
    assert "Gapless" not in format_rows(rows)


def test_the_table_lines_up() -> None:
    overlap = Overlap(2, 64, 3, 0.987, None)
    rows = make_rows([result(OURS, (1.0,), overlap=overlap), result(PEER, (3.0,))], NUM_TOKENS)
    head, ours, peer = format_rows(rows).splitlines()
    assert head.split()[:4] == ["engine", "weights", "batch", "tok/s"]
    assert len(head) == max(len(ours), len(peer))
    assert "100.0" in ours
    assert peer.endswith("0.33x")
    (line,) = format_overlap(rows).splitlines()[1:]
    assert line.split()[-5:] == ["2", "64", "98.7%", "-", "3"]


@pytest.mark.parametrize("batches", [[16], [1, 8, 16], []])
def test_the_chart_has_a_bar_for_each_row_that_ran(batches: list[int]) -> None:
    results = [result(c, (1.0, 2.0, 3.0), batch=b) for b in batches for c in (OURS, PEER)]
    results.append(result(PEER, (), error="broken"))
    root = ElementTree.fromstring(bar_chart(chart_groups(make_rows(results, NUM_TOKENS)), "A & B", "subtitle"))
    names = [node.tag.rpartition("}")[2] for node in root.iter()]
    assert names.count("rect") == 1 + 2 * len(batches)
    assert names.count("path") == 2 * len(batches)
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    assert texts[0] == "A & B"
    assert ("Peer <1>, fp32" in texts) == bool(batches)
