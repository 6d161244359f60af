"""Packed and fused products equal plain ones, for any number of rows."""

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.models.linear import PLAIN_SCHEME, PackedGated, PackedLinear, PlainGated, PlainLinear, plain
from gapless.models.weight import GatedLinear, Weight, stacked

ROWS = [1, 2, 3, 16, 17, 200, 2048]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_plain(dtype: torch.dtype, with_bias: bool) -> None:
    weight, bias = (torch.randn(40, 72) / 8).to(dtype), torch.randn(40).to(dtype) if with_bias else None
    packed, plain = PackedLinear(weight, bias), PlainLinear(weight, bias)
    for num_rows in ROWS:
        x, residual = torch.randn(num_rows, 72).to(dtype), torch.randn(num_rows, 40).to(dtype)
        kept = residual.clone()
        torch.testing.assert_close(packed(x), plain(x), **TOLERANCE[dtype])
        torch.testing.assert_close(packed.add(x, residual), plain.add(x, residual), **TOLERANCE[dtype])
        assert torch.equal(residual, kept)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_equals_its_definition(dtype: torch.dtype, with_bias: bool, activation: str) -> None:
    gate, up = ((torch.randn(40, 72) / 8).to(dtype) for _ in range(2))
    biases = tuple(torch.randn(40).to(dtype) if with_bias else None for _ in range(2))
    for num_rows in ROWS:
        x = torch.randn(num_rows, 72).to(dtype)
        expected = ACTIVATIONS[activation](F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1])
        for gated in (PackedGated(gate, up, *biases, activation), PlainGated(gate, up, *biases, activation)):
            torch.testing.assert_close(gated(x), expected, **TOLERANCE[dtype])


def test_choice_by_device_and_dtype() -> None:
    weight = torch.randn(8, 8)
    assert isinstance(PLAIN_SCHEME.linear(plain(weight), None), PackedLinear)
    assert isinstance(gated(weight), PackedGated)
    for other in (weight.double(), weight.to("meta")):
        assert isinstance(PLAIN_SCHEME.linear(plain(other), None), PlainLinear)
        assert isinstance(gated(other), PlainGated)


def gated(weight: Tensor) -> GatedLinear:
    return PLAIN_SCHEME.gated(plain(weight), plain(weight), (None, None), "silu")


def test_weights_are_stacked_in_their_order() -> None:
    parts = [torch.randn(rows, 8) for rows in (1, 3, 2)]
    assert torch.equal(stacked([plain(part) for part in parts]).dense(), torch.cat(parts))


def test_packing_keeps_no_second_copy() -> None:
    weight = torch.randn(64, 64)
    alive = weakref.ref(weight)
    linear = PLAIN_SCHEME.linear(plain(weight), None)
    del weight
    assert alive() is None
    assert linear(torch.ones(1, 64)).shape == (1, 64)


class Halved(type(PLAIN_SCHEME)):  # type: ignore[misc]
    """Numbers that are stored at half their size."""

    name = "halved"

    def dense(self, weight: Weight) -> torch.Tensor:
        return 2 * weight.data


class Thirds(Halved):
    name = "thirds"


def test_weights_of_different_schemes_are_never_stacked() -> None:
    """The integers of a quantized weight would pass for numbers of the other."""
    weight = plain(torch.ones(2, 3))
    with pytest.raises(AssertionError, match="different schemes"):
        stacked([replace(weight, scheme=Halved()), replace(weight, scheme=Thirds())])


def test_beside_a_plain_weight_others_are_made_whole() -> None:
    weight = plain(torch.ones(2, 3))
    found = stacked([weight, replace(weight, scheme=Halved())])
    assert found.scheme.name == "plain"
    assert found.data.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
