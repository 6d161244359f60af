"""Layers with FP8 weights, under Triton's interpreter where there is no GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from gapless.kernels import cublas
from gapless.kernels.narrow import narrow, narrow_norm, narrow_silu_mul, widen
from gapless.kernels.products import Workspace
from gapless.models.fp8 import Fp8Scheme, dequantize, quantize
from gapless.models.layers import GatedWeights, Hidden, Norm
from gapless.models.linear import plain
from gapless.models.narrow_layers import NarrowLinear
from gapless.models.skinny_layers import SkinnyLayers
from gapless.models.weight import Weight
from interpreted_fp8 import mend_casts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # the interpreter has no bfloat16 products
EPS, SIZE, INNER = 0.1, 256, 512
SCHEME = Fp8Scheme(DTYPE)
FEW, MANY = 5, 40  # rows
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter rounds to FP8 wrongly")


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def stored(*size: int, seed: int, blocks: bool, square: bool = False) -> Weight:
    """As a checkpoint has it. square: 128 rows share their scales too."""
    data, scales = quantize(draw(*size, seed=seed) / size[1] ** 0.5)
    if blocks and square:
        scales = 0.01 * (0.5 + torch.rand(size[0] // 128, size[1] // 128, device=DEVICE)).repeat_interleave(128, 0)
    elif blocks:
        scales = scales * (0.5 + torch.rand(size[0], size[1] // 128, device=DEVICE))
    return Weight(data, SCHEME, scales)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", ["on load", "columns", "blocks"])
@pytest.mark.parametrize("num_rows", [1, FEW, pytest.param(MANY, marks=on_gpu)])
def test_a_layer(num_rows: int, kind: str) -> None:
    """Few rows are exact but for the weights; many are rounded, those of weights with several blocks aside."""
    make = SkinnyLayers(DEVICE, fused=True)

    def weight(*size: int, seed: int) -> Weight:
        if kind == "on load":
            return Weight(draw(*size, seed=seed) / size[1] ** 0.5, SCHEME)
        return stored(*size, seed=seed, blocks=kind == "blocks")

    norms = [Norm(1 + 0.1 * draw(SIZE, seed=seed), EPS) for seed in (1, 2)]
    qkv, out, down = weight(SIZE, SIZE, seed=3), weight(SIZE, SIZE, seed=4), weight(SIZE, INNER, seed=5)
    gate, up = weight(INNER, SIZE, seed=6), weight(INNER, SIZE, seed=7)
    folded = 0.04 if kind == "on load" else 1e-5  # quantized after the norm is folded in, so rounded otherwise
    limit = max(folded, 6e-2 if num_rows == MANY else 1e-2 if DEVICE.type == "cuda" else 1e-5)
    hidden = make.embed(plain(draw(64, SIZE)))(torch.arange(num_rows, device=DEVICE))
    before = hidden.values.clone()
    heads = make.norm_linear(norms[0], qkv, None)(hidden)
    normed = F.rms_norm(before.float(), (SIZE,), norms[0].weight.float(), EPS)
    assert error(heads, normed @ qkv.dense().float().T) < limit
    hidden = make.add_linear(out, None)(heads, hidden)
    stream = before.float() + heads.float() @ out.dense().float().T
    inner = make.norm_gated(norms[1], GatedWeights(gate, up, None, None))(hidden)
    assert error(hidden.values, stream) < limit  # by now, whoever added it
    normed = F.rms_norm(hidden.values.float(), (SIZE,), norms[1].weight.float(), EPS)
    expected = F.silu(normed @ gate.dense().float().T) * (normed @ up.dense().float().T)
    found = inner if inner.shape[1] == INNER else F.silu(inner[:, :INNER]) * inner[:, INNER:]
    assert error(found, expected) < 2 * limit
    stream = hidden.values.float() + expected @ down.dense().float().T
    hidden = make.add_linear(down, None)(inner, hidden)
    make.norm(norms[0])(hidden)
    assert error(hidden.values, stream) < 2 * limit


@on_gpu
def test_a_plain_weight_behind_narrow_ones() -> None:
    """A checkpoint may leave some of its weights as they are."""
    make = SkinnyLayers(DEVICE, fused=True)
    gate, up = (stored(INNER, SIZE, seed=seed, blocks=False) for seed in (1, 2))
    norm, x, down = Norm(torch.ones(SIZE, device=DEVICE, dtype=DTYPE), EPS), draw(MANY, SIZE), draw(SIZE, INNER, seed=3)
    hidden = Hidden(x.clone())
    inner = make.norm_gated(norm, GatedWeights(gate, up, None, None))(hidden)
    hidden = make.add_linear(plain(down), None)(inner, hidden)
    make.norm(norm)(hidden)
    normed = F.rms_norm(x.float(), (SIZE,), eps=EPS)
    expected = F.silu(normed @ gate.dense().float().T) * (normed @ up.dense().float().T)
    assert error(hidden.values, x.float() + expected @ down.float().T) < 5e-2


@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_a_product_alone(num_rows: int) -> None:
    weight, bias, x = stored(64, SIZE, seed=1, blocks=False), draw(64, seed=2), draw(num_rows, SIZE, seed=3)
    product = NarrowLinear.maker(Workspace(DEVICE))(weight, bias.to(torch.bfloat16))
    expected = x.float() @ weight.dense().float().T + bias.float()
    assert error(product(x), expected) < 5e-2
    odd = stored(20, SIZE, seed=4, blocks=False)  # of no shape that the library takes
    found = NarrowLinear.maker(Workspace(DEVICE))(odd, None)(x)
    assert error(found, x.float() @ odd.dense().float().T) < 1e-2


def test_rows_are_narrowed_by_what_they_hold() -> None:
    x = draw(3, 200) * torch.tensor([[1e-3], [1.0], [0.0]], device=DEVICE, dtype=DTYPE)
    weight, addend = 1 + 0.1 * draw(200, seed=1), draw(3, 200, seed=2)
    both, total = draw(3, 400, seed=3), (x + addend).clone()
    cases = [
        (narrow(x), x.float()),
        (narrow_norm(x.clone(), weight, EPS, addend), F.rms_norm(total.float(), (200,), weight.float(), EPS)),
        (narrow_silu_mul(both), F.silu(both[:, :200].float()) * both[:, 200:].float()),
    ]
    for rows, expected in cases:
        found = rows.data.float() * rows.scales
        assert error(found, expected) < (0.04 if DEVICE.type == "cuda" else 0.15)
        largest = expected.abs().amax(dim=1, keepdim=True)
        torch.testing.assert_close(rows.scales, (largest / 448).clamp(min=1e-30), rtol=1e-2, atol=0)


def test_rows_are_narrowed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_casts(monkeypatch)
    x = draw(3, 384) * (1 + torch.arange(3, device=DEVICE).repeat_interleave(128) ** 4).to(DTYPE)
    weight, both = 1 + 0.1 * draw(384, seed=1), draw(3, 768, seed=3)
    cases = [
        (narrow(x, groups=True), x.float()),
        (narrow_norm(x.clone(), weight, EPS, groups=True), F.rms_norm(x.float(), (384,), weight.float(), EPS)),
        (narrow_silu_mul(both, groups=True), F.silu(both[:, :384].float()) * both[:, 384:].float()),
    ]
    for rows, expected in cases:
        assert (rows.data.shape, rows.scales.shape, rows.scales.stride()) == ((16, 384), (16, 3), (1, 16))
        largest = expected.view(3, 3, 128).abs().amax(dim=2)
        torch.testing.assert_close(rows.scales[:3], largest / 448, rtol=1e-2, atol=0)
        found = rows.data[:3].float() * rows.scales[:3].repeat_interleave(128, dim=1)
        assert error(found, expected) < 0.04


def scaled_mm(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, **_: object
) -> torch.Tensor:
    """What torch computes on Hopper for scales of 1 x 128 and 128 x 128, with the layouts that it wants."""
    (rows, inner), columns = x.shape, weight.shape[1]
    assert (x_scales.shape, x_scales.stride()) == ((rows, inner // 128), (1, rows))
    assert (scales.shape, scales.stride()) == ((inner // 128, columns // 128), (1, inner // 128))
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1) * weight.float()
    return ((x.float() * x_scales.repeat_interleave(128, 1)) @ whole).to(DTYPE)


def test_many_rows_of_weights_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes blocks of 128 by 128; a weight whose rows have scales of their own is made whole."""
    if DEVICE.type == "cpu":
        mend_casts(monkeypatch)
        monkeypatch.setattr(cublas, "generation", lambda: 9)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x = draw(43, 512)  # which is no multiple of 16
    weight = stored(256, 512, seed=1, blocks=True, square=True)
    bias = draw(256, seed=2)
    product = NarrowLinear.maker(Workspace(DEVICE))(weight, bias)
    assert not product._weight.made_whole
    assert 0 < error(product(x), x.float() @ weight.dense().float().T + bias.float()) < 4e-2
    for other in (stored(256, 512, seed=1, blocks=True), stored(256, 384, seed=1, blocks=True, square=True)):
        product = NarrowLinear.maker(Workspace(DEVICE))(other, None)
        assert product._weight.made_whole
        given = x[:, : other.data.shape[1]].contiguous()
        assert error(product(given), given.float() @ other.dense().float().T) < 1e-2


def test_widened_weights() -> None:
    weight = stored(24, 384, seed=1, blocks=True)
    assert weight.scales is not None
    found = widen(weight.data, weight.scales.t().contiguous(), torch.float32)
    assert torch.equal(found, dequantize(weight.data, weight.scales, torch.float32))
