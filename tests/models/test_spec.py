"""What a model needs is said by its specs, and what a backend lacks is said before any weight is read."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import raw_config

from gapless.errors import UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.layers import PlainLayers
from gapless.models.registry import hf_config
from gapless.models.rope_config import RopeConfig
from gapless.models.spec import NATIVE, ExpertSpec, Feature, LayerSpec, attention_features, lacking
from gapless.native import library
from gapless.runner.native_model import why_not

PLAIN = hf_config(raw_config())
LAYER = PLAIN.layers[0]


def with_last(layer: LayerSpec) -> ModelConfig:
    """Its last layer differs from the first."""
    return replace(PLAIN, layers=(LAYER, layer))


def of(part: str, **changes: Any) -> ModelConfig:
    return with_last(replace(LAYER, **{part: replace(getattr(LAYER, part), **changes)}))


def needs(config: ModelConfig) -> set[Feature]:
    return {*attention_features(config.attention_specs()), *config.features()}


NORMED_EXPERTS = with_last(
    replace(LAYER, norm=replace(LAYER.norm, place="around"), mlp=replace(LAYER.mlp, experts=ExpertSpec(4, 2)))
)
CASES: list[tuple[ModelConfig, set[Feature]]] = [
    (PLAIN, set()),
    (of("attention", window=4), {Feature.WINDOW}),
    (of("attention", soft_cap=3.0), {Feature.SOFT_CAP}),
    (of("attention", sinks=True), {Feature.SINKS}),
    (of("attention", scale=0.1), {Feature.SCALE, Feature.MIXED_SCALES}),
    (of("attention", rope=RopeConfig(5.0)), {Feature.MIXED_ROPES}),
    (of("attention", rope=None), {Feature.MIXED_ROPES}),
    (of("attention", head_norm="each"), {Feature.MIXED_SIZES}),
    (of("mlp", size=7), {Feature.MIXED_SIZES}),
    (of("mlp", activation="gelu_tanh"), {Feature.ACTIVATION}),
    (of("mlp", kind="plain"), {Feature.PLAIN_MLP}),
    (of("mlp", kind="experts"), {Feature.EXPERTS}),
    (of("mlp", kind="experts", experts=ExpertSpec(4, 2)), {Feature.EXPERTS, Feature.MIXED_SIZES}),
    (with_last(replace(LAYER, parallel=True)), {Feature.PARALLEL}),
    (of("norm", kind="layer"), {Feature.LAYER_NORM}),
    (of("norm", place="around"), {Feature.NORM_AFTER}),
    (of("norm", place="after"), {Feature.NORM_AFTER}),
    (replace(PLAIN, last_norm=replace(PLAIN.last_norm, eps=0.1)), {Feature.MIXED_SIZES}),
    (replace(PLAIN, embedding_scale=2.0), {Feature.EMBEDDING_SCALE}),
    (replace(PLAIN, learned_positions=True), {Feature.POSITIONS}),
    (replace(PLAIN, logit_soft_cap=30.0), {Feature.LOGIT_CAP}),
]


@pytest.mark.parametrize(("config", "expected"), CASES, ids=[str(sorted(expected)) for _, expected in CASES])
def test_features(config: ModelConfig, expected: set[Feature]) -> None:
    assert needs(config) == expected


@pytest.mark.parametrize(("config", "expected"), CASES[1:], ids=[str(sorted(expected)) for _, expected in CASES[1:]])
def test_the_native_step_says_what_it_lacks(config: ModelConfig, expected: set[Feature]) -> None:
    lacks = expected - NATIVE
    assert lacks <= {Feature.MIXED_SIZES}
    assert why_not(torch.float32, config) == (lacks.pop() if lacks else library.why_unavailable())


def test_the_native_step_runs_the_plain_decoder() -> None:
    assert why_not(torch.float32, PLAIN) == library.why_unavailable()
    assert why_not(torch.float16, PLAIN) == "float16 weights"


@pytest.mark.parametrize(("config", "expected"), CASES, ids=[str(sorted(expected)) for _, expected in CASES])
def test_what_layers_lack(config: ModelConfig, expected: set[Feature]) -> None:
    assert PlainLayers.why_not(config) is None


def test_what_fused_layers_lack() -> None:
    pytest.importorskip("triton")
    from gapless.models.invariant_layers import InvariantLayers
    from gapless.models.skinny_layers import SkinnyLayers

    assert SkinnyLayers.why_not(PLAIN) is None
    assert SkinnyLayers.why_not(of("norm", kind="layer")) == "its layers have no layer norms"
    for config, name in (
        (of("norm", place="around"), "norms after attention and MLP"),
        (of("mlp", activation="gelu_tanh"), "activations other than SiLU"),
    ):
        assert SkinnyLayers.why_not(config) is None
        assert InvariantLayers.why_not(config) == f"its layers have no {name}"
    assert SkinnyLayers.why_not(replace(PLAIN, embedding_scale=2.0)) is None


def test_what_general_layers_lack() -> None:
    pytest.importorskip("triton")
    from gapless.models.general_layers import GeneralLayers

    assert all(GeneralLayers.why_not(config) is None for config, _ in CASES)
    assert GeneralLayers.why_not(NORMED_EXPERTS) == "its layers have no norms after experts"


def test_norms_after_experts_are_for_torch_on_a_cpu_alone() -> None:
    assert Feature.NORM_AFTER_EXPERTS in needs(NORMED_EXPERTS)
    assert why_not(torch.float32, NORMED_EXPERTS) == "norms after experts"
    assert PlainLayers.why_not(NORMED_EXPERTS) is None


def test_what_the_attention_kernels_lack() -> None:
    pytest.importorskip("triton")
    from gapless.attention.invariant import InvariantAttention
    from gapless.attention.triton import TritonAttention

    for changes, name in (({"window": 4}, "sliding windows"), ({"sinks": True}, "attention sinks")):
        specs = of("attention", **changes).attention_specs()
        assert TritonAttention.why_not(specs) is None
        assert InvariantAttention.why_not(specs) == f"the batch-invariant attention kernels have no {name}"


def test_the_first_of_what_is_lacking_is_named() -> None:
    assert lacking([Feature.SINKS, Feature.WINDOW], {Feature.SINKS}) is Feature.WINDOW
    assert lacking([Feature.SINKS], {Feature.SINKS}) is None


def test_heads_are_alike_in_all_layers() -> None:
    with pytest.raises(UnsupportedModel, match="heads differ"):
        of("attention", head_dim=16)
