"""Batch-invariant products, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from gapless.kernels.batch_invariant import (
    FEW_ROWS,
    WIDE_TILES,
    num_parts,
    plain_product,
    sum_width,
    tile_of_many,
    tiling_of_few,
)
from interpreted_dot import mend_dots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter has no bfloat16 products


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


@pytest.mark.parametrize(("num_rows", "columns", "inner"), [(1, 64, 64), (70, 100, 130), (3, 1, 7), (129, 65, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_is_the_product(num_rows: int, columns: int, inner: int, has_bias: bool) -> None:
    x, weight = draw(num_rows, inner), draw(columns, inner, seed=1)
    bias = draw(columns, seed=2) if has_bias else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    tolerance = 3e-2 if ON_GPU else 1e-4
    torch.testing.assert_close(plain_product(x, weight, bias).float(), expected, atol=tolerance * 4, rtol=tolerance)


def test_a_row_is_the_same_alone_and_anywhere_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_dots(monkeypatch)
    x, weight = draw(150, 200), draw(90, 200, seed=1)
    together = plain_product(x, weight)
    for row in (0, 1, 63, 64, 149):
        assert torch.equal(plain_product(x[row : row + 1], weight)[0], together[row])
    assert torch.equal(plain_product(x[17:90], weight), together[17:90])


WEIGHTS = [
    (6144, 4096, False, False),
    (4096, 4096, False, True),
    (12288, 4096, True, False),
    (4096, 12288, False, True),
    (151_936, 4096, False, False),
    (4096, 1024, False, False),
    (1024, 2048, False, True),
    (3072, 1024, True, False),
    (1024, 3072, False, True),
    (2048, 6144, False, True),  # a long one of a small model
    (576, 576, False, True),
    (960, 576, False, False),
]


@pytest.mark.parametrize(("columns", "inner", "gated", "adds"), WEIGHTS)
@pytest.mark.parametrize("ring", [False, True])
def test_the_weight_alone_decides_how_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, columns: int, inner: int, gated: bool, adds: bool, ring: bool
) -> None:
    monkeypatch.setattr("gapless.kernels.batch_invariant.has_ring", lambda: ring)
    parts = num_parts(columns, inner, adds=adds)
    assert (parts > 1) is (adds and inner % 512 == 0)
    for num_rows in range(1, FEW_ROWS + 1):
        tiling = tiling_of_few.__wrapped__(num_rows, columns, inner, gated=gated, adds=adds)
        assert tiling is not None
        assert tiling.kernel != "vector"
        assert tiling.divides(columns, inner)
        assert tiling.splits == parts
        assert tiling.block_m >= num_rows
        if adds:
            assert tiling.block_n == sum_width(columns)
            assert tiling.splits * columns * tiling.block_m <= 2**21


def test_weights_without_tiles_have_none_for_any_number_of_rows() -> None:
    for columns, inner in ((100, 64), (64, 100), (100, 260)):
        assert {tiling_of_few(num_rows, columns, inner) for num_rows in range(1, FEW_ROWS + 1)} == {None}


@pytest.mark.parametrize(
    ("num_rows", "columns", "num_sums", "expected"),
    [
        (8192, 6144, 1, (128, 256)),
        (8192, 12288, 2, (128, 128)),
        (256, 4096, 2, (64, 128)),  # 128 by 128 would leave half of the cores idle
        (65, 1024, 2, (64, 32)),
    ],
)
def test_tiles_of_many_rows_fill_the_cores(
    num_rows: int, columns: int, num_sums: int, expected: tuple[int, int]
) -> None:
    assert tile_of_many(num_rows, columns, num_sums=num_sums) == expected
    assert expected in [tile[:2] for tile in WIDE_TILES]
