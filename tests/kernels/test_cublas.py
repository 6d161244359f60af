"""Products by the library remember their shapes, each once, in order."""

from __future__ import annotations

import torch

from gapless.kernels.cublas import library_product, product_shapes


def test_shapes_are_remembered_in_the_order_of_their_first_product() -> None:
    before = len(product_shapes)
    for rows, inner, columns in ((7, 24, 40), (3, 40, 24), (7, 24, 40)):
        x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        torch.testing.assert_close(library_product(x, weight), x @ weight.t())
    assert product_shapes[before:] == ["7x24x40", "3x40x24"]
