"""Flags that several commands have: those of the engine and of sampling, and what they say as values."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from gapless.config import EngineOptions
from gapless.core.params import SamplingParams
from gapless.shape_flags import add_shape_flags, shape_of_flags

SAMPLING_HELP = {
    "max_tokens": "most tokens to generate",
    "min_tokens": "ignore end-of-sequence tokens, stop tokens and stop strings before this many tokens",
    "temperature": "0 is greedy",
    "top_k": "keep the k likeliest tokens; 0 keeps all",
    "top_p": "keep the likeliest tokens that together reach this probability; 0 is greedy",
    "min_p": "keep tokens at least this likely, relative to the likeliest",
    "typical_p": "keep tokens whose information is closest to the entropy, up to this probability; 1 keeps all",
    "top_n_sigma": "keep tokens within so many standard deviations of the largest logit; 0 keeps all",
    "repetition_penalty": "divide the logits of tokens that were in the prompt or the output; 1 is none",
    "presence_penalty": "subtract from the logits of tokens that were in the output",
    "frequency_penalty": "subtract for each time that a token was in the output",
    "include_stop_str_in_output": "keep the stop string, or the stop token's text, in the text",
    "ignore_eos": "continue past the end-of-sequence token",
    "logprobs_mode": "raw_logprobs, or processed_logprobs: of the logits that tokens are drawn from",
    "n": "completions of each prompt, each with a seed of its own",
    "best_of": "generate this many, and return the n with the highest mean log-probability",
}


def add_engine_options(
    parser: argparse.ArgumentParser, without: Sequence[str] = (), only: Sequence[str] | None = None
) -> None:
    """A flag for each field of EngineOptions, except those that the command does not use."""
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineOptions):
        if field.name in without or (only is not None and field.name not in only):
            continue
        text = field.metadata["help"] + ("" if field.default is None else f" (default: {field.default})")
        _add_flag(group, field.name, field.default, text, EngineOptions)


def add_sampling_options(
    parser: argparse.ArgumentParser, without: Sequence[str] = (), default_of: Mapping[str, str] | None = None
) -> None:
    """A flag for each field of SamplingParams; lines of a prompt file override them.

    default_of: what the command's help says of defaults that are its own.
    """
    group = parser.add_argument_group("sampling")
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for name, text in SAMPLING_HELP.items():
        if name in without:
            continue
        default = (default_of or {}).get(name, defaults[name])
        shown = "" if default is None else f" (default: {default})"
        _add_flag(group, name, defaults[name], text + shown, SamplingParams)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    group.add_argument("--stop-token-id", action="append", type=int, metavar="ID", help="end at this token; repeatable")
    group.add_argument("--logit-bias", type=_json_or_text, metavar="JSON", help='add to logits: {"token id": number}')
    group.add_argument("--allowed-token-id", action="append", type=int, metavar="ID", help="no others come; repeatable")
    group.add_argument("--bad-word", action="append", metavar="TEXT", help="never complete this text; repeatable")
    group.add_argument("--bad-token-id", action="append", type=int, metavar="ID", help="a token that never comes")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="same seed, same tokens")
    add_shape_flags(parser)


def _add_flag(group: Any, name: str, default: Any, text: str, owner: type) -> None:
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    kinds = typing.get_args(typing.get_type_hints(owner)[name]) or (typing.get_type_hints(owner)[name],)
    kind = number_or_text if str not in kinds or int in kinds else str
    metavar = (
        "N" if kinds[0] is int and str not in kinds else "X" if kinds[0] is float else name.rpartition("_")[2].upper()
    )
    group.add_argument(flag, type=kind, default=None, metavar=metavar, help=text)


def _json_or_text(text: str) -> Any:
    """JSON as its value, other text unchanged: the parameters check it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def number_or_text(text: str) -> int | float | str:
    """Numbers as numbers, other text unchanged: the options check it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Options from flags; the command itself handles several depths. Raises ConfigError."""
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(EngineOptions)}
    return EngineOptions.from_dict({k: v for k, v in values.items() if v is not None and not isinstance(v, list)})


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters that were set by flags."""
    values = {name: getattr(args, name, None) for name in SAMPLING_HELP}
    values |= {"stop": args.stop, "stop_token_ids": args.stop_token_id, "seed": args.sampling_seed}
    values |= {"bad_words": args.bad_word, "bad_token_ids": args.bad_token_id, "logit_bias": args.logit_bias}
    values |= {"allowed_token_ids": args.allowed_token_id}
    values |= {"structured": shape_of_flags(args)}
    found = {name: value for name, value in values.items() if value is not None}
    SamplingParams.from_dict(found)
    return found
