"""FP8 weights: checkpoints in every spelling, quantization on load, and what is wrong with files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_files import SIZES, SPELLINGS, compressed, quantize, write_whole
from safetensors.torch import load_file, save_file
from tiny_models import CPU, full_logits, load, random_tokens, save_hf

from gapless import LLM, SamplingParams
from gapless.errors import ConfigError, CorruptModel, UnsupportedModel
from gapless.models import fp8
from gapless.models.fp8 import Fp8Scheme
from gapless.models.linear import plain
from gapless.models.loader import load_config, open_weights
from gapless.models.source import resolve
from gapless.models.weight import Weight, stacked

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_checkpoint_is_what_its_numbers_and_scales_stand_for(spelling: str, tmp_path: Path) -> None:
    save_hf(tmp_path, **SIZES)
    whole = quantize(tmp_path, spelling, but="layers.0.mlp.up_proj")  # beside a gate that is FP8
    tokens = random_tokens(12)
    expected = full_logits(load(write_whole(tmp_path / "whole", whole, tmp_path)), tokens)
    torch.testing.assert_close(full_logits(load(tmp_path), tokens), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full_logits(load(tmp_path, quantization="none"), tokens), expected, rtol=1e-5, atol=1e-5)


def test_weights_stay_narrow_until_a_product_needs_them(tmp_path: Path) -> None:
    save_hf(tmp_path, **SIZES)
    quantize(tmp_path, "fp8 in blocks", but="k_proj")
    source = resolve(tmp_path)
    read = open_weights(source, load_config(source), dtype=torch.bfloat16, device=CPU)
    narrow, plain_one = read(Q_PROJ), read(Q_PROJ.replace("q_proj", "k_proj"))
    assert narrow.data.dtype == torch.float8_e4m3fn
    assert narrow.scales is not None
    assert narrow.scales.shape == (192, 2)
    assert plain_one.scheme.name == "plain"
    assert narrow.dense().dtype == torch.bfloat16


def test_equals_what_transformers_makes_of_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
    save_hf(tmp_path, **sizes, num_hidden_layers=1)
    quantize(tmp_path, "fp8 in blocks")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_tokens(12)
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0].float()
    assert (full_logits(load(tmp_path), tokens) - expected).norm() / expected.norm() < 1e-2  # theirs may be rounded


def test_quantized_on_load(tmp_path: Path) -> None:
    """Every row has the scale by which its largest number just fits, so nothing is wrong by more than a 16th."""
    save_hf(tmp_path, **SIZES)
    source = resolve(tmp_path)
    config = load_config(source)
    as_is = open_weights(source, config, dtype=torch.float32, device=CPU)
    read = open_weights(source, config, dtype=torch.float32, device=CPU, quantization="fp8")
    for name in ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"):
        assert torch.equal(read(f"model.{name}").dense(), as_is(f"model.{name}").dense())
    weight, exact = read(Q_PROJ), as_is(Q_PROJ).dense()
    assert weight.scheme.name == "fp8"
    found = weight.dense()
    largest = exact.abs().amax(dim=1, keepdim=True)
    assert not torch.equal(found, exact)
    assert ((found - exact).abs() <= exact.abs() / 16 + largest * 2**-9 / 448).all()
    torch.testing.assert_close(found.abs().amax(dim=1, keepdim=True), largest)


@pytest.mark.parametrize("native", [True, False])
def test_an_engine_of_fp8_weights(native: bool, tmp_path: Path) -> None:
    """Its tokens are those of the same weights made whole, whoever reads them."""
    save_hf(tmp_path, **SIZES)
    whole = write_whole(tmp_path / "whole", quantize(tmp_path, "compressed, channel"), tmp_path)
    options: dict[str, Any] = {"device": "cpu", "native": native, "dtype": "float32", "max_model_len": 64}
    params, found = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), []
    for folder in (tmp_path, whole):
        with LLM(folder, **options) as llm:
            found.append([list(result.token_ids) for result in llm.generate([[1, 2, 3], [5]], params)])
    assert found[0] == found[1]


def test_stacked_and_picked_rows_keep_their_scales() -> None:
    scheme = Fp8Scheme(torch.float32)
    first, second = torch.randn(4, 256), torch.randn(3, 256) * 100
    weights = [Weight(data, scheme, scales) for data, scales in map(fp8.quantize, (first, second))]
    in_blocks = Weight(weights[1].data, scheme, torch.rand(3, 2))
    both = scheme.rows(stacked([weights[0], in_blocks]), torch.tensor([6, 0, 4]))
    assert torch.equal(both.dense(), torch.stack((in_blocks.dense()[2], weights[0].dense()[0], in_blocks.dense()[0])))
    mixed = stacked([weights[0], plain(second)])
    assert mixed.scheme.name == "plain"
    assert torch.equal(mixed.dense()[4:], second)


def test_a_norm_is_folded_before_weights_are_quantized() -> None:
    scheme, weight, gain = Fp8Scheme(torch.float32), torch.randn(8, 64), torch.rand(64) + 0.5
    folded = scheme.quantized(Weight(weight, scheme), gain)
    assert torch.equal(folded.dense(), scheme.dense(Weight(weight * gain, scheme)))


BAD_CONFIGS = {
    "an unknown method": ({"quant_method": "gptq"}, "quantization_config ('gptq') is not supported"),
    "another format": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    "small blocks": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
    "packed": (compressed("channel") | {"format": "pack-quantized"}, "format 'pack-quantized'"),
    "4 bits": (compressed("channel", num_bits=4), "weights of 4 bits of type 'float'"),
    "groups": (compressed("group"), "strategy 'group' is not supported"),
    "no groups": (compressed("channel") | {"config_groups": {}}, "config_groups has no group"),
    "sparse": (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "a list": ([1], "quantization_config is [1], not an object"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configs_that_are_refused(name: str, tmp_path: Path) -> None:
    config, message = BAD_CONFIGS[name]
    save_hf(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises((UnsupportedModel, CorruptModel)) as caught:
        load(tmp_path)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value) or "quantization_config" in str(caught.value)


SCALE = Q_PROJ + "_scale"
BAD_FILES = {
    "no scale": ({SCALE: None}, f"tensor {Q_PROJ} is FP8 and has no scale: {SCALE} is missing"),
    "a scale of another shape": (
        {SCALE: torch.ones(3, 1)},
        f"tensor {SCALE} has shape (3, 1), the config says (192, 1)",
    ),
    "a scale for a tensor": ({SCALE: torch.ones(())}, f"tensor {SCALE} has shape ()"),
    "a scale that is not a number": (
        {SCALE: torch.full((192, 1), torch.nan)},
        f"tensor {SCALE} has values that are NaN",
    ),
    "a weight that is not a number": ({Q_PROJ: torch.full((192, 192), torch.nan)}, f"tensor {Q_PROJ} has values"),
    "a scale of no weight": ({"model.norm.weight_scale": torch.ones(1)}, "has no tensor model.norm.weight_scale"),
    "another type": ({Q_PROJ: torch.zeros(192, 192).to(torch.float8_e5m2)}, f"tensor {Q_PROJ} is F8_E5M2"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = BAD_FILES[name]
    save_hf(tmp_path, **SIZES)
    quantize(tmp_path, "compressed, channel")
    path = tmp_path / "model.safetensors"
    if name == "a weight that is not a number":
        changes = {Q_PROJ: changes[Q_PROJ].to(torch.float8_e4m3fn)}
    tensors = load_file(path) | changes
    save_file({key: value for key, value in tensors.items() if value is not None}, path)
    with pytest.raises((UnsupportedModel, CorruptModel)) as caught:
        load(tmp_path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_fp8_weights_without_a_word_in_the_config(tmp_path: Path) -> None:
    save_hf(tmp_path, **SIZES)
    whole = quantize(tmp_path, "compressed, channel")
    stored = load_file(tmp_path / "model.safetensors")
    folder = write_whole(tmp_path / "whole", {name: stored[name] for name in whole}, tmp_path)
    with pytest.raises(UnsupportedModel, match=r"is F8_E4M3: config\.json has no quantization_config"):
        load(folder)


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, none, fp8, got 'int8'"):
        LLM(tmp_path, quantization="int8")


def add_scales(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | scales, path)


@pytest.mark.parametrize(
    "names", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{}_proj.output_scale"]
)
def test_scales_of_the_cache(tmp_path: Path, names: str) -> None:
    """They count in an FP8 cache alone; a layer without them has 1."""
    save_hf(tmp_path, **SIZES)
    quantize(tmp_path, "compressed, tensor")
    tokens, params = list(range(3, 40)), SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 16}

    def logprobs(**more: Any) -> Any:
        with LLM(tmp_path, **options, **more) as llm:
            return llm.generate([tokens], params)[0].logprobs

    before = logprobs(native=False), logprobs(kv_dtype="fp8")
    layer = "model.layers.1."
    scales = {layer + names.format("k"): torch.tensor(1e-3), layer + names.format("v"): torch.tensor([1e-3])}
    add_scales(tmp_path, scales)
    assert load(tmp_path).kv_units == ()
    units = load(tmp_path, narrow_kv=True).kv_units
    assert [(unit.k, unit.v) for unit in units] == [(1.0, 1.0), (pytest.approx(1e-3), pytest.approx(1e-3))]
    assert logprobs(native=False) == before[0]
    assert logprobs(kv_dtype="fp8") != before[1]  # most of its numbers are the largest that FP8 has


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (torch.tensor(float("nan")), "self_attn.k_scale is nan, which is no scale"),
        (torch.tensor(0.0), "self_attn.k_scale is 0.0, which is no scale"),
        (torch.ones(2), r"self_attn.k_scale has shape \(2,\); kv_dtype fp8 takes one scale"),
    ],
)
def test_wrong_scales_of_the_cache(tmp_path: Path, scale: torch.Tensor, told: str) -> None:
    save_hf(tmp_path, **SIZES)
    quantize(tmp_path, "compressed, tensor")
    add_scales(tmp_path, {"model.layers.0.self_attn.k_scale": scale})
    with pytest.raises((CorruptModel, UnsupportedModel), match=told):
        load(tmp_path, narrow_kv=True)
    load(tmp_path)
