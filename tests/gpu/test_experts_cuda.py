"""Tiny models of experts in captured steps: the tokens of torch in float32, and batch-invariant ones in bfloat16."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.device.late import PREFIX
from mxfp4_files import quantized
from tiny import write_dummy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
VOCAB = 1000


NAMES: dict[str, dict[str, Any]] = {
    "chosen": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "shared": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "qkv_bias": False}
    | {"shared_expert_intermediate_size": 512},
}


@pytest.fixture(scope="module", params=NAMES)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Experts that are chosen, or also one that every token has."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 1024, "num_hidden_layers": 2, "intermediate_size": 512}
    experts = {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
    return write_dummy(tmp_path_factory.mktemp("dummy"), **sizes, **experts, **NAMES[request.param])


def generate(model: Path, **options: Any) -> list[tuple[int, ...]]:
    """Of 20 prompts: one row alone at the end, many before."""
    dice = random.Random(3)
    prompts = [[dice.randrange(1, VOCAB) for _ in range(dice.choice((1, 5, 60, 150)))] for _ in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=5 + 2 * number, ignore_eos=True) for number in range(20)]
    common: dict[str, Any] = {"load_format": "dummy", "max_num_rows": 16, "max_model_len": 512, "device": "cuda"}
    with LLM(model, **common | options) as llm:
        found = [found.token_ids for found in llm.generate(prompts, params)]
        ledger = llm.engine.monitor.ledger()
    if options.get("device") != "cpu":
        assert not [name for name in ledger if name.startswith((PREFIX, "no graph"))], ledger
    return found


def test_float32_gives_the_tokens_of_torch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.models.weights.DummyWeights.read", _read)
    found = generate(model, dtype="float32", depth=2)
    expected = generate(model, dtype="float32", depth=1, device="cpu", native=False)
    alike = [a == b for a, b in zip(found, expected, strict=True)]
    assert sum(alike) >= 19  # a near tie may fall either way


def _read(self: Any, name: str) -> torch.Tensor:
    """Dummy weights drawn on the CPU whatever the device, because generators of devices differ."""
    shape = self.shapes[name]
    if len(shape) == 1 and name.endswith(".weight"):
        return torch.ones(shape, dtype=self._dtype, device=self._device)
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return (0.1 * torch.randn(shape, generator=generator)).to(self._device, self._dtype)


def test_batch_invariant_tokens_do_not_depend_on_the_batch(model: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    assert generate(model, depth=2, **options) == generate(model, depth=1, max_num_rows=3, **options)


def test_bfloat16_compiles_nothing_after_ready(model: Path) -> None:
    assert len(generate(model, dtype="bfloat16", depth=2)) == 20


def test_experts_of_four_bits_give_the_tokens_of_whole_ones(tmp_path: Path) -> None:
    """The numbers are the same, and float32 sums of them differ by rounding alone."""
    quantized(tmp_path)
    prompts = [[(7 * place + 3 * number) % 97 for place in range(5 + 9 * number)] for number in range(6)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for quantization in ("auto", "none"):
        options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_rows": 4, "max_model_len": 100}
        with LLM(tmp_path, quantization=quantization, **options) as llm:
            found.append([done.token_ids for done in llm.generate(prompts, params)])
            ledger = llm.engine.monitor.ledger()
        assert not [name for name in ledger if name.startswith((PREFIX, "no graph"))], ledger
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 5  # a near tie may fall either way
