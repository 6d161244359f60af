"""The plain parts, with and without norms, against their definitions."""

import torch
from torch.nn import functional as F

from gapless.models.layers import GatedWeights, Hidden, Norm, PlainLayers
from gapless.models.linear import plain

MAKE = PlainLayers()
NORM = Norm(torch.rand(8) + 0.5, 1e-5)
X, STREAM = torch.randn(3, 16), torch.randn(3, 8)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + NORM.eps).rsqrt() * NORM.weight


def test_products_of_the_stream() -> None:
    weight, up, bias = torch.randn(5, 8), torch.randn(5, 8), torch.randn(5)
    gate = GatedWeights(plain(weight), plain(up), None, None, "gelu_tanh")
    for norm, x in ((NORM, normed(STREAM)), (None, STREAM)):
        found = MAKE.norm_linear(norm, plain(weight), bias)(Hidden(STREAM))
        torch.testing.assert_close(found, F.linear(x, weight, bias))
        expected = F.gelu(F.linear(x, weight), approximate="tanh") * F.linear(x, up)
        torch.testing.assert_close(MAKE.norm_gated(norm, gate)(Hidden(STREAM)), expected)


def test_products_that_are_added_to_the_stream() -> None:
    weight, bias, kept = torch.randn(8, 16), torch.randn(8), STREAM.clone()
    product = F.linear(X, weight, bias)
    for norm, expected in ((NORM, normed(product)), (None, product)):
        found = MAKE.add_linear(plain(weight), bias, norm)(X, Hidden(STREAM))
        torch.testing.assert_close(found.values, STREAM + expected)
    assert torch.equal(STREAM, kept)


def test_embeddings_are_scaled() -> None:
    table, ids = torch.randn(7, 8), torch.tensor([3, 0, 3])
    assert torch.equal(MAKE.embed(plain(table))(ids).values, table[ids])
    assert torch.equal(MAKE.embed(plain(table), 2.5)(ids).values, table[ids] * 2.5)
