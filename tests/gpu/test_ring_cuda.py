"""The product with a ring of weights, on the GPU it is for, at the sizes of real models, against plain torch."""

from __future__ import annotations

from itertools import product as every

import pytest
import torch
from torch.nn import functional as F

from gapless.kernels.tilings import MAX_ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PRODUCTS = {  # columns, inner size, gated, adds
    "QKV of 8B": (6144, 4096, False, False),
    "out of 8B": (4096, 4096, False, True),
    "gate of 8B": (14336, 4096, True, False),
    "QKV of 0.6B": (4096, 1024, False, False),
    "out of 0.6B": (1024, 2048, False, True),
    "gate of 0.6B": (3072, 1024, True, False),
}
EPS = 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_equals_torch(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from gapless.kernels.products import Workspace, has_ring, product, tiling_for

    if not has_ring():
        pytest.skip("needs Hopper")
    from gapless.kernels import ring

    launched: list[int] = []
    in_tiles = ring.in_tiles
    monkeypatch.setattr(ring, "in_tiles", lambda *given: (launched.append(1), in_tiles(*given))[1])
    columns, inner, gated, adds = PRODUCTS[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(dtype)

    workspace = Workspace(torch.device("cuda"))
    weight = draw(columns * (2 if gated else 1), inner) / inner**0.5
    tried = 0
    for num_rows, num_sums in every((1, 7, 16, 17, 20, 32), (1, 64)):  # the second time finds what the first left
        tiling = tiling_for(num_rows, columns, inner, gated=gated, adds=adds)
        if tiling is None or tiling.kernel != "ring":
            continue
        tried += 1
        x, bias = draw(num_rows, inner), None if gated or num_sums == 1 else draw(columns)
        added = 0.0 if bias is None else bias.float()
        if adds:
            residual = draw(num_rows, columns)
            expected = residual.float() + x.float() @ weight.float().T + added
            found = product(x, weight, workspace, tiling, add_to=residual, bias=bias)
            left = workspace.squares.view(-1, MAX_ROWS)[: columns // tiling.block_n, :num_rows].sum(dim=0)
            torch.testing.assert_close(left, found.float().square().sum(dim=1), rtol=1e-4, atol=1e-4)
        else:
            sums = workspace.squares.view(-1, MAX_ROWS)
            sums.fill_(float("nan"))  # what nobody left is not to be read
            sums[:num_sums] = 0.0
            sums[:num_sums, :num_rows] = x.float().square().view(num_rows, num_sums, -1).sum(dim=2).T
            expected = F.rms_norm(x.float(), (inner,), eps=EPS) @ weight.float().T + added
            if gated:
                gate, up = expected.chunk(2, dim=1)
                expected = (F.gelu(gate, approximate="tanh") if num_sums == 1 else F.silu(gate)) * up
            activation = "gelu_tanh" if num_sums == 1 else "silu"
            found = product(
                x, weight, workspace, tiling, num_squares=num_sums, eps=EPS, gated=gated, bias=bias,
                activation=activation,
            )  # fmt: skip
        error = (found.float() - expected).norm() / expected.norm()
        assert error < 5e-3, (num_rows, float(error))
    assert len(launched) == tried >= 6
