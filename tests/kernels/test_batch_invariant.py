"""Batch-invariant products, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from gapless.kernels.batch_invariant import batch_invariant_product

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
    torch.testing.assert_close(
        batch_invariant_product(x, weight, bias).float(), expected, atol=tolerance * 4, rtol=tolerance
    )


def test_a_row_is_the_same_alone_and_anywhere_in_a_batch() -> None:
    x, weight = draw(150, 200), draw(90, 200, seed=1)
    together = batch_invariant_product(x, weight)
    for row in (0, 1, 63, 64, 149):
        assert torch.equal(batch_invariant_product(x[row : row + 1], weight)[0], together[row])
    assert torch.equal(batch_invariant_product(x[17:90], weight), together[17:90])
