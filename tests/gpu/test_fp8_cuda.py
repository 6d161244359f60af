"""Products with FP8 weights on a GPU, at the sizes of real models, against plain torch; and a whole engine of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gapless.kernels.tilings import MAX_ROWS
from gapless.models.fp8 import dequantize, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PRODUCTS = {  # columns, inner size, gated, adds
    "QKV of 8B": (6144, 4096, False, False),
    "out of 8B": (4096, 4096, False, True),
    "gate of 8B": (14336, 4096, True, False),
    "down of 8B": (4096, 14336, False, True),
    "gate of 0.6B": (3072, 1024, True, False),
}
EPS = 0.1


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_few_rows_equal_torch(name: str, blocks: bool) -> None:
    """Very small weights are among them, which FP8 has without a leading one."""
    from gapless.kernels.products import Workspace, product, tiling_for

    columns, inner, gated, adds = PRODUCTS[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda")

    workspace = Workspace(torch.device("cuda"))
    raw = draw(columns * (2 if gated else 1), inner) / inner**0.5
    raw[:, ::3] *= 2.0**-12
    data, scales = quantize(raw)
    if blocks:
        scales = scales * (0.5 + draw(len(raw), inner // 128).abs())
    weight, by_block = dequantize(data, scales, torch.float32), scales.t().contiguous()
    for num_rows in (1, 7, 8, 9, 16, 20, 32):
        tiling = tiling_for(num_rows, columns, inner, gated=gated, adds=adds, narrow=True)
        assert tiling is not None
        x = draw(num_rows, inner).bfloat16()
        if adds:
            residual = draw(num_rows, columns).bfloat16()
            expected = residual.float() + x.float() @ weight.T
            found = product(x, data, workspace, tiling, add_to=residual, scales=by_block)
            left = workspace.squares.view(-1, MAX_ROWS)[: columns // tiling.block_n, :num_rows].sum(dim=0)
            torch.testing.assert_close(left, found.float().square().sum(dim=1), rtol=1e-4, atol=1e-4)
        else:
            workspace.squares.view(-1, MAX_ROWS)[0, :num_rows] = x.float().square().sum(dim=1)
            expected = F.rms_norm(x.float(), (inner,), eps=EPS) @ weight.T
            if gated:
                expected = F.silu(expected[:, :columns]) * expected[:, columns:]
            given = {"num_squares": 1, "eps": EPS, "gated": gated, "scales": by_block}
            found = product(x, data, workspace, tiling, **given)
        error = (found.float() - expected).norm() / expected.norm()
        assert error < 5e-3, (num_rows, float(error))


@pytest.mark.parametrize("num_rows", [40, 43, 1000])
def test_many_rows_of_weights_in_blocks(num_rows: int) -> None:
    """Hopper's library takes them as they are, elsewhere they are made whole; both are close to torch."""
    from gapless.kernels.cublas import takes_blocks
    from gapless.kernels.products import Workspace
    from gapless.models.fp8 import Fp8Scheme
    from gapless.models.narrow_layers import NarrowLinear
    from gapless.models.weight import Weight

    generator = torch.Generator("cuda").manual_seed(0)
    columns, inner = 1536, 4096
    data = (60 * torch.randn(columns, inner, generator=generator, device="cuda")).clamp(-448, 448)
    scales = 0.5 + torch.rand(columns // 128, inner // 128, generator=generator, device="cuda")
    weight = Weight(
        data.to(torch.float8_e4m3fn), Fp8Scheme(torch.bfloat16), 1e-3 * scales.repeat_interleave(128, dim=0)
    )
    x = torch.randn(num_rows, inner, generator=generator, device="cuda").bfloat16()
    x[:, ::7] *= 100
    product = NarrowLinear.maker(Workspace(torch.device("cuda")))(weight, None)
    assert product._weight.made_whole is not takes_blocks(columns, inner)
    found, expected = product(x).float(), x.float() @ weight.dense().float().T
    assert found.shape == (num_rows, columns)
    assert (found - expected).norm() / expected.norm() < 4e-2


def write_config(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_an_engine(tmp_path: Path) -> None:
    """Dummy weights, few requests and many: it runs, and its first tokens are mostly those of whole weights."""
    from gapless import LLM, SamplingParams

    write_config(tmp_path)
    prompts = [[(7 * i + j) % 1000 for j in range(5 + i % 40)] for i in range(48)]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    found = []
    for quantization in ("none", "fp8"):
        options = {"load_format": "dummy", "device": "cuda", "quantization": quantization, "max_num_rows": 64}
        with LLM(tmp_path, **options) as llm:
            many = [list(result.token_ids) for result in llm.generate(prompts, params)]
            few = [list(result.token_ids) for result in llm.generate(prompts[:3], params)]
        found.append([tokens[0] for tokens in many + few])
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same > len(found[0]) // 2, same


def test_refused(tmp_path: Path) -> None:
    from gapless import LLM
    from gapless.errors import ConfigError

    write_config(tmp_path)
    options = {"load_format": "dummy", "device": "cuda", "quantization": "fp8"}
    with pytest.raises(ConfigError, match="batch_invariant: products with FP8 weights"):
        LLM(tmp_path, **options, batch_invariant=True)
    with pytest.raises(ConfigError, match="FP8 weights need dtype bfloat16"):
        LLM(tmp_path, **options, dtype="float16")
