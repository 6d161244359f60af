"""Every bad input gives an error of the tree, which names the value and the limit, and harms nobody else.

Prompt files: test_prompt_file and test_cli. Each sampling parameter: core/test_params.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gapless import LLM, SamplingParams
from gapless.client import Job
from gapless.config import EngineOptions, parse_bytes
from gapless.errors import (
    CapacityError,
    ConfigError,
    CorruptModel,
    GaplessError,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    PromptTooLong,
    UnsupportedModel,
)
from gapless.models.source import resolve
from tiny import CPU, MAX_LEN, VOCAB_SIZE, raw_config, truth, write_dummy

GREEDY = SamplingParams(max_tokens=4, temperature=0)


@contextmanager
def refused(kind: type[GaplessError], *parts: str) -> Iterator[None]:
    """Expect an error of exactly this class whose message has all these parts."""
    with pytest.raises(GaplessError) as caught:
        yield
    assert caught.type is kind
    for part in parts:
        assert part in str(caught.value)


# -- prompts -------------------------------------------------------------------------------------------------------

PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no prompts": ([], ("no prompts: the list is empty",)),
    "empty text": ("", ("the prompt is empty",)),
    "empty text among others": (["a", ""], ("prompt 1: ", "the prompt is empty")),
    "empty ids": ([[]], ("the prompt is empty; it needs at least one token",)),
    "id too high": ([[1, VOCAB_SIZE]], (f"token id {VOCAB_SIZE} at index 1", f"vocabulary of {VOCAB_SIZE}")),
    "id negative": ([[-1]], ("token id -1 at index 0", f"vocabulary of {VOCAB_SIZE}")),
    "id beyond 64 bits": ([[10**30]], (f"token id {10**30}",)),
    "bad id among others": (["a", [99]], ("prompt 1: ", "token id 99")),
    "a fraction": ([[1, 2.5]], ("a prompt is text or a list of token ids, got [1, 2.5]",)),
    "a truth value": ([[True]], ("got [True]",)),
    "nothing": ([None], ("a prompt is text or a list of token ids, got None",)),
    "nothing at all": (None, ("prompts must be a list, got NoneType",)),
    "a number": (5, ("prompts must be a list, got int",)),
    "bytes": (b"abc", ("a prompt is text or a list of token ids, got b'abc'",)),
    "half a character": ("ab\ud800", ("not valid Unicode", "position 2")),
    "something long": ([["x" * 500]], ("...",)),
}


@pytest.mark.parametrize(("prompts", "parts"), PROMPTS.values(), ids=PROMPTS.keys())
def test_prompts(tiny_llm: LLM, prompts: Any, parts: tuple[str, ...]) -> None:
    with refused(InvalidRequest, *parts):
        tiny_llm.generate(prompts, GREEDY)
    deadline = time.monotonic() + 10
    while (load := tiny_llm.engine.monitor.load()).num_running + load.num_waiting > 0:
        assert time.monotonic() < deadline, "the others go on"
        time.sleep(0.001)


def test_a_bad_prompt_is_found_by_the_time_of_the_first_result(make_llm) -> None:
    """However many prompts there are: not when its turn comes, after hours."""
    llm = make_llm(max_num_rows=1)
    checked: list[int] = []
    completed: list[int] = []
    encode = llm._client.encode

    def watched(prompt: Any) -> Any:
        checked.append(len(completed))
        return encode(prompt)

    def take(job: Job, news: Any) -> Any:
        completed.append(1)
        return job_take(job, news)

    job_take = Job.take
    with pytest.MonkeyPatch.context() as patch, refused(InvalidRequest, "prompt 9: "):
        patch.setattr(llm._client, "encode", watched)
        patch.setattr(Job, "take", take)
        llm.generate([*"abcdefghi", ""], GREEDY)
    assert checked == [0] * 4 + [1] * 6


def test_an_error_of_one_prompt_among_others_keeps_its_kind_and_its_parameter(tiny_llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match="prompt 1: This model's maximum context length") as caught:
        tiny_llm.generate(["a", "x" * 10**6], GREEDY)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", ["", [], [97], 5, None, ["a"]], ids=repr)
def test_prompts_of_streams_are_checked_before_the_first_delta(tiny_llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        tiny_llm.stream(prompt, GREEDY)


def test_the_engine_goes_on_after_bad_input(tiny_llm: LLM, tiny_dir: Path) -> None:
    for prompts, _ in PROMPTS.values():
        with pytest.raises(InvalidRequest):
            tiny_llm.generate(prompts, GREEDY)
    assert tiny_llm.generate("a", GREEDY)[0].token_ids == truth(tiny_dir, "a").tokens[:4]


def test_a_prompt_that_leaves_no_room_for_a_token(tiny_llm: LLM) -> None:
    numbers = f"{MAX_LEN + 1} tokens ({MAX_LEN} in the prompt and 1 to generate)"
    with refused(PromptTooLong, f"context length is {MAX_LEN} tokens", numbers):
        tiny_llm.generate([[1] * MAX_LEN], GREEDY)
    assert len(tiny_llm.generate([[1] * (MAX_LEN - 1)], GREEDY)[0].token_ids) == 1


def test_a_prompt_that_does_not_fit_the_cache(make_llm) -> None:
    llm = make_llm(num_blocks=2)
    with refused(PromptTooLong, "requested 34 tokens", "room for 32 tokens (2 blocks of 16)", "raise num_blocks"):
        llm.generate([[1] * 30], GREEDY)
    assert len(llm.generate([[1] * 28], GREEDY)[0].token_ids) <= 4


def test_text_without_a_tokenizer(dummy_dir: Path) -> None:
    with LLM(dummy_dir, load_format="dummy", **CPU, num_blocks=8) as llm:
        with refused(InvalidRequest, "has no tokenizer; give the prompt as token ids"):
            llm.generate("Hello", GREEDY)
        with refused(InvalidRequest, "has no tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])
        with refused(InvalidRequest, "stop strings need a tokenizer; use stop_token_ids"):
            llm.generate([[1, 2]], SamplingParams(stop="x"))


CHATS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ([], ("messages must not be empty",)),
    "nothing": (None, ("messages must be a list",)),
    "text": ("hi", ("messages must be a list, got str",)),
    "one message": ({"role": "user", "content": "x"}, ("messages must be a list, got dict",)),
    "a number": (5, ("messages must be a list, got int",)),
    "no role": ([{"content": "x"}], ("messages[0] has no role",)),
    "no content": ([{"role": "user"}], ("messages[0] has no content",)),
    "a list and a message": ([[{"role": "user", "content": "x"}], {"role": "user", "content": "x"}], ("prompt 1: ",)),
}


@pytest.mark.parametrize(("messages", "parts"), CHATS.values(), ids=CHATS.keys())
def test_chats(tiny_llm: LLM, messages: Any, parts: tuple[str, ...]) -> None:
    with refused(InvalidRequest, *parts):
        tiny_llm.chat(messages, GREEDY)


# -- sampling parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"max_tokens": 0}, "max_tokens must be between 1 and 2147483647, got 0"),
        ({"max_tokens": -1}, "got -1"),
        ({"temperature": -0.5}, "temperature must be at least 0.0 and at most 100.0, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be a number, got nan"),
        ({"temprature": 1}, "unknown parameter 'temprature' (did you mean 'temperature'?)"),
    ],
)
def test_parameters(values: dict[str, Any], part: str) -> None:
    with refused(InvalidRequest, part):
        SamplingParams.from_dict(values)


def test_parameters_that_are_none_or_too_few(tiny_llm: LLM) -> None:
    with refused(InvalidRequest, "params must be SamplingParams, got {'max_tokens': 3}"):
        tiny_llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
    with refused(InvalidRequest, "1 sampling parameters for 2 prompts; give one, or one each"):
        tiny_llm.generate(["a", "b"], [GREEDY])
    with refused(InvalidRequest, "stop_token_ids: token id 97", f"vocabulary of {VOCAB_SIZE}"):
        tiny_llm.generate("a", SamplingParams(stop_token_ids=[97]))


# -- options -------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown": ({"dept": 2}, ("unknown option 'dept' (did you mean 'depth'?)", "known: model, device")),
    "unlike any": ({"zzz": 2}, ("unknown option 'zzz'; known",)),
    "device": ({"device": "tpu"}, ("device must be one of auto, cuda, cpu, got 'tpu'",)),
    "dtype": ({"dtype": "int8"}, ("dtype must be one of", "got 'int8'")),
    "kv_dtype": ({"kv_dtype": "int8"}, ("kv_dtype must be one of auto, fp8, got 'int8'",)),
    "quantization": ({"quantization": "int4"}, ("quantization must be one of auto, none, fp8, got 'int4'",)),
    "load_format": ({"load_format": "pt"}, ("load_format must be one of auto, dummy, got 'pt'",)),
    "attention": (
        {"attention": "flash2"},
        ("attention must be one of auto, triton, flash3, flashinfer, got 'flash2'",),
    ),
    "depth 0": ({"depth": 0}, ("depth must be a whole number between 1 and 8, got 0",)),
    "depth 9": ({"depth": 9}, ("between 1 and 8, got 9",)),
    "depth text": ({"depth": "two"}, ("got 'two'",)),
    "block_size": ({"block_size": 0}, ("block_size must be a whole number between 1 and 1024, got 0",)),
    "num_blocks": ({"num_blocks": -1}, ("num_blocks must be a whole number between 1 and", "got -1")),
    "max_batch_tokens": ({"max_batch_tokens": 1.5}, ("max_batch_tokens must be a whole number", "got 1.5")),
    "max_step_time": ({"max_step_time": -0.5}, ("max_step_time must be a number of seconds", "got -0.5")),
    "max_num_rows": ({"max_num_rows": True}, ("max_num_rows must be a whole number", "got True")),
    "max_model_len": ({"max_model_len": 0}, ("max_model_len must be a whole number", "got 0")),
    "beyond the model": ({"max_model_len": 129}, ("max_model_len 129 is beyond the model's 128 positions",)),
    "seed": ({"seed": 2**63}, (f"seed must be a whole number between {-(2**63)} and {2**63 - 1}", f"got {2**63}")),
    "num_threads": ({"num_threads": 0}, ("num_threads must be a whole number between 1 and 1024, got 0",)),
    "tensor_parallel": ({"tensor_parallel": 0}, ("tensor_parallel must be a whole number between 1 and 1024, got 0",)),
    "ranks_on_ray": ({"ranks_on_ray": ""}, ("ranks_on_ray must be HOST:PORT, local or auto, got ''",)),
    "rank_placement": (
        {"rank_placement": "far"},
        ("rank_placement must be one of strict_pack, pack, spread, got 'far'",),
    ),
    "rank_timeout": ({"rank_timeout": 0}, ("rank_timeout must be above 0",)),
    "prefix_cache": ({"prefix_cache": 1}, ("prefix_cache must be true or false, got 1",)),
    "check": ({"check": None}, ("check must be true or false, got None",)),
    "native": ({"native": None}, ("native must be true or false, got None",)),
    "batch_invariant": ({"batch_invariant": 1}, ("batch_invariant must be true or false, got 1",)),
    "trace": ({"trace": ""}, ("trace must be the name of a file", "got ''")),
    "record": ({"record": None}, ("record must be true or false, got None",)),
    "allow_special_tokens": ({"allow_special_tokens": "yes"}, ("allow_special_tokens must be true or false",)),
    "trace of nothing": ({"trace": "T.json", "record": False}, ("no timeline to write without record",)),
    "trace nowhere": ({"trace": "/no/such/folder/T.json"}, ("no such folder",)),
    "interleave": ({"interleave": -1}, ("interleave must be a whole number between 0", "got -1")),
    "kv_memory": ({"kv_memory": "a lot"}, ("kv_memory must be a size such as 2GiB or 512MiB, got 'a lot'",)),
    "kv_memory 0": ({"kv_memory": 0}, ("kv_memory must be above 0, got 0",)),
}


@pytest.mark.parametrize(("options", "parts"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options(tiny_dir: Path, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(ConfigError, *parts):
        LLM(tiny_dir, **options)


def test_every_option_has_a_bad_value_above() -> None:
    asked = {name for options, _ in OPTIONS.values() for name in options} - {"dept", "zzz"}
    assert asked == set(EngineOptions.__dataclass_fields__) - {"model"}


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("512 MiB", 2**29), ("1.5k", 1536), ("7", 7), ("3b", 3), ("1T", 2**40), (12, 12), ("2gb", 2**31)],
)
def test_sizes_of_memory(text: int | str, size: int) -> None:
    assert parse_bytes("kv_memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 G i B", "0.0001", "nan", True, None, 1.5j], ids=repr)
def test_what_is_no_size_of_memory(text: Any) -> None:
    with refused(ConfigError, "kv_memory must be"):
        parse_bytes("kv_memory", text)


def test_not_enough_memory_for_one_block(tiny_dir: Path) -> None:
    with refused(CapacityError, "the KV cache has 1024 bytes", "one block of 16 tokens takes 4096", "raise kv_memory"):
        LLM(tiny_dir, kv_memory="1k", **CPU)


def test_more_memory_than_there_is(tiny_dir: Path) -> None:
    with refused(CapacityError, "no memory for kv: it takes 8796093022208 bytes", "are free"):
        LLM(tiny_dir, num_blocks=2**31 - 1, **CPU)


# -- models --------------------------------------------------------------------------------------------------------


def test_no_such_model(tmp_path: Path) -> None:
    with refused(ModelNotFound, str(tmp_path / "none"), "no such directory or file"):
        LLM(tmp_path / "none")
    with refused(ModelNotFound, "the directory has no config.json"):
        LLM(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"x")
    with refused(ModelNotFound, "a model file must be a .gguf"):
        LLM(tmp_path / "weights.pt")


@pytest.mark.parametrize("model", [None, 5])
def test_a_model_that_is_no_name(model: Any) -> None:
    with refused(ConfigError, "model must be a name or a path"):
        LLM(model)


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garbage_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 5000)


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def missing_weight(directory: Path) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path)


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"vocab_size": ')


def other_sizes(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(raw_config(hidden_size=64)))


def broken_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": 5}')


DAMAGES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (cut_weights, ("model.safetensors: damaged or cut short",)),
    (garbage_weights, ("model.safetensors: damaged or cut short",)),
    (no_weights, ("has no *.safetensors file",)),
    (missing_weight, ("missing weights: model.norm.weight",)),
    (broken_config, ("config.json", "JSON")),
    (other_sizes, ("has shape", "the config says")),
    (broken_tokenizer, ("tokenizer.json",)),
]


@pytest.mark.parametrize(("damage", "parts"), DAMAGES, ids=lambda item: getattr(item, "__name__", ""))
def test_a_damaged_directory(copy: Path, damage: Callable[[Path], None], parts: tuple[str, ...]) -> None:
    damage(copy)
    with refused(CorruptModel, *parts):
        LLM(copy, **CPU, num_blocks=8)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    write_dummy(tmp_path, architectures=["WhateverForCausalLM"], model_type="whatever")
    with refused(UnsupportedModel, "WhateverForCausalLM is not supported", "LlamaForCausalLM"):
        LLM(tmp_path, load_format="dummy")


def test_a_recurrent_model(tmp_path: Path) -> None:
    write_dummy(tmp_path, architectures=["MambaForCausalLM"], model_type="mamba")
    with refused(UnsupportedModel, "MambaForCausalLM is not supported", "recurrent state"):
        LLM(tmp_path, load_format="dummy")


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, 2_000_000], ids=lambda keep: f"{keep} bytes")
def test_a_gguf_cut_short(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    with resolve("smollm2").path.open("rb") as whole:
        path.write_bytes(whole.read(keep))
    with refused(CorruptModel, str(path)):
        LLM(path, **CPU, num_blocks=8)


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    path.write_text("this is a text file, whatever its name says" * 20)
    with refused(CorruptModel, str(path)):
        LLM(path)


def test_errors_are_one_tree() -> None:
    assert issubclass(InvalidRequest, ValueError)
    assert issubclass(ConfigError, ValueError)
    for kind in (ModelNotFound, UnsupportedModel, CorruptModel):
        assert issubclass(kind, ModelError)
    for kind in (InvalidRequest, ConfigError, ModelError, CapacityError):
        assert issubclass(kind, GaplessError)
