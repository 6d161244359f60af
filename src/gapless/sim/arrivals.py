"""Request traces: when each request arrived, how long it was, and what its prompt shares with others.

Reads Azure's CSV, Mooncake's JSONL, and a recorded JSONL of lines {"arrival_s", "prompt_tokens", "output_tokens"} with
optional "hashes" and "hash_tokens". Knows no engine. A prompt's tokens are made up, so that prompts begin alike exactly
as far as their hashes do.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from gapless.core.request import IntArray, int_array
from gapless.errors import InvalidRequest

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512  # tokens of one hash
FIRST_TOKEN = 10  # below it lie the special tokens of most vocabularies
COPIES_SPAN_S = 30.0  # from the first request of the first copy to that of the last
COPY_HASHES = 2**40  # from the hashes of one copy to those of the next
MIX = 2654435761  # Knuth's multiplier: neighbouring numbers give tokens that differ


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float  # after the first one
    num_prompt: int
    num_output: int
    hashes: tuple[int, ...] = ()  # of blocks of the prompt, from its start; none: it shares nothing
    hash_tokens: int = MOONCAKE_BLOCK  # tokens of one hash


def read_arrivals(path: str) -> list[Arrival]:
    """The requests of a file, by time. Raises InvalidRequest with the line and the field that is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidRequest(f"{path}: the trace cannot be read: {reason}") from None
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("{"):
        found = [_of_json(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    elif first.split(",")[0].strip() == AZURE_COLUMNS[0]:
        found = _of_azure(path, lines)
    else:
        raise InvalidRequest(f"{path}: neither Azure's CSV ({','.join(AZURE_COLUMNS)}) nor lines of JSON")
    if not found:
        raise InvalidRequest(f"{path}: the trace has no requests")
    found.sort(key=lambda arrival: arrival.at_s)
    return [replace(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]


def _of_azure(path: str, lines: Iterable[str]) -> list[Arrival]:
    table = csv.DictReader(lines)
    for column in AZURE_COLUMNS:
        if column not in (table.fieldnames or ()):
            raise InvalidRequest(f"{path}: the column {column} is missing")
    found = []
    for number, row in enumerate(table, 2):
        where = f"{path}, line {number}"
        try:
            at_s = datetime.fromisoformat((row["TIMESTAMP"] or "")[:26]).timestamp()
        except ValueError:
            raise InvalidRequest(f"{where}: TIMESTAMP {row['TIMESTAMP']!r} is not a time") from None
        found.append(Arrival(at_s, _count(where, row, "ContextTokens"), _count(where, row, "GeneratedTokens")))
    return found


def _of_json(path: str, number: int, line: str) -> Arrival:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidRequest(f"{where}: not an object")
    if "timestamp" in row:  # Mooncake's
        at_s = _number(where, row, "timestamp") / 1000
        sizes = _count(where, row, "input_length"), _count(where, row, "output_length")
        return Arrival(at_s, sizes[0], sizes[1], _hashes(where, row, "hash_ids"))
    at_s = _number(where, row, "arrival_s")
    sizes = _count(where, row, "prompt_tokens"), _count(where, row, "output_tokens")
    hash_tokens = _count(where, row, "hash_tokens") if "hash_tokens" in row else MOONCAKE_BLOCK
    return Arrival(at_s, sizes[0], sizes[1], _hashes(where, row, "hashes"), hash_tokens)


def _number(where: str, row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InvalidRequest(f"{where}: {name} must be a number of at least 0, not {value!r}")
    return float(value)


def _count(where: str, row: dict[str, Any], name: str) -> int:
    """A count of tokens. A request without output still samples one token."""
    value = row.get(name)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"{where}: {name} must be a number of tokens, not {value!r}")
    return max(value, 1)


def _hashes(where: str, row: dict[str, Any], name: str) -> tuple[int, ...]:
    value = row.get(name, [])
    if not isinstance(value, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        raise InvalidRequest(f"{where}: {name} must be a list of integers")
    return tuple(value)


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests, `rate` times as fast."""
    return [replace(arrival, at_s=arrival.at_s / rate) for arrival in arrivals]


def copied(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """So many copies at the same time, each with prompts of its own and a few seconds after the copy before it."""
    found = [
        replace(arrival, at_s=arrival.at_s + copy * COPIES_SPAN_S / count)
        for copy in range(count)
        for arrival in renamed(arrivals, copy)
    ]
    return sorted(found, key=lambda arrival: arrival.at_s) if count > 1 else found


def renamed(arrivals: Sequence[Arrival], copy: int) -> list[Arrival]:
    """The same requests with other prompts, which share among themselves what they shared before."""
    return [
        replace(arrival, hashes=tuple(value + copy * COPY_HASHES for value in arrival.hashes)) for arrival in arrivals
    ]


def shrunk(arrivals: Sequence[Arrival], by: int, most_output: int) -> list[Arrival]:
    """Shorter requests for a small machine: lengths divided, answers clipped."""
    return [
        replace(
            arrival,
            num_prompt=max(arrival.num_prompt // by, 1),
            num_output=min(max(arrival.num_output // by, 1), most_output),
            hash_tokens=max(arrival.hash_tokens // by, 1),
        )
        for arrival in arrivals
    ]


def prompt_of(arrival: Arrival, number: int, vocab_size: int = 2**31 - 1) -> IntArray:
    """Made-up tokens for a prompt: a block's tokens follow from its hash; without one, from the request's number.

    The number stands in the prompt itself, so even in a small vocabulary two prompts soon differ.
    """
    most = vocab_size - FIRST_TOKEN
    length, size = arrival.num_prompt, arrival.hash_tokens
    own = np.uint64(2 * number + 1)
    keys = np.full(length, own, np.uint64)
    hashed = np.repeat(np.array([2 * h % 2**64 for h in arrival.hashes], np.uint64), size)[:length]
    keys[: len(hashed)] = hashed
    places = np.arange(length, dtype=np.uint64) % np.uint64(size)
    mixed = (keys * np.uint64(size) + places + np.uint64(1)) * np.uint64(MIX)
    return int_array(FIRST_TOKEN + ((mixed >> np.uint64(7)) % np.uint64(most)).astype(np.int64))
