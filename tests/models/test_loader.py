"""Loading: what is missing, mis-shaped or damaged is named; dummy weights need no files."""

import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CPU, full_logits, load, random_tokens, raw_config, save_gguf, save_hf

from gapless import LLM
from gapless.errors import ConfigError, CorruptModel, UnsupportedModel
from gapless.models.loader import load_config, load_model
from gapless.models.source import resolve

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def rewrite(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_missing_tensors_are_listed_five_at_most(tmp_path: Path) -> None:
    save_hf(tmp_path)
    weights = tmp_path / "model.safetensors"
    rewrite(weights, {Q_PROJ: None})
    with pytest.raises(CorruptModel, match=f"missing weights: {Q_PROJ}$"):
        load(tmp_path)
    rewrite(weights, {name: None for name in load_file(weights) if "layers.0" in name})
    with pytest.raises(CorruptModel, match="and 5 more") as caught:
        load(tmp_path)
    assert str(caught.value).count("model.layers") == 5


def test_wrong_shape(tmp_path: Path) -> None:
    save_hf(tmp_path)
    rewrite(tmp_path / "model.safetensors", {Q_PROJ: torch.zeros(3, 4)})
    with pytest.raises(CorruptModel, match=rf"model\.safetensors: tensor {Q_PROJ} has shape \(3, 4\)"):
        load(tmp_path)


def test_integer_weights(tmp_path: Path) -> None:
    save_hf(tmp_path)
    rewrite(tmp_path / "model.safetensors", {Q_PROJ: torch.zeros(48, 48, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=Q_PROJ):
        load(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 100, -1000])
def test_truncated_file(tmp_path: Path, length: int) -> None:
    save_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        load(tmp_path)


def with_header(path: Path, header: dict[str, Any], length: int | None = None) -> None:
    text = json.dumps(header).encode()
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data[end:])


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 0])
def test_a_header_of_absurd_length(tmp_path: Path, length: int) -> None:
    save_hf(tmp_path)
    with_header(tmp_path / "model.safetensors", {}, length)
    with pytest.raises(CorruptModel, match=r"model\.safetensors: damaged or cut short"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [0, 0]},
        {"data_offsets": [8, 4]},
        {"dtype": 5},
        {"dtype": "F64"},
        {"shape": [-1]},
        {"shape": [2**40, 2**40]},
        {"shape": 3},
    ],
)
def test_a_header_that_lies(tmp_path: Path, change: dict[str, Any]) -> None:
    """Offsets that overlap or leave the file, types and shapes that there are not."""
    save_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    header[Q_PROJ] |= change
    with_header(path, header)
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        load(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    save_hf(tmp_path, max_shard_size="30KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CorruptModel, match="model-00002"):
        load(tmp_path)


def test_damaged_index(tmp_path: Path) -> None:
    save_hf(tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CorruptModel, match=r"index\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ({"weight_map": 5}, "weight_map is 5"),
        ({"weight_map": {"a": 5}}, "'a' lies in 5"),
        ({"weight_map": {"a": ["b"]}}, "'a' lies in"),
        ({"weight_map": {"a": "../model.safetensors"}}, "outside the model's folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside the model's folder"),
        ({"weight_map": {"a": "none.safetensors"}}, r"none\.safetensors: this shard is missing"),
        ({"weight_map": {"a": "x" * 5000}}, "xxx"),
        ({"weight_map": {"a": "\0"}}, "shard"),
        ({"weight_map": {"a": ""}}, "is a folder"),
        ({"weight_map": {}}, r"no \*\.safetensors"),
    ],
)
def test_indexes_that_name_no_files(tmp_path: Path, index: Any, named: str) -> None:
    save_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptModel, match=named):
        load(tmp_path)


NAMES = ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    save_hf(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CorruptModel, match=f"{name}: is a FIFO, not a regular file"):
        load(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptModel, match=f"{name}: is a folder"):
        load(tmp_path)
    path.rmdir()
    for target in (path, tmp_path / "nowhere"):
        path.symlink_to(target)
        with pytest.raises(CorruptModel, match=f"{name}: cannot be read"):
            load(tmp_path)
        path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CorruptModel, match=f"{name}: is a device"):
        load(tmp_path)


def test_links_to_files_are_read(tmp_path: Path) -> None:
    """The hub's cache is made of them."""
    save_hf(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    load(tmp_path / "snapshot")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_deep_large_and_foreign_json(tmp_path: Path, name: str) -> None:
    save_hf(tmp_path)
    path = tmp_path / name
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CorruptModel, match=f"{name}: is nested too deeply"):
        load(tmp_path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CorruptModel, match=f"{name}: is not UTF-8"):
        load(tmp_path)
    os.truncate(path, 2**40)
    with pytest.raises(CorruptModel, match=f"{name}: is larger than"):
        load(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    with pytest.raises(CorruptModel, match=r"no \*\.safetensors"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="bin"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_damaged_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CorruptModel, match=r"config\.json"):
        load(tmp_path)


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config(eos_token_id=2)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 2]}')
    assert load_config(resolve(tmp_path)).eos_token_ids == (2, 4)


def test_unused_tensors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_hf(tmp_path)
    rewrite(tmp_path / "model.safetensors", {"rotary.inv_freq": torch.ones(2)})
    with caplog.at_level(logging.DEBUG, "gapless"):
        load(tmp_path)
    assert "rotary.inv_freq" in caplog.text


def test_extra_tensors_are_refused(tmp_path: Path) -> None:
    """A bias that the config does not speak of would be left out without a word."""
    save_hf(tmp_path)
    bias = Q_PROJ.replace("weight", "bias")
    rewrite(tmp_path / "model.safetensors", {bias: torch.ones(48)})
    with pytest.raises(
        CorruptModel, match=rf"model\.safetensors: the model that the config describes has no tensor {bias}"
    ):
        load(tmp_path)
    save_gguf(tmp_path / "m.gguf", "llama", extra={"blk.0.attn_k.bias": np.ones(48, np.float32)})
    with pytest.raises(CorruptModel, match=r"m\.gguf: .* has no tensor blk\.0\.attn_k\.bias"):
        load(tmp_path / "m.gguf")


def test_the_first_word_of_names_may_be_left_out(tmp_path: Path) -> None:
    save_hf(tmp_path, tie_word_embeddings=False)
    path = tmp_path / "model.safetensors"
    expected = full_logits(load(tmp_path), random_tokens())
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    assert torch.equal(full_logits(load(tmp_path), random_tokens()), expected)


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", Q_PROJ, NORM])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite(tmp_path: Path, name: str, value: float, dtype: torch.dtype) -> None:
    save_hf(tmp_path)
    tensor = load_file(tmp_path / "model.safetensors")[name]
    tensor.view(-1)[7] = value
    tensor.view(-1)[9] = -value  # their sum is NaN, not zero
    rewrite(tmp_path / "model.safetensors", {name: tensor})
    with pytest.raises(CorruptModel, match=rf"model\.safetensors: tensor {name} has values that are NaN or infinite"):
        load(tmp_path, dtype=dtype)


def test_large_weights_whose_sum_overflows_are_fine(tmp_path: Path) -> None:
    save_hf(tmp_path)
    rewrite(tmp_path / "model.safetensors", {NORM: torch.full((48,), 60_000.0)})
    load(tmp_path, dtype=torch.float16)
    rewrite(tmp_path / "model.safetensors", {NORM: torch.full((48,), 3e38)})
    load(tmp_path)
    with pytest.raises(ConfigError, match=rf"dtype float16 is too narrow for the values of tensor {NORM}; use bfloat"):
        load(tmp_path, dtype=torch.float16)


def test_a_gguf_whose_weights_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(path, "llama")
    content = path.read_bytes()
    path.write_bytes(content[:-4] + struct.pack("<f", float("nan")))
    with pytest.raises(CorruptModel, match=r"m\.gguf: tensor .* NaN or infinite"):
        load(path)


def test_native_steps_refuse_them_too(tmp_path: Path) -> None:
    save_hf(tmp_path)
    rewrite(tmp_path / "model.safetensors", {NORM: torch.full((48,), float("nan"))})
    with pytest.raises(CorruptModel, match="NaN or infinite"):
        LLM(tmp_path, device="cpu")


def test_gguf_missing_tensor(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", "llama", drop="blk.0.ffn_up.weight")
    with pytest.raises(CorruptModel, match=r"m\.gguf: missing weights: blk\.0\.ffn_up\.weight$"):
        load(tmp_path)


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    save_hf(tmp_path)
    seen: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = 2 + 2 * 9
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_dummy_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False, attention_bias=True)))
    source = resolve(tmp_path)
    config = load_config(source)

    def logits(seed: int) -> torch.Tensor:
        model = load_model(source, config, dtype=torch.float32, device=CPU, load_format="dummy", seed=seed)
        return full_logits(model, random_tokens())

    assert torch.equal(logits(3), logits(3))
    assert not torch.equal(logits(3), logits(4))
    assert logits(3).isfinite().all()


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("case", ["equal", "different", "alone"])
def test_a_head_beside_tied_embeddings(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    """transformers uses a head that differs, and takes one that is alone for the embedding."""
    import transformers

    save_hf(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    table = load_file(path)[TABLE]
    head = table.flip(0).contiguous() if case == "different" else table.clone()
    rewrite(path, {HEAD: head} | ({TABLE: None} if case == "alone" else {}))
    found = full_logits(load(tmp_path), random_tokens())
    kind: Any = transformers.AutoModelForCausalLM
    with torch.inference_mode():
        expected = kind.from_pretrained(tmp_path, dtype=torch.float32)(random_tokens()[None]).logits[0]
    assert torch.allclose(found, expected, atol=1e-4)
    assert ("both are used" in caplog.text) == (case == "different")
