"""Products by the library remember their shapes, each once, in order."""

from __future__ import annotations

import torch

from gapless.kernels.cublas import add_library_product, adds_fast, library_product, product_shapes


def test_shapes_are_remembered_in_the_order_of_their_first_product() -> None:
    before = len(product_shapes)
    for rows, inner, columns in ((7, 24, 40), (3, 40, 24), (7, 24, 40)):
        x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        torch.testing.assert_close(library_product(x, weight), x @ weight.t())
    assert product_shapes[before:] == ["7x24x40", "3x40x24"]


def test_a_product_that_is_added_is_remembered_too() -> None:
    before = len(product_shapes)
    x, weight, residual = torch.randn(9, 24), torch.randn(40, 24), torch.randn(9, 40)
    expected = residual + x @ weight.t()
    add_library_product(x, weight, residual)
    torch.testing.assert_close(residual, expected)
    assert product_shapes[before:] == ["9x24x40"]


def test_few_rows_and_small_steps_of_large_models_are_left_to_the_norm() -> None:
    assert [adds_fast(rows, 1024) for rows in (1, 256, 257, 8192)] == [False, False, True, True]
    assert [adds_fast(rows, 4096) for rows in (1, 257, 8191, 8192)] == [False, False, False, True]
