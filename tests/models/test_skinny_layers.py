"""Layers of fused products, under Triton's interpreter where there is no GPU, against plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from gapless.kernels.cublas import library_product
from gapless.kernels.tilings import MAX_ROWS, choose_tiling
from gapless.models.layers import GatedWeights, Hidden, Norm
from gapless.models.linear import plain
from gapless.models.skinny_layers import SkinnyLayers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # the interpreter has no bfloat16 products
TOLERANCE = 1e-2 if torch.cuda.is_available() else 1e-5
EPS = 0.1  # large enough to be seen


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, DTYPE)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE, error


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps)


@pytest.mark.parametrize(
    ("num_rows", "size"),
    [(1, 128), (1, 1024), (1, 1536), (5, 128), (5, 384), (20, 128), (40, 128), (70, 128), (150, 128)],
)
def test_a_layer_of_fused_products(num_rows: int, size: int) -> None:
    """Embedding, norm and product, residual, norm and gate: sums of squares go from kernel to kernel.

    Sums that nobody left are not numbers: a product that reads one too many shows it, where the number of tiles is no
    power of two (384 and 1536 columns).
    """
    make = SkinnyLayers(DEVICE, fused=True)
    make._workspace.squares.fill_(math.nan)
    table, ids = draw(160, size), torch.arange(num_rows, device=DEVICE)
    norms = [Norm(1 + 0.1 * draw(size, seed=i), EPS) for i in (1, 2)]
    qkv, out = draw(64, size, seed=3), draw(size, 2 * size, seed=4)
    gate, up = (draw(256, size, seed=seed) / size**0.5 for seed in (5, 6))  # where SiLU is curved
    x = draw(num_rows, 2 * size, seed=7)

    hidden = make.embed(plain(table))(ids)
    assert hidden.num_squares == 1
    assert_near(make.norm_linear(norms[0], plain(qkv), None)(hidden), normed(table[ids], norms[0]) @ qkv.float().T)

    hidden = make.add_linear(plain(out), None)(x, hidden)
    expected = table[ids].float() + x.float() @ out.float().T
    assert hidden.num_squares > 1
    assert_near(hidden.values, expected)

    inner = make.norm_gated(norms[1], GatedWeights(plain(gate), plain(up), None, None))(hidden)
    after = normed(hidden.values, norms[1])
    assert_near(inner, F.silu(after @ gate.float().T) * (after @ up.float().T))
    assert_near(make.norm(norms[0])(hidden), normed(hidden.values, norms[0]))


def test_one_row_of_short_products_has_a_kernel_of_its_own() -> None:
    """Which the layer of 1024 above goes through."""
    roles = [(64, 1024, False, False), (1024, 2048, False, True), (256, 1024, True, False)]
    for columns, inner, gated, adds in roles:
        tiling = choose_tiling(1, columns, inner, gated=gated, adds=adds)
        assert tiling is not None
        assert tiling.kernel == "vector"


@pytest.mark.parametrize(("num_rows", "size"), [(1, 128), (1, 576), (1, 896), (4, 576), (20, 896), (70, 128)])
def test_a_bias_is_added_by_the_kernel_itself(num_rows: int, size: int) -> None:
    """Before the residual, once, however many parts the inner dimension has."""
    make = SkinnyLayers(DEVICE, fused=True, plain=refuse)
    hidden = make.embed(plain(draw(160, size)))(torch.arange(num_rows, device=DEVICE))
    norm = Norm(1 + 0.1 * draw(size, seed=1), EPS)
    qkv, qkv_bias = draw(64, size, seed=2), draw(64, seed=3)
    expected = normed(hidden.values, norm) @ qkv.float().T + qkv_bias.float()
    if num_rows <= 64:
        assert_near(make.norm_linear(norm, plain(qkv), qkv_bias)(hidden), expected)
    x, out, bias = draw(num_rows, 640, seed=4), draw(size, 640, seed=5), draw(size, seed=6)
    expected = hidden.values.float() + x.float() @ out.float().T + bias.float()
    hidden = make.add_linear(plain(out), bias)(x, hidden)
    assert hidden.num_squares > 1
    assert_near(hidden.values, expected)


@pytest.mark.parametrize("num_rows", [1, 3, 20, 70, MAX_ROWS + 1])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_gates(activation: str, num_rows: int) -> None:
    make = SkinnyLayers(DEVICE, fused=True, plain=refuse if num_rows <= MAX_ROWS else library_product)
    hidden = make.embed(plain(draw(300, 128)))(torch.arange(num_rows, device=DEVICE))
    norm = Norm(1 + 0.1 * draw(128, seed=1), EPS)
    gate, up = (draw(64, 128, seed=seed) / 4 for seed in (2, 3))  # where both activations are curved
    weights = GatedWeights(plain(gate), plain(up), None, None, activation)
    x = normed(hidden.values, norm)
    activate = {"silu": F.silu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh")}[activation]
    expected = activate(x @ gate.float().T) * (x @ up.float().T)
    assert_near(make.norm_gated(norm, weights)(hidden), expected)


def refuse(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("a fused kernel was to take this product")


@pytest.mark.parametrize("num_rows", [3, 40, 70])
@pytest.mark.parametrize("inner", [640, 1216])
def test_parts_of_unequal_length(num_rows: int, inner: int) -> None:
    """5 chunks of 128 in 4 parts, 19 of 64 in 8."""
    tiling = choose_tiling(num_rows, 64, inner, adds=True)
    assert tiling is not None
    assert inner // tiling.block_k % tiling.splits
    make = SkinnyLayers(DEVICE, fused=True, plain=refuse)
    weight = draw(64, inner, seed=1)
    for seed in (2, 3):  # with the same x, the second could find the first one's result in its memory
        x, residual = draw(num_rows, inner, seed=seed), draw(num_rows, 64, seed=seed)
        expected = residual.float() + x.float() @ weight.float().T
        assert_near(make.add_linear(plain(weight), None)(x, Hidden(residual)).values, expected)


@pytest.mark.parametrize("num_rows", [MAX_ROWS + 1])
def test_too_many_rows_take_the_library(num_rows: int) -> None:
    make = SkinnyLayers(DEVICE, fused=True)
    hidden = make.embed(plain(draw(300, 128)))(torch.arange(num_rows, device=DEVICE))
    assert hidden.num_squares == 0
    norm = Norm(1 + 0.1 * draw(128, seed=1), EPS)
    weight, bias = draw(64, 128, seed=3), draw(64, seed=4)
    expected = normed(hidden.values, norm) @ weight.float().T + bias.float()
    assert_near(make.norm_linear(norm, plain(weight), bias)(hidden), expected)
    residual = draw(num_rows, 128, seed=5)
    found = make.add_linear(plain(draw(128, 128, seed=6)), draw(128, seed=7))(
        draw(num_rows, 128, seed=8), Hidden(residual)
    )
    added = draw(num_rows, 128, seed=8).float() @ draw(128, 128, seed=6).float().T + draw(128, seed=7).float()
    assert found.addend is not None
    expected = residual.float() + added
    again = Hidden(found.values.clone(), found.addend)
    assert_near(make.norm(norm)(found), normed(expected, norm))
    assert_near(found.values, expected)  # the norm added it in place
    assert_near(make.norm_linear(norm, plain(weight), None)(again), normed(expected, norm) @ weight.float().T)


@pytest.mark.parametrize("num_rows", [65, MAX_ROWS + 1])
def test_many_rows_are_added_by_the_library(num_rows: int) -> None:
    """The next norm has nothing to add then. No kernel can tile these columns, for any number of rows."""
    size = 100
    make = SkinnyLayers(DEVICE, fused=True)
    residual, x, weight = draw(num_rows, size), draw(num_rows, 128, seed=1), draw(size, 128, seed=2)
    expected = residual.float() + x.float() @ weight.float().T
    norm = Norm(1 + 0.1 * draw(size, seed=3), EPS)
    found = make.add_linear(plain(weight), None)(x, Hidden(residual))
    assert found.values is residual
    assert (found.addend is None) == (num_rows > MAX_ROWS)
    assert found.num_squares == 0
    assert_near(make.norm(norm)(found), normed(expected, norm))
    assert_near(residual, expected)  # in place, by the library or by the norm


def test_without_fused_kernels_all_products_are_the_plain_one() -> None:
    """A row's result must not depend on the others, or on how many there are."""
    asked: list[tuple[int, ...]] = []

    def noted(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(tuple(weight.shape))
        return library_product(x, weight, *args, **kwargs)

    make = SkinnyLayers(DEVICE, fused=False, plain=noted)
    norm = Norm(1 + 0.1 * draw(128, seed=1), EPS)
    qkv, out, gate, head = draw(64, 128), draw(128, 64), draw(32, 128), draw(256, 128)
    hidden = make.embed(plain(draw(300, 128)))(torch.arange(3, device=DEVICE))
    hidden = make.add_linear(plain(out), None)(make.norm_linear(norm, plain(qkv), None)(hidden), hidden)
    make.norm_gated(norm, GatedWeights(plain(gate), plain(gate), None, None))(hidden)
    make.linear(plain(head))(hidden.values)
    assert asked == [(64, 128), (128, 64), (64, 128), (256, 128)]


@pytest.mark.parametrize("bias", [False, True])
def test_norms_stay_whole_where_no_kernel_takes_them(bias: bool) -> None:
    """Folding rounds weights once more; a weight of one beside 2 ** -8 would be lost."""
    size = 100
    make = SkinnyLayers(DEVICE, fused=True)
    norm = Norm(1 + draw(size, seed=1).abs() / 256, EPS)
    weight, x = draw(64, size, seed=2), draw(3, size, seed=3)
    added = draw(64, seed=4) if bias else None
    hidden = Hidden(x, num_squares=1)  # as if a kernel had left sums behind
    expected = normed(x, norm) @ weight.float().T + (0 if added is None else added.float())
    found = make.norm_linear(norm, plain(weight), added)
    assert_near(found(hidden), expected)
    assert found._weight is weight


def test_a_gate_is_folded_where_a_gated_kernel_takes_it() -> None:
    columns = 4128  # in tiles of 32, where a product without a gate has tiles of 64
    assert choose_tiling(2, columns, 128) is None
    gate = draw(columns, 128)
    found = SkinnyLayers(DEVICE, fused=True).norm_gated(
        Norm(draw(128, seed=1), EPS), GatedWeights(plain(gate), plain(gate), None, None)
    )
    assert not torch.equal(found._weight[:columns], gate)


def test_split_products_add_up_in_one_pass() -> None:
    tiling = choose_tiling(4, 64, 1024)
    assert tiling is not None
    assert tiling.splits == 8
    make = SkinnyLayers(DEVICE, fused=True)
    weight = draw(64, 1024)
    product = make.linear(plain(weight))
    for seed in (1, 2):  # with the same x, the second could find the first one's result in its memory
        x = draw(4, 1024, seed=seed)
        assert_near(product(x), x.float() @ weight.float().T)
