"""Tokenizers of other formats, converted by transformers: SentencePiece's tokenizer.model and Mistral's tekken.json.

Owns the call. The conversion runs in a process of its own, for transformers imports torch, which the API process must
not. Its result is tokenizer.json as transformers would have it, so ids are equal to those of transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gapless.errors import CorruptModel, ModelNotFound
from gapless.models.files import check_regular, is_there

SENTENCEPIECE, TEKKEN = "tokenizer.model", "tekken.json"
_NEEDED = {SENTENCEPIECE: ("transformers", "sentencepiece", "google.protobuf"), TEKKEN: ("transformers",)}
_TIME_S = 300.0  # a conversion takes seconds, of which most are imports
_MAX_BYTES = 256 * 2**20
_PROGRAM = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)  # what libraries print is not the answer
from transformers import AutoTokenizer
found = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
answer = {"tokenizer": found.backend_tokenizer.to_str(), "bos_token": found.bos_token, "eos_token": found.eos_token}
with open(out, "w") as file:
    json.dump(answer, file)
"""


def convertible(path: Path) -> str | None:
    """The file of a folder that can be converted; None: there is none."""
    return next((name for name in (SENTENCEPIECE, TEKKEN) if is_there(path / name)), None)


def convert(path: Path, name: str) -> dict[str, Any]:
    """`tokenizer` has the text of a tokenizer.json; `bos_token` and `eos_token` a string or null."""
    check_regular(path / name)
    if missing := [package for package in _NEEDED[name] if not _is_installed(package)]:
        raise ModelNotFound(
            f"{path} has no tokenizer.json, and to read {name} needs {', '.join(missing)}: "
            "pip install 'gapless[tokenizers]', or send prompts as token ids"
        )
    command = [sys.executable, "-c", _PROGRAM, str(path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIME_S, env=environment)
    except subprocess.TimeoutExpired:
        raise CorruptModel(f"{path / name}: its conversion took more than {_TIME_S:.0f} s") from None
    if done.returncode != 0 or len(done.stdout) > _MAX_BYTES:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise CorruptModel(
            f"{path / name}: transformers cannot convert it ({lines[-1][:300] if lines else 'no reason'})"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
