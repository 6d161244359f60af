"""Frequencies, tables and the rotation against transformers and against first principles."""

from typing import Any

import pytest
import torch
from tiny_models import raw_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from gapless.errors import CorruptModel
from gapless.models.registry import hf_config
from gapless.models.rope import RotaryTable, apply_rope, inverse_frequencies
from gapless.models.rope_config import RopeConfig

CPU = torch.device("cpu")
KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "truncate": False},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["rope_type"])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_equals_transformers(kind: dict[str, Any], head_dim: int) -> None:
    raw = raw_config(head_dim=head_dim, max_position_embeddings=2048, rope_parameters=kind | {"rope_theta": 50000.0})
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))
    rope = hf_config(raw).layers[0].attention.rope
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), theirs.inv_freq, rtol=1e-6, atol=0)

    positions = torch.randint(0, 2048, (50,))
    q = torch.randn(50, 3, head_dim)
    cos, sin = theirs(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    ours = apply_rope(q, RotaryTable(rope, head_dim, 2048, torch.float32, CPU).at(positions))
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-3)
    near = positions < 64
    torch.testing.assert_close(ours[near], expected[0].transpose(0, 1)[near], rtol=1e-5, atol=1e-5)


def test_scores_depend_on_distance_only() -> None:
    table = RotaryTable(RopeConfig(), 16, 64, torch.float32, CPU)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(i: int, j: int) -> torch.Tensor:
        return (apply_rope(q, table.at(torch.tensor([i]))) * apply_rope(k, table.at(torch.tensor([j])))).sum()

    torch.testing.assert_close(score(5, 2), score(43, 40), rtol=1e-4, atol=1e-4)


def test_frequency_factors_of_a_gguf_equal_llama3() -> None:
    llama3 = RopeConfig(500000.0, "llama3", 8.0, 8192)
    plain = inverse_frequencies(RopeConfig(500000.0), 64)
    factors = tuple((plain / inverse_frequencies(llama3, 64)).tolist())
    explicit = inverse_frequencies(RopeConfig(500000.0, freq_factors=factors), 64)
    torch.testing.assert_close(explicit, inverse_frequencies(llama3, 64))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(factor=1e-38, kind="linear", freq_factors=(1e-3,) * 8),
        RopeConfig(freq_factors=(0.0,) * 8),
        RopeConfig(freq_factors=(float("nan"),) * 8),
        RopeConfig(kind="yarn", factor=2.0, original_max_positions=64, beta_fast=5e-324),
        RopeConfig(kind="yarn", factor=2.0, original_max_positions=0),
    ],
)
def test_parameters_that_no_angles_come_of(rope: RopeConfig) -> None:
    with pytest.raises(CorruptModel, match=f"rope of kind {rope.kind}"):
        inverse_frequencies(rope, 16)
