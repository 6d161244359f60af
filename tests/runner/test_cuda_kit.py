"""The kit of NVIDIA GPUs as a whole, on the CPU's streams under Triton's interpreter. tests/gpu has the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_graphs import Played

import family_cases
from gapless import LLM, SamplingParams, device
from gapless.config import EngineOptions
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.errors import ConfigError
from gapless.models.invariant_layers import InvariantLayers
from gapless.models.loader import load_config
from gapless.models.source import resolve as find
from gapless.models.spec import Feature
from gapless.proof.tiny import FAMILIES, raw_config
from gapless.runner import graphs, ladder
from gapless.runner.kits.cuda import NOT_CAPTURED, CudaKit, make_layers
from general_cases import FAST
from tiny import CPU

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the real one: tests/gpu")

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [11], [20, 21, 22]]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.device.cuda.is_available", lambda: True)
    monkeypatch.setitem(device.DEVICES, "cuda", lambda seed: CpuDevice(driver=InlineDriver()))
    monkeypatch.setattr(graphs, "record", lambda body, pool, stream: Played(body))
    monkeypatch.setattr(ladder, "FEW_TOKENS", (3, 6))
    for name in ("graph_pool_handle", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))


@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_of_kernels_gives_the_tokens_of_torch(tiny_dir: Path, on_cpu: None, batch_invariant: bool) -> None:
    options: dict[str, Any] = {"max_num_rows": 3, "max_batch_tokens": 16, "num_blocks": 12, "depth": 1}
    with LLM(tiny_dir, **CPU, **options, native=False) as llm:
        expected = [item.token_ids for item in llm.generate(PROMPTS, GREEDY)]
    with LLM(tiny_dir, **CPU | {"device": "cuda"}, **options, batch_invariant=batch_invariant) as llm:
        assert [item.token_ids for item in llm.generate(PROMPTS, GREEDY)] == expected
        why = "batch-invariant" if batch_invariant else "the only candidate"
        assert llm.engine.monitor.attention() == f"attention: triton ({why})"
        assert llm.engine.resolved.device_name == "cuda"
        assert not any("no graph" in reason for reason in llm.engine.monitor.ledger())


def test_an_engine_of_general_layers_gives_the_tokens_of_torch(
    tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and MLP side by side, layer norms, rope over a part of the head: GPT-NeoX."""
    (tmp_path / "config.json").write_text(json.dumps(raw_config(**FAMILIES["gpt_neox"])))
    options: dict[str, Any] = {"max_num_rows": 1, "max_batch_tokens": 4, "num_blocks": 4, "depth": 1}
    options |= {"dtype": "float32", "load_format": "dummy", "max_model_len": 64}
    monkeypatch.setattr("gapless.models.weights._DUMMY_SCALE", 0.3)
    prompts, params = [[3, 4, 5, 6, 7, 8]], GREEDY
    with LLM(tmp_path, device="cpu", **options, native=False) as llm:
        expected = [item.token_ids for item in llm.generate(prompts, params)]
    with LLM(tmp_path, device="cuda", **options) as llm:
        assert [item.token_ids for item in llm.generate(prompts, params)] == expected
        reasons = llm.engine.monitor.ledger()
    assert reasons["no fused layers: its layers have no layer norms"] > 0


def test_an_engine_of_experts_gives_the_tokens_of_torch(
    tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config(**FAMILIES["qwen3_moe"])))
    options: dict[str, Any] = {"max_num_rows": 1, "max_batch_tokens": 4, "num_blocks": 4, "depth": 1}
    options |= {"dtype": "float32", "load_format": "dummy", "max_model_len": 64}
    monkeypatch.setattr("gapless.models.weights._DUMMY_SCALE", 0.3)
    prompts = [[3, 4, 5, 6, 7, 8]]
    with LLM(tmp_path, device="cpu", **options, native=False) as llm:
        expected = [item.token_ids for item in llm.generate(prompts, GREEDY)]
    with LLM(tmp_path, device="cuda", **options) as llm:
        assert [item.token_ids for item in llm.generate(prompts, GREEDY)] == expected
        assert not llm.engine.monitor.ledger()


@pytest.fixture
def no_family(tmp_path: Path) -> Path:
    """A model without a family. transformers reads `torch.cuda` when its code is loaded, so before that is patched."""
    from transformers import GemmaForCausalLM

    assert GemmaForCausalLM.__name__ not in {family["architectures"][0] for family in FAMILIES.values()}
    (tmp_path / "config.json").write_text(json.dumps(family_cases.raw_config(**FAST["gemma"])))
    return tmp_path


@pytest.mark.parametrize("captured", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_general_path_gives_the_tokens_of_torch(
    no_family: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """In graphs, or without them where transformers' code waits for a number of the device."""
    options: dict[str, Any] = {"max_num_rows": 1, "max_batch_tokens": 4, "num_blocks": 4, "depth": 1}
    options |= {"dtype": "float32", "load_format": "dummy", "max_model_len": 64}
    prompts = [[3, 4, 5, 6, 7, 8]]
    with LLM(no_family, device="cpu", **options) as llm:
        expected = [item.token_ids for item in llm.generate(prompts, GREEDY)]
    if not captured:
        monkeypatch.setattr(graphs, "record", refuse_to_capture)
    with LLM(no_family, device="cuda", **options) as llm:
        assert [item.token_ids for item in llm.generate(prompts, GREEDY)] == expected
        assert list(llm.engine.monitor.ledger()) == [Feature.GENERAL if captured else NOT_CAPTURED]


def refuse_to_capture(*args: object) -> None:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_what_a_gpu_refuses(tmp_path: Path) -> None:
    def settings(family: str, **options: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(raw_config(**FAMILIES[family])))
        engine = EngineOptions(model=str(tmp_path), device="cuda", **options)
        return CudaKit().settings(engine, load_config(find(tmp_path)))

    with pytest.raises(ConfigError, match=r"batch_invariant: Phi3ForCausalLM cannot run so: .* no sliding windows$"):
        settings("phi3", batch_invariant=True)
    assert settings("qwen3_moe").slow_reason is None
    with pytest.raises(ConfigError, match="batch_invariant: GPTNeoXForCausalLM needs other layers"):
        settings("gpt_neox", batch_invariant=True)
    assert settings("granite").slow_reason is None


def test_defaults(tiny_dir: Path) -> None:
    options = EngineOptions(model=str(tiny_dir), device="cuda")
    found = CudaKit().settings(options, load_config(find(tiny_dir)))
    assert (found.dtype, found.kv_dtype) == (torch.bfloat16, torch.bfloat16)
    assert (found.num_rows, found.max_batch_tokens, found.native) == (256, 8192, False)
    assert found.attention[0] == "triton"


@pytest.mark.parametrize(
    ("dtype", "batch_invariant", "fused"),
    [(torch.bfloat16, False, True), (torch.float32, False, False), (torch.bfloat16, True, True)],
)
def test_layers(dtype: torch.dtype, batch_invariant: bool, fused: bool) -> None:
    layers: Any = make_layers(torch.device("cpu"), dtype, batch_invariant=batch_invariant)
    assert layers._fused is fused
    assert isinstance(layers, InvariantLayers) is batch_invariant
