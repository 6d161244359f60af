"""Fused layers without a norm before, with one after, and with any activation, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from gapless.kernels.between import add_normed, gate
from gapless.models.layers import PLAIN, GatedWeights, Hidden, Layers, Norm
from gapless.models.linear import ACTIVATIONS, plain
from gapless.models.skinny_layers import SkinnyLayers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # the interpreter has no bfloat16 products
TOLERANCE = 1e-2 if torch.cuda.is_available() else 1e-5
EPS = 0.1  # large enough to be seen


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE, error


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates(activation: str) -> None:
    both = draw(3, 2 * 1100) * 3
    one, other = both.float().chunk(2, dim=1)
    assert_near(gate(both, activation), ACTIVATIONS[activation](one) * other)


def test_what_is_added_is_normalized_and_its_squares_are_left() -> None:
    stream, x, weight = draw(4, 100), draw(4, 100, seed=1), 1 + draw(100, seed=2).float()
    expected = stream.float() + Norm(weight, EPS)(x.float())
    squares = torch.full((8,), math.nan, device=DEVICE)
    add_normed(stream, x, weight, EPS, squares)
    assert_near(stream, expected)
    assert_near(squares[:4], stream.float().square().sum(dim=1))
    assert squares[4:].isnan().all()


@pytest.mark.parametrize(("num_rows", "fused"), [(1, True), (5, True), (5, False)])
@pytest.mark.parametrize("place", ["around", "after"])
def test_a_layer_with_norms_after(num_rows: int, fused: bool, place: str) -> None:
    """As Gemma has it, and OLMo 2: the parts one after the other give what torch gives."""
    make, size = SkinnyLayers(DEVICE, fused=fused), 128
    make._workspace.squares.fill_(math.nan)
    norms = [Norm(1 + 0.1 * draw(size, seed=i), EPS) for i in range(4)]
    before = (norms[0], norms[1]) if place == "around" else (None, None)
    activation = "gelu_tanh" if place == "around" else "silu"
    weights = [plain(draw(rows, columns, seed=9 + rows) / 8) for rows, columns in ((64, size), (size, 64), (size, 256))]
    gates = GatedWeights(plain(draw(256, size, seed=5) / 8), plain(draw(256, size, seed=6) / 8), None, None, activation)
    x = draw(num_rows, size, seed=7)

    def run(layers: Layers) -> Hidden:
        hidden = Hidden(x.clone())
        for _ in range(2):  # the second layer's norm finds its sums of squares
            heads = layers.norm_linear(before[0], weights[0], None)(hidden)
            hidden = layers.add_linear(weights[1], None, norms[2])(heads, hidden)
            inner = layers.norm_gated(before[1], gates)(hidden)
            hidden = layers.add_linear(weights[2], None, norms[3])(inner, hidden)
        return hidden

    found = run(make)
    assert found.num_squares == (1 if fused else 0)
    assert_near(found.values, run(PLAIN).values)
