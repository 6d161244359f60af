"""Damage to a model on disk: one or a few random changes to its files, all drawn from the given dice.

Values in JSON are replaced by extremes, bytes are flipped and cut, files become folders, FIFOs and links. Knows the
formats just well enough to hit the parts that a reader uses. Does not know how a reader reacts.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_CHANGES = 3
HOLE_BYTES = 2**36
DEEP = "@deep@"  # stands for nesting that the JSON encoder could not write
EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, 10**400),
    *(1.5, -0.0, 1e-300, 1e38, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "\0", "\ud800", "a" * 5000, "../x", "/dev/zero", "$A", "{{ (", "[[("),
    *([], {}, [[]], [None], [1] * 300, ["x"] * 300, {"a": 1}, {"content": 5}, {"": {"": []}}, DEEP),
)
_WEIGHTS = {"config.json": 4, "tokenizer.json": 2}  # files with more to damage than others
NUMBERS = (0, 1, 2**8, 2**16, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)


def damage(dice: random.Random, folder: Path) -> str:
    """Change the model in the folder; return a description of the changes."""
    changes = []
    for _ in range(dice.choice((1, 1, 1, 2, MOST_CHANGES))):
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size < HOLE_BYTES)
        if not files:
            break
        path = dice.choices(files, [_WEIGHTS.get(path.name, 1) for path in files])[0]
        change = dice.choice(_CHANGES[path.suffix])
        changes.append(f"{path.name}: {change.__name__.strip('_')} {change(dice, path)}".strip())
    return "; ".join(changes)


# -- JSON ------------------------------------------------------------------------------------------------------------


def _swap_value(dice: random.Random, path: Path) -> str:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return _flip_bytes(dice, path)
    done = _swap_in(dice, content)
    path.write_text(_dumped(content))
    return done


def _dumped(content: Any) -> str:
    return json.dumps(content).replace(json.dumps(DEEP), "[" * 50_000 + "]" * 50_000)


def _swap_in(dice: random.Random, content: Any) -> str:
    """Walk to a random place and change the value there."""
    where: list[Any] = []
    holder = content
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return "nothing"
        key = dice.choice(keys)
        where.append(key)
        if not isinstance(holder[key], dict | list) or not holder[key] or dice.random() < 0.3:
            return f"{where} {_change_item(dice, holder, key)}"
        holder = holder[key]


def _change_item(dice: random.Random, holder: Any, key: Any) -> str:
    kind = dice.random()
    if kind < 0.15:
        del holder[key]
        return "deleted"
    if kind < 0.3 and isinstance(holder[key], int):
        holder[key] += dice.choice((-1, 1, 8, holder[key]))
    elif kind < 0.4:
        holder[key] = holder[dice.choice(list(holder))] if isinstance(holder, dict) else [holder[key]]
    elif kind < 0.5:
        holder[key] = [holder[key]] if dice.random() < 0.5 else {"content": holder[key]}
    else:
        holder[key] = dice.choice(EXTREMES)
    return repr(holder[key])[:60]


def _add_key(dice: random.Random, path: Path) -> str:
    """A key that the file did not have, or an existing one twice."""
    key, value = dice.choice(_KEYS), dice.choice(EXTREMES)
    text = path.read_bytes()
    path.write_bytes(text[:1] + f"{json.dumps(key)}: {_dumped(value)}, ".encode() + text[1:])
    return f"{key} {value!r}"[:60]


_KEYS = (
    *("eos_token_id", "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "layer_types", "sliding_window"),
    *("quantization_config", "attention_bias", "mlp_bias", "hidden_act", "max_position_embeddings", "weight_map"),
    *("additional_special_tokens", "extra_special_tokens", "chat_template", "bos_token", "added_tokens", "normalizer"),
    *("pre_tokenizer", "post_processor", "decoder", "truncation", "padding", "use_sliding_window", "architectures"),
)

# -- bytes -----------------------------------------------------------------------------------------------------------


def _flip_bytes(dice: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(dice.randint(1, 4) if content else 0):
        content[_place(dice, len(content))] = dice.randrange(256)
    path.write_bytes(content)
    return ""


def _place(dice: random.Random, length: int) -> int:
    """Anywhere, but most often near the start, where headers are."""
    return dice.randrange(min(length, dice.choice((16, 256, 4096, length))))


def _cut(dice: random.Random, path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: _place(dice, len(content))] if content else b"")
    return ""


def _splice(dice: random.Random, path: Path) -> str:
    content = path.read_bytes()
    at, size = (_place(dice, len(content)) for _ in range(2)) if content else (0, 0)
    piece = dice.choice((b"\xff\xfe\xfa", b"\0" * 9, b"(" * 20_000, b"[" * 20_000, content[at : at + size]))
    path.write_bytes(content[:at] + piece + content[at:])
    return ""


def _write_number(dice: random.Random, path: Path) -> str:
    """A wrong length or count."""
    content = bytearray(path.read_bytes())
    if len(content) >= 8:
        at = dice.choice((0, 8, 16, _place(dice, len(content) - 7)))
        content[at : at + 8] = struct.pack("<Q", dice.choice(NUMBERS))
        path.write_bytes(content)
    return ""


def _change_header(dice: random.Random, path: Path) -> str:
    """Change the JSON header of a safetensors file, with its length corrected."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8].ljust(8, b"\0"))[0]
    try:
        header = json.loads(content[8:end])
    except (ValueError, RecursionError):
        return _flip_bytes(dice, path)
    done = _swap_in(dice, header) if isinstance(header, dict) else ""
    text = _dumped(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])
    return done


def _swap_metadata(dice: random.Random, path: Path) -> str:
    """Replace a number in a GGUF's metadata by a value of any type; the following bytes move with it."""
    content = path.read_bytes()
    places = [found.end() for found in _GGUF_NUMBER.finditer(content)]
    if not places:
        return ""
    at, (kind, value) = dice.choice(places), dice.choice(_GGUF_VALUES)
    path.write_bytes(content[:at] + struct.pack("<I", kind) + value + content[at + 8 :])
    return f"at {at}: type {kind}, {value!r}"


_GGUF_NUMBER = re.compile(rb"(?:llama|tokenizer\.ggml)\.[\w.]+(?=[\x04-\x06]\0\0\0)")
_GGUF_VALUES: tuple[tuple[int, bytes], ...] = (
    *((4, struct.pack("<I", value)) for value in (0, 1, 3, 33, 2**16, 2**31, 2**32 - 1)),
    *((5, struct.pack("<i", value)) for value in (-1, 32)),
    *((6, struct.pack("<f", value)) for value in (float("nan"), float("inf"), 0.0, -1.0, 1e-38, 1e38, 32.0)),
    *((10, struct.pack("<Q", value)) for value in (2**32, 2**63, 2**64 - 1)),
    *((7, b"\1"), (8, struct.pack("<Q", 1) + b"x"), (8, struct.pack("<Q", 0))),
    *((9, struct.pack("<IQ", 4, 2) + bytes(8)), (9, struct.pack("<IQ", 8, 0)), (9, struct.pack("<IQ", 0, 2**40))),
)


def _spoil_values(dice: random.Random, path: Path) -> str:
    """Weights that are not finite, or huge."""
    content = bytearray(path.read_bytes())
    at = len(content) - 4 * dice.randint(1, 2000)
    if at > 0:
        content[at : at + 4] = struct.pack("<f", dice.choice((float("nan"), float("inf"), 3e38, 1e-40)))
        path.write_bytes(content)
    return ""


# -- files -----------------------------------------------------------------------------------------------------------


def _replace_file(dice: random.Random, path: Path) -> str:
    kinds: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a folder": path.mkdir,
        "a FIFO": lambda: os.mkfifo(path),
        "a link to nowhere": lambda: path.symlink_to(path.with_name("nowhere")),
        "a link to itself": lambda: path.symlink_to(path),
        "a link to a device": lambda: path.symlink_to("/dev/zero"),
        "an empty file": path.touch,
        "a huge hole": lambda: _make_hole(path),
    }
    kind = dice.choice(list(kinds))
    path.unlink()
    kinds[kind]()
    return f"is {kind}"


def _make_hole(path: Path) -> None:
    path.touch()
    os.truncate(path, HOLE_BYTES)


_ANY_BYTES = (_flip_bytes, _cut, _splice, _replace_file)
_CHANGES: dict[str, tuple[Callable[[random.Random, Path], str], ...]] = {
    ".json": (*[_swap_value] * 10, *[_add_key] * 3, *_ANY_BYTES),
    ".jinja": _ANY_BYTES,
    ".safetensors": (*[_change_header] * 3, _write_number, _spoil_values, *_ANY_BYTES),
    ".gguf": (*[_swap_metadata] * 8, *[_flip_bytes] * 3, *[_write_number] * 4, _spoil_values, *_ANY_BYTES),
}
