"""How options, model and machine become sizes, and what is refused because it cannot work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gapless.config import EngineOptions
from gapless.core.params import MAX_STOP_IDS
from gapless.device import cpu
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.errors import CapacityError, ConfigError, UnsupportedModel
from gapless.models.loader import load_config, load_model
from gapless.models.source import resolve as find
from gapless.runner.build import _dry_run, agreed, build
from gapless.runner.kv_store import block_bytes
from gapless.runner.resolve import MAX_AUTO_LEN, Resolved, resolve, settle
from rank_threads import on_ranks
from tiny import write_dummy

BLOCK_BYTES = 2 * 16 * 2 * 2 * 8 * 4  # layers, tokens, k and v, kv heads, head size, float32


def resolved(directory: Path, **options: Any) -> Resolved:
    values = {"model": str(directory), "device": "cpu", "load_format": "dummy"} | options
    return resolve(EngineOptions(**values), find(directory))


def test_the_size_of_a_block(dummy_dir: Path) -> None:
    assert block_bytes(2, 16, 2, 8, torch.float32) == BLOCK_BYTES
    found = resolved(dummy_dir, num_blocks=10)
    assert (found.limits.num_blocks, found.kv_bytes) == (10, 10 * BLOCK_BYTES)


def test_memory_is_counted_in_blocks(dummy_dir: Path) -> None:
    assert resolved(dummy_dir, kv_memory=5 * BLOCK_BYTES + 1).limits.num_blocks == 5
    assert resolved(dummy_dir, kv_memory="64KiB").limits.num_blocks == 64 * 1024 // BLOCK_BYTES


def test_no_more_blocks_than_all_rows_can_use(dummy_dir: Path) -> None:
    limits = resolved(dummy_dir, kv_memory="1GiB", max_num_rows=3).limits
    assert limits.num_blocks == 3 * limits.max_blocks == 3 * 128 // 16


def test_not_enough_memory_for_one_block(dummy_dir: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        resolved(dummy_dir, kv_memory=BLOCK_BYTES - 1)
    assert str(caught.value) == (
        f"the KV cache has {BLOCK_BYTES - 1} bytes, and one block of 16 tokens takes {BLOCK_BYTES}; "
        "raise kv_memory or lower block_size"
    )


def test_a_machine_without_memory(dummy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_memory", lambda: 100)
    with pytest.raises(CapacityError, match="33 bytes, and one block of 16 tokens takes"):
        resolved(dummy_dir)


def test_every_row_fits_into_a_step(dummy_dir: Path) -> None:
    limits = resolved(dummy_dir, max_batch_tokens=16, max_num_rows=99).limits
    assert (limits.num_rows, limits.max_batch_tokens) == (16, 16)


def test_the_length_is_the_models_or_less(dummy_dir: Path) -> None:
    assert resolved(dummy_dir).limits.max_model_len == 128
    assert resolved(dummy_dir, max_model_len=50).limits.max_model_len == 50
    with pytest.raises(ConfigError, match="max_model_len 129 is beyond the model's 128 positions"):
        resolved(dummy_dir, max_model_len=129)


def test_an_absurd_length_takes_no_memory(tmp_path: Path) -> None:
    write_dummy(tmp_path, max_position_embeddings=10**9)
    assert resolved(tmp_path).limits.max_model_len == MAX_AUTO_LEN
    assert resolved(tmp_path, max_model_len=MAX_AUTO_LEN + 1).limits.max_model_len == MAX_AUTO_LEN + 1
    with pytest.raises(CapacityError, match="max_model_len 900000000 is beyond the 16777216 tokens"):
        resolved(tmp_path, max_model_len=9 * 10**8)


def test_more_end_tokens_than_there_is_room_for(tmp_path: Path) -> None:
    write_dummy(tmp_path, eos_token_id=list(range(MAX_STOP_IDS)))
    resolved(tmp_path)
    write_dummy(tmp_path, eos_token_id=list(range(MAX_STOP_IDS + 1)))
    with pytest.raises(UnsupportedModel, match=r"17 end-of-sequence tokens \(eos_token_id\); Gapless has room for 16"):
        resolved(tmp_path)


def test_the_cache_is_float32_on_a_cpu(dummy_dir: Path) -> None:
    found = resolved(dummy_dir, dtype="bfloat16")
    assert (found.dtype, found.kv_dtype, found.device_name) == (torch.bfloat16, torch.float32, "cpu")


def test_options_reach_the_limits(dummy_dir: Path) -> None:
    limits = resolved(dummy_dir, block_size=8, prefix_cache=False, max_batch_tokens=64, max_num_rows=5).limits
    assert (limits.block_size, limits.prefix_cache, limits.max_batch_tokens, limits.num_rows) == (8, False, 64, 5)


def test_the_dry_run_makes_logits_for_no_more_places_than_rows(dummy_dir: Path) -> None:
    """What it needs is the largest step there can be; on a GPU its memory is measured."""
    config = load_config(find(dummy_dir))
    device = CpuDevice(driver=InlineDriver())
    model = load_model(find(dummy_dir), config, dtype=torch.float32, device=device.torch_device, load_format="dummy")
    sizes: list[int] = []
    noted = SimpleNamespace(
        forward=model.forward, logits=lambda hidden: sizes.append(len(hidden)) or model.logits(hidden)
    )
    options = EngineOptions(model=str(dummy_dir), device="cpu", max_num_rows=3, max_batch_tokens=20)
    _dry_run(noted, settle(options, config), device.torch_device)  # type: ignore[arg-type]
    assert sizes == [3, 3]


def test_ranks_agree_on_the_least_number_of_blocks(dummy_dir: Path) -> None:
    """Plans name blocks, so every rank must have those that any other has."""
    found = [resolved(dummy_dir, num_blocks=count) for count in (9, 7, 8)]
    agreements = on_ranks(3, lambda rank: agreed(found[rank.rank], rank, torch.device("cpu")))
    assert [(each.limits.num_blocks, each.kv_bytes) for each in agreements] == [(7, 7 * BLOCK_BYTES)] * 3


def test_one_rank_is_not_built_for_several(dummy_dir: Path) -> None:
    options = EngineOptions(model=str(dummy_dir), device="cpu", load_format="dummy", tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"^tensor_parallel 2: one rank alone is built here"):
        build(options, find(dummy_dir))


def test_ranks_divide_the_memory_of_a_cpu(dummy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of the heads, so a block takes half the bytes; and a half of the free memory."""
    monkeypatch.setattr(cpu, "available_memory", lambda: 3 * 20 * BLOCK_BYTES)
    assert resolved(dummy_dir).limits.num_blocks == resolved(dummy_dir, tensor_parallel=2).limits.num_blocks
    assert resolved(dummy_dir, tensor_parallel=2).kv_bytes == resolved(dummy_dir).kv_bytes // 2
