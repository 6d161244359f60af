"""The text and JSON files of a model folder, read with care, and the values in them, checked.

Reads regular files and links to them, of a bounded size, as UTF-8. Imports no torch and knows no format.
"""

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from gapless.errors import CorruptModel

MAX_JSON_BYTES = 32 * 2**20
MAX_TEXT_BYTES = 256 * 2**20  # tokenizer.json is the largest of them
INT32_MAX = 2**31 - 1
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = 60


def shown(value: object) -> str:
    """A value for a message: short, whatever its size or depth."""
    return _shortener.repr(value)


def is_there(path: Path) -> bool:
    """Whether the folder has such an entry, be it a link to nothing."""
    return os.path.lexists(path)


def check_regular(path: Path) -> int:
    """The size of a file. Raises CorruptModel unless it is regular or a link to such: to open others may block."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise CorruptModel(f"{path}: cannot be read ({_reason(error)})") from error
    if not stat.S_ISREG(found.st_mode):
        raise CorruptModel(f"{path}: is {_KINDS.get(stat.S_IFMT(found.st_mode), 'a device')}, not a regular file")
    return found.st_size


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    if check_regular(path) > max_bytes:
        raise CorruptModel(f"{path}: is larger than {max_bytes} bytes, which cannot be right")
    try:
        with path.open("rb") as file:
            return file.read(max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptModel(f"{path}: is not UTF-8 ({_reason(error)})") from error
    except OSError as error:
        raise CorruptModel(f"{path}: cannot be read ({_reason(error)})") from error


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file. An optional file that is not there holds nothing."""
    if optional and not is_there(path):
        return {}
    text = read_text(path, MAX_JSON_BYTES)
    try:
        content = json.loads(text)
    except RecursionError:
        raise CorruptModel(f"{path}: is nested too deeply to be read as JSON") from None
    except ValueError as error:
        raise CorruptModel(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CorruptModel(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def token_ids(value: object, where: str) -> tuple[int, ...]:
    """One token id, a list of them, or nothing, as a tuple without repetitions."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if type(item) is not int or not 0 <= item <= INT32_MAX:
            raise CorruptModel(f"{where} holds {shown(item)}, which is not a token id")
    return tuple(dict.fromkeys(values))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
