"""Native products with weights as a GGUF stores them: how far from the exact ones, and that batches change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_native import Bench, Feed, dense_logits

from gapless import LLM, SamplingParams
from gapless.config import EngineOptions
from gapless.errors import CorruptModel
from gapless.models.gguf_file import GGUFFile
from gapless.models.gguf_scheme import KINDS
from gapless.models.loader import load_config
from gapless.models.source import resolve
from gapless.native import library
from gapless.runner.kits import cpu
from gapless.runner.kits.base import Settings
from gapless.runner.native_model import NativeModel
from quantized import HIDDEN, VOCAB_SIZE, write_quantized

pytestmark = pytest.mark.skipif(library.why_unavailable() is not None, reason=str(library.why_unavailable()))

TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 100).astype(np.int32)
MIXED = {"attn_v": "Q6_K", "attn_k": "Q8_0", "ffn_down": "Q5_K", "ffn_up": "Q4_1", "token_embd": "Q5_0"}


def load_stored(path: Path) -> NativeModel:
    source = resolve(path)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    return cpu.load_native(source, load_config(source), **where, stored=True)  # type: ignore[arg-type]


def settings_of(path: Path, **options: Any) -> Settings:
    return cpu.CpuKit().settings(EngineOptions(model=str(path), device="cpu", **options), load_config(resolve(path)))


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS.values())
def test_a_product_is_as_exact_as_inputs_of_eight_bits_allow(tmp_path: Path, kind: str, tied: bool) -> None:
    """With layers that add nothing, logits are one product of the normalized embedding."""
    file = GGUFFile(write_quantized(tmp_path / "m.gguf", kind, tied=tied, silent=True))
    table, norm = file.load("token_embd.weight").astype(np.float64), file.load("output_norm.weight")
    head = table if tied else file.load("output.weight").astype(np.float64)
    found = Bench(load_stored(file.path)).step(*(Feed(row, 0, [token]) for row, token in enumerate(TOKENS[:30])))
    hidden = table[TOKENS[:30]]
    hidden = hidden / np.sqrt((hidden**2).mean(1, keepdims=True) + 1e-5) * norm
    blocks = hidden.reshape(len(hidden), -1, 32)
    half_steps = np.abs(blocks).max(2, keepdims=True) / 127 / 2  # the most that a number of a block is rounded by
    bound = np.abs(head) @ np.broadcast_to(half_steps, blocks.shape).reshape(len(hidden), -1).T
    errors = np.abs(found.numpy() - hidden @ head.T)
    assert (errors <= bound.T * 1.001 + 1e-4).all()
    assert np.sqrt((errors**2).mean()) < 0.02 * np.sqrt(((hidden @ head.T) ** 2).mean())


@pytest.mark.parametrize("others", [{}, MIXED], ids=["one kind", "mixed kinds"])
def test_logits_are_near_those_of_dequantized_weights(tmp_path: Path, others: dict[str, str]) -> None:
    path = write_quantized(tmp_path / "m.gguf", "Q4_K", others)
    model = load_stored(path)
    assert model.is_quantized
    found = torch.stack([Bench(model).step(Feed(0, 0, TOKENS[:n]))[0] for n in (1, 17, 60)])
    expected = dense_logits(path, list(TOKENS[:60]))[[0, 16, 59]]
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_experts_stay_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """Each is near its numbers, and a row has the same bits alone and beside others that choose other experts."""
    path = write_quantized(tmp_path / "m.gguf", kind, {"ffn_down_exps": "Q5_0"}, num_experts=5)
    assert settings_of(path).stored
    model = load_stored(path)
    assert model.is_quantized
    ends = (1, 17, 60)
    alone = torch.stack([Bench(model).step(Feed(0, 0, TOKENS[:end]))[0] for end in ends])
    expected = dense_logits(path, list(TOKENS[:60]))[[end - 1 for end in ends]]
    assert (alone - expected).norm() < 0.02 * expected.norm()
    together = Bench(model).step(*(Feed(row, 0, TOKENS[:end]) for row, end in enumerate(ends)))
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_batch_and_chunks_change_no_bit(tmp_path: Path, kind: str, threads: int) -> None:
    model = load_stored(write_quantized(tmp_path / "m.gguf", kind, {"attn_v": "Q6_K"}))
    alone, crowd = Bench(model), Bench(model)
    expected = [alone.step(Feed(row, 0, TOKENS[row : row + 20]))[0] for row in range(33)]
    crowd.step(*(Feed(row, 0, TOKENS[row : row + 3 + row % 5]) for row in range(33)))
    rest = [Feed(row, 3 + row % 5, TOKENS[row + 3 + row % 5 : row + 20]) for row in range(33)]
    found = [*crowd.step(*rest[:1]), *crowd.step(*rest[1:8]), *crowd.step(*rest[8:20]), *crowd.step(*rest[20:])]
    assert all(torch.equal(one, many) for one, many in zip(expected, found, strict=True))
    for rows in (1, 2, 3, 5, 9, 13, 16, 17, 33):
        together = crowd.step(*(Feed(row, 20, [7]) for row in range(rows)))
        assert torch.equal(together[0], alone.step(Feed(0, 20, [7]))[0])


def test_numbers_that_are_not_finite_give_no_logits(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "m.gguf", "Q8_0")
    raw, file = bytearray(path.read_bytes()), GGUFFile(path)
    place = file.tensors["output_norm.weight"].offset
    raw[place : place + 4] = np.float32(np.inf).tobytes()
    path.write_bytes(raw)
    with pytest.raises(CorruptModel, match=r"output_norm.weight.*NaN or infinite"):
        load_stored(path)
    raw[place : place + 4] = np.float32(3e38).tobytes()
    path.write_bytes(raw)
    assert not Bench(load_stored(path)).step(Feed(0, 0, [1, 2])).isfinite().any()


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "m.gguf", "Q8_0")
    place, raw = GGUFFile(path).tensors["blk.1.ffn_up.weight"].offset, bytearray(path.read_bytes())
    raw[place + 34 : place + 36] = np.float16(np.nan).tobytes()
    path.write_bytes(raw)
    with pytest.raises(CorruptModel, match=r"blk.1.ffn_up.weight.*NaN or infinite"):
        load_stored(path)


def test_kinds_say_whether_weights_stay_as_they_are(tmp_path: Path) -> None:
    whole = write_quantized(tmp_path / "whole.gguf", "Q4_K", MIXED)
    assert load_config(resolve(whole)).kinds[0] == "Q4_K"
    assert settings_of(whole).stored
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"native": False}, {"load_format": "dummy"}):
        assert not settings_of(whole, **options).stored
    for others in ({"output": "F32"}, {"attn_q": "F16"}):
        assert not settings_of(write_quantized(tmp_path / "part.gguf", "Q8_0", others)).stored


def test_tokens_of_an_engine_do_not_depend_on_its_schedule(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "m.gguf", "Q4_1", MIXED)
    prompts, params = (
        [list(map(int, TOKENS[i : i + 5 + i])) for i in range(12)],
        SamplingParams(max_tokens=12, temperature=0),
    )
    found = []
    for options in ({"depth": 1, "max_num_rows": 1}, {"depth": 2}, {"depth": 3, "max_batch_tokens": 16, "check": True}):
        with LLM(path, device="cpu", num_blocks=64, **options) as llm:
            assert llm.engine.resolved.weights == "Q4_1"
            found.append([list(item.token_ids) for item in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset")
def test_loading_holds_a_large_table_once(tmp_path: Path) -> None:
    """Neither a copy of the file nor its pages lie beside the packed weights."""
    path = write_quantized(tmp_path / "m.gguf", "Q8_0", tied=True, num_more=200_000)
    size = path.stat().st_size / 2**20
    load_stored(write_quantized(tmp_path / "small.gguf", "Q8_0", tied=True))  # what is made once is there
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = load_stored(path)
    assert model.is_quantized
    assert size > 50
    assert resident("VmHWM") - before < 1.75 * size


def resident(key: str) -> float:
    """MiB"""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(key)).split()[1]) / 1024


def test_every_kind_is_one_that_gguf_knows() -> None:
    assert all(gguf.GGMLQuantizationType(number).name == name for number, name in KINDS.items())
    assert HIDDEN % 256 == 0
