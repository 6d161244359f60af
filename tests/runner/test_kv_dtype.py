"""A KV cache of FP8: what it holds, what it costs, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.config import EngineOptions
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.errors import ConfigError
from gapless.models.loader import load_config
from gapless.models.source import resolve as find
from gapless.runner.kv_store import KVStore, block_bytes
from gapless.runner.resolve import Resolved, resolve
from tiny import CPU

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [11], list(range(20, 60)), list(range(20, 50))]


def resolved(directory: Path, **options: Any) -> Resolved:
    return resolve(EngineOptions(model=str(directory), device="cpu", load_format="dummy", **options), find(directory))


def test_as_many_more_blocks_as_the_numbers_are_smaller(dummy_dir: Path) -> None:
    assert 2 * block_bytes(4, 16, 8, 128, torch.float8_e4m3fn) == block_bytes(4, 16, 8, 128, torch.bfloat16)
    wide, narrow = (resolved(dummy_dir, kv_memory="64KiB", kv_dtype=name) for name in ("auto", "fp8"))
    assert (wide.kv_dtype, narrow.kv_dtype) == (torch.float32, torch.float8_e4m3fn)
    assert narrow.limits.num_blocks == 4 * wide.limits.num_blocks
    assert narrow.kv_bytes == wide.kv_bytes


def test_blocks_are_copied() -> None:
    sizes: dict[str, Any] = {"places": [0, 1], "num_blocks": 3, "block_size": 2, "num_kv_heads": 1, "head_dim": 4}
    kv = KVStore(CpuDevice(driver=InlineDriver()), **sizes, dtype=torch.float8_e4m3fn, heads_first=True)
    for place in kv.memory:
        place[:2] = torch.arange(16).view(2, 2, 4).to(torch.float8_e4m3fn)
    kv.copy_blocks(torch.tensor([[0, 2]]))
    for place in kv.memory:
        assert torch.equal(place[4:6].float(), torch.arange(16.0).view(2, 2, 4))
        assert not place[2:4].float().any()


def test_an_engine_on_a_cpu(tiny_dir: Path) -> None:
    """Its tokens do not depend on how a prompt is cut or shared, and are mostly those of a cache in float32."""
    shared: dict[str, Any] = {**CPU, "num_blocks": 40}
    with LLM(tiny_dir, **shared, native=False) as llm:
        exact = [item.token_ids for item in llm.generate(PROMPTS, GREEDY)]
    found = []
    for options in ({"depth": 1}, {"depth": 2, "max_batch_tokens": 8, "max_num_rows": 3}, {"prefix_cache": False}):
        with LLM(tiny_dir, **shared | options, kv_dtype="fp8", check=True) as llm:
            found.append([item.token_ids for item in llm.generate(PROMPTS, GREEDY)])
            assert llm.engine.monitor.ledger()["no native call: it has no FP8 KV cache"] > 0
    assert found[1:] == found[:-1]
    pairs = [(a, b) for row, other in zip(exact, found[0], strict=True) for a, b in zip(row, other, strict=True)]
    assert sum(a == b for a, b in pairs) > 0.5 * len(pairs)


def test_what_is_refused(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype must be one of auto, fp8, got 'int8'"):
        EngineOptions(kv_dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_invariant: on a CPU only native steps are, and they have no FP8 KV"):
        resolved(tiny_dir, kv_dtype="fp8", batch_invariant=True)
    pytest.importorskip("triton")
    from gapless.runner.kits import cuda

    def settings(**options: Any) -> Any:
        engine = EngineOptions(model=str(tiny_dir), device="cuda", kv_dtype="fp8", **options)
        return cuda.CudaKit().settings(engine, load_config(find(tiny_dir)))

    monkeypatch.setattr(cuda, "has_fp8", lambda: False)
    with pytest.raises(ConfigError, match=r"kv_dtype fp8 needs a GPU of compute capability 8.9 or above"):
        settings()
    monkeypatch.setattr(cuda, "has_fp8", lambda: True)
    assert settings().kv_dtype == torch.float8_e4m3fn
    assert settings(dtype="float16").attention[0] == "triton"
    with pytest.raises(ConfigError, match="kv_dtype fp8 needs dtype bfloat16 or float16 on a GPU, not float32"):
        settings(dtype="float32")
    with pytest.raises(ConfigError, match="kv_dtype fp8: the attention kernels of batch_invariant have none"):
        settings(batch_invariant=True)
