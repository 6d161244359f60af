"""Models cut for ranks: the parts together compute what the whole does, and no rank reads or holds all of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_gguf_families import save as save_family
from tiny_models import CPU, dense_attend, random_tokens, save_gguf

from gapless.errors import ConfigError
from gapless.models.config import ModelConfig
from gapless.models.cut import cut_config, weight_cuts, why_not_cut
from gapless.models.gguf_file import GGUFFile
from gapless.models.layers import PLAIN
from gapless.models.loader import load_config, load_model
from gapless.models.part_weights import PartWeights
from gapless.models.ranked_layers import RankedLayers
from gapless.models.shapes import weight_shapes
from gapless.models.source import ModelSource, resolve
from gapless.models.weights import SafetensorsWeights
from gapless.proof.tiny import FAMILIES, mean_of, raw_config
from rank_threads import ThreadRank, on_ranks

SPREAD = 0.2
UNDIVIDED = {"olmo2", "olmo3"}  # one norm over all heads


def save(path: Path, **changes: Any) -> ModelSource:
    """A random model of these keys, stored under the names that its family reads."""
    (path / "config.json").write_text(json.dumps(raw_config(**FAMILIES["llama"] | changes)))
    config = load_config(resolve(path))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(shape).normal_(mean_of(name, shape), SPREAD, generator=generator)
        for name, shape in weight_shapes(config).items()
    }
    save_file(weights, path / "model.safetensors")
    return resolve(path)


@torch.inference_mode()
def logits_of(source: ModelSource, tokens: torch.Tensor, rank: ThreadRank | None = None) -> torch.Tensor:
    config, layers = load_config(source), PLAIN
    if rank is not None:
        layers = RankedLayers(PLAIN, rank, config.vocab_size)
        config = cut_config(config, rank.rank, rank.size)
    model = load_model(source, config, dtype=torch.float32, device=CPU, layers=layers)
    attend = dense_attend(config.num_heads, config.num_kv_heads)
    return model.logits(model.forward(tokens, torch.arange(len(tokens)), attend))


def check(source: ModelSource, num_ranks: int, vocab_size: int) -> None:
    tokens = random_tokens(vocab_size, 30)
    whole, parts = logits_of(source, tokens), on_ranks(num_ranks, partial(logits_of, source, tokens))
    for part in parts:
        torch.testing.assert_close(part, whole, atol=1e-4, rtol=1e-4)
        assert torch.equal(part, parts[0])


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNDIVIDED))
def test_parts_compute_what_the_whole_does(family: str, num_ranks: int, tmp_path: Path) -> None:
    source = save(tmp_path, **FAMILIES[family])
    check(source, num_ranks, load_config(source).vocab_size)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_of_a_gguf(arch: str, num_ranks: int, tmp_path: Path) -> None:
    save_gguf(tmp_path / "model.gguf", arch)
    check(resolve(tmp_path / "model.gguf"), num_ranks, 97)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_of_experts_with_biases_in_a_gguf(num_ranks: int, tmp_path: Path) -> None:
    save_family(tmp_path, "gpt-oss")
    check(resolve(tmp_path / "m.gguf"), num_ranks, 97)


@pytest.mark.parametrize(("axis", "begin", "end"), [(0, 1, 3), (1, 0, 32), (1, 40, 100)])
def test_a_stretch_of_a_quantized_tensor(axis: int, begin: int, end: int, tmp_path: Path) -> None:
    """Along rows of blocks the borders need not be those of blocks."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    rows = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("x", gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "model.gguf")
    expected = np.take(file.load("x"), np.arange(begin, end), axis)
    np.testing.assert_array_equal(file.load_stretch("x", axis, begin, end), expected)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNDIVIDED))
def test_parts_have_the_shapes_that_the_config_of_a_rank_says(family: str, tmp_path: Path) -> None:
    config = load_config(save(tmp_path, **FAMILIES[family]))
    for rank in range(4):
        local = cut_config(config, rank, 4)
        assert local.shard is not None
        parts = PartWeights(SafetensorsWeights(tmp_path), weight_cuts(local.shard))
        table = {f"{config.names.embedding}.weight", f"{config.names.head}.weight"}
        expected = {name: shape for name, shape in weight_shapes(local).items() if name not in table}
        assert {name: tuple(parts.read(name).shape) for name in expected} == expected
        assert all(len(parts.read(name)) == -(-config.vocab_size // 4) for name in table & parts.shapes.keys())


def test_no_rank_reads_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads its share of what is divided, and what is small and the same for all."""
    source = save(tmp_path, hidden_size=64, intermediate_size=512, num_key_value_heads=4)
    config, num_bytes = load_config(source), []
    whole = [name for name, shape in weight_shapes(config).items() if len(shape) == 1]
    total = sum(4 * int(np.prod(shape)) for shape in weight_shapes(config).values())
    same = sum(4 * weight_shapes(config)[name][0] for name in whole)
    read: list[str] = []
    monkeypatch.setattr(SafetensorsWeights, "read", _watched(SafetensorsWeights.read, read))
    for rank in range(4):
        shard = cut_config(config, rank, 4).shard
        assert shard is not None
        parts = PartWeights(SafetensorsWeights(tmp_path), weight_cuts(shard))
        for name in parts.shapes:
            parts.read(name)
        num_bytes.append(parts.num_bytes)
    assert set(read) == set(whole)
    padding = 2 * 3 * 4 * config.hidden_size  # rows of zeros that 97 tokens leave, in two tables
    assert sum(num_bytes) <= total + 3 * same + padding
    assert max(num_bytes) < 0.27 * total


def _watched(read: Any, names: list[str]) -> Any:
    def watched(self: SafetensorsWeights, name: str) -> torch.Tensor:
        names.append(name)
        found: torch.Tensor = read(self, name)
        return found

    return watched


REFUSED = {
    "heads": (3, {}, "4 attention heads cannot be divided among 3 ranks"),
    "mlp": (4, {"intermediate_size": 66}, "an MLP of size 66 cannot be divided among 4 ranks"),
    "kv heads": (
        4,
        {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
        "6 key-value heads cannot be divided among, or repeated on, 4 ranks",
    ),
    "norm": (2, FAMILIES["olmo2"], "one norm over all heads needs them on one rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_cannot_be_divided(case: str, tmp_path: Path) -> None:
    num_ranks, changes, reason = REFUSED[case]
    config: ModelConfig = load_config(save(tmp_path, **changes))
    with pytest.raises(ConfigError, match=f"^tensor_parallel {num_ranks}: .*: {reason}$"):
        cut_config(config, 0, num_ranks)


def test_every_family_can_be_cut_but_those_with_one_norm_over_all_heads(tmp_path: Path) -> None:
    refused = {family for family in FAMILIES if why_not_cut(load_config(save(tmp_path, **FAMILIES[family])), 2)}
    assert refused == UNDIVIDED
