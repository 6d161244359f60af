"""Native steps with MXFP4 experts of safetensors: near the whole model of transformers, and small in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_native import Bench, Feed
from test_native_quantized import resident

from family_cases import CLOSE, random_tokens
from gapless import LLM, SamplingParams
from gapless.models.loader import load_config
from gapless.models.source import resolve
from gapless.native import library
from gapless.runner.kits import cpu
from gapless.runner.native_model import NativeModel
from mxfp4_files import expected_logits, make_whole, quantized

pytestmark = pytest.mark.skipif(library.why_unavailable() is not None, reason=str(library.why_unavailable()))

ENDS = range(1, 61, 3)
TOKENS = random_tokens()


def load_native(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> NativeModel:
    source = resolve(path)
    return cpu.load_native(source, load_config(source), dtype=dtype, device=torch.device("cpu"), **options)


def logits_of(model: NativeModel) -> torch.Tensor:
    return torch.stack([Bench(model).step(Feed(0, 0, TOKENS[:end].numpy()))[0] for end in ENDS])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the logits after most tokens: rounding may tip a router, and then a token has a different expert."""
    wanted = expected[[end - 1 for end in ENDS]]
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_four_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """Rows of inputs are rounded to eight bits; a batch changes no bit of a row."""
    quantized(tmp_path / "a")
    expected = expected_logits(tmp_path / "a", tmp_path / "b", TOKENS)
    model = load_native(tmp_path / "a", dtype)
    assert model.has_quantized_experts
    alone = logits_of(model)
    whole = distance(logits_of(load_native(tmp_path / "a", dtype, quantization="none")), expected)
    assert 0 < distance(alone, expected) < whole + 0.02
    together = Bench(model).step(*(Feed(row, 0, TOKENS[:end].numpy()) for row, end in enumerate(ENDS[:10])))
    assert torch.equal(together, alone[:10])


def test_made_whole_on_demand(tmp_path: Path) -> None:
    quantized(tmp_path / "a")
    expected = expected_logits(tmp_path / "a", tmp_path / "b", TOKENS)
    model = load_native(tmp_path / "a", quantization="none")
    assert not model.has_quantized_experts
    torch.testing.assert_close(logits_of(model), expected[[end - 1 for end in ENDS]], atol=CLOSE, rtol=CLOSE)


def test_a_checkpoint_of_which_some_experts_are_whole(tmp_path: Path) -> None:
    """Then all of them are made whole."""
    quantized(tmp_path / "a")
    expected = expected_logits(tmp_path / "a", tmp_path / "b", TOKENS)
    make_whole(tmp_path / "a", "layers.1.", tmp_path / "c")
    model = load_native(tmp_path / "c")
    assert not model.has_quantized_experts
    torch.testing.assert_close(logits_of(model), expected[[end - 1 for end in ENDS]], atol=CLOSE, rtol=CLOSE)


def test_tokens_of_an_engine_do_not_depend_on_its_schedule(tmp_path: Path) -> None:
    quantized(tmp_path)
    prompts = [TOKENS.tolist()[: 3 + number] for number in range(9)]
    params, found = SamplingParams(max_tokens=8, temperature=0), []
    for options in ({"depth": 1, "max_num_rows": 1}, {"depth": 2}, {"depth": 3, "max_batch_tokens": 16, "check": True}):
        with LLM(tmp_path, device="cpu", num_blocks=64, **options) as llm:
            found.append([list(item.token_ids) for item in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset")
def test_memory_is_near_the_size_of_the_file(tmp_path: Path) -> None:
    quantized(tmp_path / "small")
    load_native(tmp_path / "small", torch.bfloat16)  # what is made once is there
    quantized(tmp_path / "large", hidden_size=512, intermediate_size=512, num_local_experts=64)
    size = (tmp_path / "large/model.safetensors").stat().st_size / 2**20
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = load_native(tmp_path / "large", torch.bfloat16)
    assert model.has_quantized_experts
    assert size > 50
    assert resident("VmHWM") - before < 2 * size
