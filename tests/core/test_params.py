"""Every bad sampling parameter is refused with its name, its value and its limit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from gapless.core.params import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_IDS, MAX_STOP_STRINGS, SamplingParams
from gapless.errors import GaplessError, InvalidRequest

BIG = 2**31
END = "the regex says where to end"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be between 1 and 2147483647, got 0"),
    ({"max_tokens": -3}, "max_tokens must be between 1 and 2147483647, got -3"),
    ({"max_tokens": BIG}, f"max_tokens must be between 1 and 2147483647, got {BIG}"),
    ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
    ({"max_tokens": "8"}, "max_tokens must be a whole number, got '8'"),
    ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
    ({"max_tokens": None}, "max_tokens must be a whole number, got None"),
    ({"min_tokens": -1}, "min_tokens must be between 0 and max_tokens = 256, got -1"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be between 0 and max_tokens = 4, got 5"),
    ({"temperature": -0.1}, "temperature must be at least 0.0 and at most 100.0, got -0.1"),
    ({"temperature": 101}, "temperature must be at least 0.0 and at most 100.0, got 101"),
    ({"temperature": float("nan")}, "temperature must be a number, got nan"),
    ({"temperature": float("inf")}, "temperature must be at least 0.0 and at most 100.0, got inf"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"temperature": True}, "temperature must be a number, got True"),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"top_k": -1}, "top_k must be between 0 and 2147483647, got -1"),
    ({"top_k": BIG}, f"top_k must be between 0 and 2147483647, got {BIG}"),
    ({"top_k": 2.0}, "top_k must be a whole number, got 2.0"),
    ({"top_p": -0.01}, "top_p must be at least 0.0 and at most 1.0, got -0.01"),
    ({"top_p": 1.01}, "top_p must be at least 0.0 and at most 1.0, got 1.01"),
    ({"top_p": float("nan")}, "top_p must be a number, got nan"),
    ({"min_p": -0.5}, "min_p must be at least 0.0 and at most 1.0, got -0.5"),
    ({"min_p": 1.5}, "min_p must be at least 0.0 and at most 1.0, got 1.5"),
    ({"typical_p": 1.5}, "typical_p must be at least 0.0 and at most 1.0, got 1.5"),
    ({"top_n_sigma": -2}, "top_n_sigma must be at least -1.0 and at most 100.0, got -2"),
    ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.01 and at most 100.0, got 0"),
    ({"repetition_penalty": "1.2"}, "repetition_penalty must be a number, got '1.2'"),
    ({"presence_penalty": 2.1}, "presence_penalty must be at least -2.0 and at most 2.0, got 2.1"),
    ({"frequency_penalty": -3}, "frequency_penalty must be at least -2.0 and at most 2.0, got -3"),
    ({"logit_bias": 5}, "logit_bias must be a mapping from token ids to numbers, got 5"),
    ({"logit_bias": [(1, 2, 3)]}, "logit_bias must be a mapping from token ids to numbers, got [(1, 2, 3)]"),
    ({"logit_bias": {"five": 1}}, "a token id in logit_bias must be a whole number, got 'five'"),
    ({"logit_bias": {-1: 1}}, "a token id in logit_bias must be between 0 and 2147483647, got -1"),
    ({"logit_bias": {7: 101}}, "the logit_bias of token 7 must be at least -100.0 and at most 100.0, got 101"),
    ({"logit_bias": {7: None}}, "the logit_bias of token 7 must be a number, got None"),
    ({"logit_bias": {7: 1, "7": 2}}, "logit_bias names token 7 twice"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has at most 1024 tokens, got 1025"),
    ({"allowed_token_ids": 5}, "allowed_token_ids must be a list, got 5"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty: no token could come"),
    ({"bad_token_ids": [-1]}, "a token id in bad_token_ids must be between 0 and 2147483647, got -1"),
    ({"bad_token_ids": None}, "bad_token_ids must be a list, got None"),
    ({"bad_words": "x"}, "bad_words must be a list, got 'x'"),
    ({"bad_words": [" "]}, "a bad word must be text or token ids, and not empty, got ' '"),
    ({"bad_words": [[]]}, "a bad word must be text or token ids, and not empty, got []"),
    ({"bad_words": [["a"]]}, "a token id in bad_words must be a whole number, got 'a'"),
    ({"bad_words": ["x" * 257]}, "a bad word has at most 256 characters or tokens, got 257"),
    ({"bad_words": ["x"] * 1025}, "at most 1024 bad words, got 1025"),
    ({"seed": 2**63}, f"seed must be between {-(2**63)} and {2**63 - 1}, got {2**63}"),
    ({"seed": "x"}, "seed must be a whole number, got 'x'"),
    ({"stop": 5}, "stop must be a list, got 5"),
    ({"stop": [""]}, "a stop string must be non-empty text, got ''"),
    ({"stop": [3]}, "a stop string must be non-empty text, got 3"),
    ({"stop": ["x"] * 17}, f"at most {MAX_STOP_STRINGS} stop strings, got 17"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
    ({"stop_token_ids": [-1]}, "a stop token id must be between 0 and 2147483647, got -1"),
    ({"stop_token_ids": ["a"]}, "a stop token id must be a whole number, got 'a'"),
    ({"stop_token_ids": [1] * 17}, f"at most {MAX_STOP_IDS} stop token ids, got 17"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output must be true or false, got 'yes'"),
    ({"n": 0}, "n must be between 1 and 1024, got 0"),
    ({"n": MAX_CHOICES + 1}, "n must be between 1 and 1024, got 1025"),
    ({"n": 2.0}, "n must be a whole number, got 2.0"),
    ({"n": None}, "n must be a whole number, got None"),
    ({"best_of": 0}, "best_of must be between 1 and 1024, got 0"),
    ({"best_of": True}, "best_of must be a whole number, got True"),
    ({"n": 3, "best_of": 2}, "best_of must be at least n = 3, got 2"),
    ({"structured": "regex"}, "structured must be an object such as {'regex': ...}, got 'regex'"),
    (
        {"structured": {"regex": "a"}, "ignore_eos": True},
        "ignore_eos contradicts structured: " + END,
    ),
    ({"structured": {"regex": "a"}, "min_tokens": 1}, "min_tokens contradicts structured: " + END),
    ({"logprobs": -1}, "logprobs must be between 0 and 20, got -1"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs must be between 0 and 20, got 21"),
    ({"logprobs": True}, "logprobs must be a whole number, got True"),
    ({"logprobs": 2.0}, "logprobs must be a whole number, got 2.0"),
    ({"logprobs_mode": "raw"}, "logprobs_mode must be raw_logprobs or processed_logprobs, got 'raw'"),
    ({"prompt_logprobs": "5"}, "prompt_logprobs must be a whole number, got '5'"),
    ({"prompt_logprobs": 21}, "prompt_logprobs must be between 0 and 20, got 21"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=lambda item: str(item)[:40] if isinstance(item, dict) else "")
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message
    assert caught.value.param == list(values)[-1]
    assert isinstance(caught.value, GaplessError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_whole_number_beyond_float_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be"):
        SamplingParams(**{name: 10**400})


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": 2**31 - 1},
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 1},
        {"n": MAX_CHOICES, "best_of": MAX_CHOICES},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ["x"] * 16, "stop_token_ids": list(range(16))},
    ],
)
def test_the_limits_themselves_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_every_field_has_a_bad_value_above() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for values, _ in BAD for name in values} == fields


def test_the_documented_parameters_and_defaults_are_these() -> None:
    page = (Path(__file__).parents[2] / "docs/parameters.md").read_text("utf-8")
    table = page[: page.index("## ")]
    told = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
    assert told == [(field.name, str(field.default)) for field in dataclasses.fields(SamplingParams)]


def test_one_stop_string_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))


def test_biases_are_pairs_by_token_however_they_are_given() -> None:
    for given in ({"10": 1, 2: -3}, [(10, 1), ["2", -3]], ((2, -3.0), (10, 1.0))):
        assert SamplingParams(logit_bias=given).logit_bias == ((2, -3.0), (10, 1.0))


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_dict({"temperatur": 0.5})
    assert "unknown parameter 'temperatur' (did you mean 'temperature'?); known: max_tokens, " in str(caught.value)


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_dict({"zzz": 1})
    assert "unknown parameter 'zzz'; known:" in str(caught.value)


def test_from_dict_checks_values_too() -> None:
    assert SamplingParams.from_dict({"max_tokens": 3, "stop": "x"}) == SamplingParams(max_tokens=3, stop=("x",))
    with pytest.raises(InvalidRequest, match="max_tokens must be between 1"):
        SamplingParams.from_dict({"max_tokens": 0})
