"""Which attention runs: asked for, or the faster one, by times and results that the tests make up."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flash_libraries import FLASH3, FLASHINFER, flash_attn_with_kvcache, install
from gapless import LLM, SamplingParams
from gapless.attention.flash import LibraryAttention
from gapless.attention.triton import TritonAttention
from gapless.commands import info
from gapless.config import EngineOptions
from gapless.core.limits import Limits
from gapless.device.base import Device
from gapless.errors import ConfigError
from gapless.models.config import ModelConfig
from gapless.models.rank_group import ONE_RANK, RankGroup
from gapless.models.source import resolve as find
from gapless.models.spec import AttentionSpec
from gapless.runner.attention_choice import AttentionChoice, candidates, fastest, make_attention
from gapless.runner.attention_trials import Trials
from gapless.runner.kits import KITS
from gapless.runner.kits.base import BuildProgress, Built, LoadedModel, Resolved, Settings, in_blocks, make_kv_store
from gapless.runner.kits.cpu import CpuKit
from gapless.runner.kits.cuda import choose_attention
from gapless.runner.resolve import resolve
from gapless.runner.runner import Runner
from gapless.runner.sampler import pick
from gapless.runner.step import Step
from tiny import CPU

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for the CPU")
LIMITS = Limits(num_rows=2, num_blocks=5, block_size=16, max_batch_tokens=9, max_model_len=60)
NUM_HEADS = 4


def names(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[str, ...]:
    specs = [AttentionSpec(NUM_HEADS, 2, head_dim, head_dim**-0.5, None)]
    config: Any = SimpleNamespace(attention_specs=lambda: specs)
    return candidates(EngineOptions(**options), config, dtype)


def test_candidates_are_those_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert names() == ("triton",)
    install(monkeypatch, **FLASH3)
    assert names() == ("triton", "flash3")
    install(monkeypatch, **FLASH3, **FLASHINFER)
    assert names() == ("triton", "flash3", "flashinfer")
    assert names(attention="triton") == ("triton",)
    assert names(attention="flashinfer") == ("flashinfer",)


@pytest.mark.parametrize(
    "options", [{"batch_invariant": True}, {"dtype": torch.float32}, {"head_dim": 20}, {"head_dim": 512}], ids=str
)
def test_ours_alone_where_no_library_can(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    install(monkeypatch, **FLASH3, **FLASHINFER)
    assert names(**options) == ("triton",)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"attention": "flashinfer"},
            r"attention flashinfer: flashinfer-python is not installed \(no module flashinfer",
        ),
        ({"attention": "flash3", "batch_invariant": True}, "attention flash3: batch_invariant needs our own kernels"),
        ({"attention": "flash3", "dtype": torch.float32}, "it knows float16 and bfloat16, not float32"),
        ({"attention": "flash3", "head_dim": 20}, "its head sizes are multiples of 8"),
        ({"attention": "flash2"}, "attention must be one of auto, triton, flash3, flashinfer"),
    ],
)
def test_what_was_asked_for_and_cannot_be(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: str) -> None:
    install(monkeypatch, **FLASH3)
    with pytest.raises(ConfigError, match=error):
        names(**options)


def test_a_cpu_has_no_choice(dummy_dir: Path) -> None:
    options = EngineOptions(model=str(dummy_dir), device="cpu", load_format="dummy", attention="flash3")
    with pytest.raises(ConfigError, match="attention flash3: only a GPU has it"):
        resolve(options, find(dummy_dir))


@pytest.mark.parametrize(
    ("times", "best", "words"),
    [
        ({"triton": [4, 8]}, "triton", "triton alone"),
        ({"triton": [4, 8], "flash3": [2, 4]}, "flash3", "flash3 takes 0.50 of the time of triton"),
        ({"triton": [4, 8], "flash3": [8, 3.9]}, "triton", "flash3 takes 0.99 of the time of triton"),
        ({"triton": [4, 8], "flash3": [2, 4], "flashinfer": [1, 4]}, "flashinfer", "flashinfer takes 0.35"),
        ({"triton": [4, 8], "flash3": None, "flashinfer": [2, 4]}, "flashinfer", "flash3 failed, flashinfer takes"),
        ({"triton": [4, 8], "flash3": None}, "triton", "flash3 failed"),
    ],
)
def test_the_fastest(times: dict[str, list[float] | None], best: str, words: str) -> None:
    def seconds(name: str) -> list[float]:
        found = times[name]
        if found is None:
            raise RuntimeError("no kernel image")
        return found

    found = fastest(list(times), seconds)
    assert found[0] == best
    assert words in found[1]


def own() -> TritonAttention:
    pools = [torch.zeros((LIMITS.num_blocks + 1) * LIMITS.block_size, 4, 16)]
    spec = AttentionSpec(NUM_HEADS, 2, 16, 0.25, rope=None)
    return TritonAttention(pools, LIMITS.block_size, [spec], LIMITS.num_rows, 4)


def chosen(installed: tuple[str, ...], measure: Callable[[Any], float]) -> tuple[Any, AttentionChoice, TritonAttention]:
    ours = own()
    found, choice = make_attention(ours, LIMITS, installed, measure)
    return found, choice, ours


def measured(decodes: list[float], chunks: list[float]) -> Callable[[Any], float]:
    """Times of each attention, ours first. Runs what is measured once, as the device would."""
    times = iter([time for time in decodes for _ in range(4)] + [time for time in chunks for _ in range(2)])

    def seconds(body: Any) -> float:
        body()
        return next(times)

    return seconds


def test_decode_rows_and_chunks_are_chosen_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **FLASH3, **FLASHINFER)
    times = measured([4, 5, 2], [4, 3])
    found, choice, ours = chosen(("triton", "flash3", "flashinfer"), times)
    assert isinstance(found, LibraryAttention)
    assert (choice.decode, choice.chunks) == ("flashinfer", "flash3")
    assert str(choice) == (
        "attention: flashinfer for decode rows, flash3 for chunks "
        "(decode rows: flash3 takes 1.25 of the time of triton, "
        "flashinfer takes 0.50 of the time of triton; chunks: flash3 takes 0.75 of the time of triton)"
    )
    assert not any(pool.any() for pool in ours.pools), "what trials stored is gone"


def test_ours_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **FLASH3)
    found, choice, ours = chosen(("triton", "flash3"), measured([4, 5], [4, 4]))
    assert found is ours
    assert str(choice).startswith("attention: triton (")


def test_a_library_that_is_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast: here it swaps keys and values."""

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return flash_attn_with_kvcache(q, v, k, **options)

    install(monkeypatch, flash_attn_interface={"flash_attn_with_kvcache": wrong})
    found, choice, ours = chosen(("triton", "flash3"), measured([4], [4]))
    assert found is ours
    assert choice.why == "decode rows: flash3 failed; chunks: flash3 failed"


def test_info_shows_who_will_be_timed(
    dummy_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = EngineOptions(model=str(dummy_dir), device="cpu", load_format="dummy")
    found = resolve(options, find(dummy_dir))
    info.info(options)
    assert "attention" not in capsys.readouterr().out
    monkeypatch.setattr(info, "resolve", lambda *_: dataclasses.replace(found, attention=("triton", "flash3")))
    info.info(options)
    assert "\nattention     triton or flash3: timed at the start, the faster runs\n" in capsys.readouterr().out


def test_what_was_asked_for_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **FLASHINFER)
    found, choice, _ = chosen(("flashinfer",), lambda body: pytest.fail("timed"))
    assert isinstance(found, LibraryAttention)
    assert (choice.decode, choice.chunks) == ("flashinfer", "triton")


def test_a_build_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash_attn_interface={})
    with pytest.raises(ConfigError, match="attention flash3: it is installed, but cannot be loaded: "):
        chosen(("flash3",), lambda body: 1.0)


def test_trials_stay_within_the_limits() -> None:
    pools = own().pools
    trials = Trials(pools, NUM_HEADS, LIMITS)
    for trial in trials.decodes() + trials.chunks():
        batch = trial.batch
        assert batch.tables[0].shape[1] == LIMITS.max_blocks
        assert int(batch.tables[0].max()) < LIMITS.num_blocks
        assert len(trial.heads) == len(batch.slots[0]) <= LIMITS.max_batch_tokens
        assert len(set(batch.slots[0].tolist())) == len(batch.slots[0]), "no two tokens share a place"
        assert batch.max_decode_length <= LIMITS.max_model_len
    assert {trial.batch.num_decodes for trial in trials.decodes()} == {1, LIMITS.num_rows}
    assert {(trial.batch.chunks[0].start, trial.batch.chunks[0].count) for trial in trials.chunks()} == {
        (0, 9),
        (51, 9),
    }


def test_nothing_is_imported_to_see_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flashinfer={})
    assert names() == ("triton", "flashinfer")
    assert sys.modules["flashinfer.decode"] is None


class LibraryKit(CpuKit):
    """The CPU's kit, with a GPU's attention and its KV layout."""

    def settings(self, options: EngineOptions, model: ModelConfig) -> Settings:
        return dataclasses.replace(super().settings(options, model), attention=("flash3",))

    def assemble(
        self,
        device: Device,
        model: LoadedModel,
        resolved: Resolved,
        progress: BuildProgress | None,
        *,
        processed: bool = False,
        group: RankGroup = ONE_RANK,
    ) -> Built:
        assert group is ONE_RANK
        kv = make_kv_store(device, resolved, heads_first=False)
        attention, choice = choose_attention(device, kv, resolved)
        runner = Runner(device, resolved.limits, kv, Step(model, attention, pick))
        return Built(resolved, device, runner, in_blocks(kv, resolved), attention=choice)


def test_the_engine_runs_on_a_library(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decode rows, float32, on the CPU's streams: tokens as with the reference."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [list(range(1, 30)), [5], list(range(40, 51))]
    options: dict[str, Any] = {"depth": 2, "check": True, "native": False, "num_blocks": 16, "max_batch_tokens": 12}
    with LLM(tiny_dir, **CPU, **options) as llm:
        expected = [item.token_ids for item in llm.generate(prompts, params)]
    install(monkeypatch, **FLASH3)
    monkeypatch.setitem(KITS, "cpu", LibraryKit)
    with LLM(tiny_dir, **CPU, **options) as llm:
        assert llm.engine.monitor.attention() == "attention: flash3 (the only candidate)"
        assert [item.token_ids for item in llm.generate(prompts, params)] == expected
