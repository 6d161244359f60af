"""How products are launched, and the small kernels between them, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from gapless.kernels import fused, products
from gapless.kernels.tilings import Tiling

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


@pytest.mark.parametrize(("shared_bytes", "num_stages"), [(None, 3), (232_448, 3), (120_000, 2), (50_000, 1)])
def test_a_gpu_with_less_shared_memory_has_fewer_stages(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int | None, num_stages: int
) -> None:
    """Otherwise Triton would refuse the launch: a stage has 49152 bytes."""
    launched: list[int] = []
    kernel = {(2, 1, 1): lambda *_, **options: launched.append(options["num_stages"])}
    monkeypatch.setattr(products.skinny, "product", kernel)
    monkeypatch.setattr(products, "shared_memory_bytes", lambda: shared_bytes)
    tiling = Tiling(64, 64, 128, num_stages=3)
    products.product(draw(40, 128), draw(256, 128), products.Workspace(DEVICE), tiling, gated=True)
    assert launched == [num_stages]


@pytest.mark.parametrize("size", [96, 1000])
def test_small_kernels(size: int) -> None:
    x, weight = draw(3, size), draw(size, seed=1)
    assert_near(fused.rms_norm(x, weight, EPS), F.rms_norm(x.float(), weight.shape, weight.float(), EPS))
    both = draw(3, 2 * size, seed=2)
    gate, up = both.float().chunk(2, dim=1)
    assert_near(fused.silu_mul(both), F.silu(gate) * up)
