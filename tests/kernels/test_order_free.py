"""Sums without an order, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl

from gapless.kernels.order_free import embed_and_square, norm_scales, order_free_sum, sum_squares

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _sum_rows(x, out, ROWS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + tl.arange(0, ROWS), order_free_sum(tl.load(x + at), 1))


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), device=DEVICE)
    _sum_rows[(1,)](x, out, ROWS=len(x), SIZE=x.shape[1])
    return out


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("size", [1, 32, 64, 1024])
@pytest.mark.parametrize("factor", [1e-8, 1.0, 3e9])
def test_sums_are_right_and_have_no_order(size: int, factor: float) -> None:
    x = draw(8, size) ** 2 * factor
    found = sum_rows(x)
    torch.testing.assert_close(found, x.double().sum(1).float(), rtol=1e-6, atol=0.0)
    for seed in range(5):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        assert torch.equal(sum_rows(x[:, order].contiguous()), found)


def test_nothing_and_very_little() -> None:
    x = torch.zeros(4, 32, device=DEVICE)
    x[1] = 1e-30
    x[2, 5] = 7.0
    x[3, :2] = torch.tensor([2.0**40, 1.0])
    found = sum_rows(x).tolist()
    assert found[0] == 0.0
    assert 0.0 <= found[1] < 1e-18
    assert found[2:] == [7.0, 2.0**40]


@pytest.mark.parametrize(("size", "width"), [(64, 32), (96, 32), (576, 32), (256, 64), (100, 32)])
def test_squares_and_scales(size: int, width: int) -> None:
    x, num_sums = draw(5, size), -(-size // width)
    squares = torch.full((num_sums + 1, 7), -1.0, device=DEVICE)
    sum_squares(x, squares, width=width, stride=7)
    padded = F.pad(x, (0, num_sums * width - size)).view(5, num_sums, width)
    torch.testing.assert_close(squares[:num_sums, :5], padded.square().sum(2).T, rtol=1e-5, atol=1e-6)
    assert (squares[:, 5:] == -1).all()
    assert (squares[num_sums] == -1).all()
    ids = torch.tensor([3, 0, 3], device=DEVICE)
    again = torch.zeros_like(squares)
    assert torch.equal(embed_and_square(ids, x, again, width=width, stride=7), x[ids])
    assert torch.equal(again[:num_sums, :3], squares[:num_sums, ids])
    expected = torch.rsqrt(x.square().mean(1) + 0.1)
    torch.testing.assert_close(norm_scales(x, 0.1, width=width), expected, rtol=1e-5, atol=0.0)
