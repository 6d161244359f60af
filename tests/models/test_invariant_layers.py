"""Batch-invariant layers, under Triton's interpreter where there is no GPU, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from gapless.models.invariant_layers import InvariantLayers
from gapless.models.layers import GatedWeights, Hidden, Norm
from gapless.models.linear import plain

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


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps)


@pytest.mark.parametrize("size", [128, 512, 96, 100])  # out of 512 has parts; 96 and 100 have plain products
@pytest.mark.parametrize("num_rows", [1, 5, 40, 70, pytest.param(150, marks=pytest.mark.slow)])
def test_a_layer(num_rows: int, size: int) -> None:
    """Embedding, norm and product, residual, norm and gate, head. Sums that nobody left are not numbers."""
    make = InvariantLayers(DEVICE, fused=True)
    make._workspace.squares.fill_(math.nan)
    table, ids = draw(160, size), torch.arange(num_rows, device=DEVICE)
    norms = [Norm(1 + 0.1 * draw(size, seed=i), EPS) for i in (1, 2)]
    qkv, out = draw(64, size, seed=3), draw(size, 2 * size, seed=4)
    gate, up = (draw(256, size, seed=seed) / size**0.5 for seed in (5, 6))  # where SiLU is curved
    x = draw(num_rows, 2 * size, seed=7)

    hidden = make.embed(plain(table))(ids)
    assert_near(make.norm_linear(norms[0], plain(qkv), None)(hidden), normed(table[ids], norms[0]) @ qkv.float().T)

    hidden = make.add_linear(plain(out), None)(x, hidden)
    assert_near(hidden.values, table[ids].float() + x.float() @ out.float().T)

    inner = make.norm_gated(norms[1], GatedWeights(plain(gate), plain(up), None, None))(hidden)
    after = normed(hidden.values, norms[1])
    assert_near(inner, F.silu(after @ gate.float().T) * (after @ up.float().T))
    last = make.norm(norms[0])(hidden)
    assert_near(last, normed(hidden.values, norms[0]))
    head = make.linear(plain(table))(last)
    assert head.dtype == torch.float32
    assert_near(head, last.float() @ table.float().T)


@pytest.mark.parametrize("fused", [False, True])
def test_biases(fused: bool) -> None:
    make = InvariantLayers(DEVICE, fused=fused)
    hidden = make.embed(plain(draw(300, 128)))(torch.arange(3, device=DEVICE))
    norm = Norm(1 + 0.1 * draw(128, seed=1), EPS)
    weight, bias = draw(64, 128, seed=3), draw(64, seed=4)
    before = normed(hidden.values, norm)
    assert_near(make.norm_linear(norm, plain(weight), bias)(hidden), before @ weight.float().T + bias.float())
    residual, x = draw(3, 128, seed=5), draw(3, 128, seed=8)
    out, out_bias = draw(128, 128, seed=6), draw(128, seed=7)
    expected = residual.float() + x.float() @ out.float().T + out_bias.float()
    found = make.add_linear(plain(out), out_bias)(x, Hidden(residual))
    assert_near(found.values, expected)
    qkv = make.norm_linear(norm, plain(weight), None)(found)  # without sums that a kernel left
    assert_near(qkv, normed(expected, norm) @ weight.float().T)
