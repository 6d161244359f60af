"""Which family a model belongs to, by what its config.json or its GGUF metadata calls it.

Owns the list of families. Reads a description by way of the family and adds the end tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.families import (
    cohere,
    cohere2,
    gemma2,
    gemma3,
    gemma3_multimodal,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    starcoder2,
)
from gapless.models.family import Family, GGUFForm
from gapless.models.files import shown, token_ids
from gapless.models.gguf_config import read_gguf_config
from gapless.models.gguf_file import GGUFFile
from gapless.models.keys import Keys
from gapless.models.quantized import read_quantization
from gapless.models.refused import why_refused

logger = logging.getLogger(__name__)

_FILES = (
    *(llama, mistral, qwen2, qwen3, granite, smollm3),
    *(olmo2, olmo3, phi3, starcoder2, gpt_neox, gpt2, cohere, cohere2, gemma2, gemma3, gemma3_multimodal),
    *(mixtral, qwen2_moe, qwen3_moe, gpt_oss),
)
FAMILIES: list[Family] = [file.FAMILY for file in _FILES]
_GGUF_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def hf_config(
    raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, directory: Path | None = None
) -> ModelConfig:
    """Reads a config.json of transformers 4 or 5, with the end tokens of generation_config.json added.

    directory: where the config lies. With it, other decoders of the installed transformers are described too.
    """
    keys = Keys(raw, "config.json")
    family = _hf_family(keys)
    config = _general_config(keys, directory) if family is None else family.from_hf(keys)
    places = {
        "config.json: eos_token_id": keys.get("eos_token_id"),
        "generation_config.json: eos_token_id": (generation_config or {}).get("eos_token_id"),
    }
    return replace(config, eos_token_ids=_end_ids(config.vocab_size, places))


def gguf_config(file: GGUFFile) -> ModelConfig:
    """Reads the metadata of a GGUF."""
    name = file.metadata.get("general.architecture")
    family, form = _gguf_family(file, name)
    config = read_gguf_config(file, family, form)
    if file.metadata.get(f"{name}.expert_count") and all(layer.mlp.experts is None for layer in config.layers):
        raise UnsupportedModel(f"GGUF architecture {shown(name)} with experts is not supported")
    places = {f"{file.path}: {key}": file.metadata.get(key) for key in _GGUF_END_KEYS}
    return replace(config, eos_token_ids=_end_ids(config.vocab_size, places))


def _gguf_family(file: GGUFFile, name: object) -> tuple[Family, GGUFForm]:
    """Of the families of this architecture the one whose mark the file has, or the one without a mark."""
    forms = [(family, form) for family in FAMILIES if (form := family.gguf) is not None]
    found = [(family, form) for family, form in forms if form.architecture == name]
    for family, form in sorted(found, key=lambda each: not each[1].mark):
        if not form.mark or file.metadata.get(f"{name}.{form.mark}"):
            return family, form
    raise _unsupported(f"GGUF architecture {shown(name)}", list(dict.fromkeys(form.architecture for _, form in forms)))


def _hf_family(keys: Keys) -> Family | None:
    """The family that the config names. Raises UnsupportedModel for a model that is no decoder."""
    if "architectures" not in keys.raw and "model_type" not in keys.raw:
        raise CorruptModel("config.json: the key architectures is missing")
    names, model_type = keys.strings("architectures"), keys.string("model_type", "")
    if reason := why_refused(keys):
        raise UnsupportedModel(f"{_called(keys)} is not supported: {reason}")
    for family in FAMILIES:
        if family.architecture in names or (not names and family.model_type == model_type):
            return family
    return None


def _general_config(keys: Keys, directory: Path | None) -> ModelConfig:
    """Of a model that transformers' own code will run, if it can."""
    from gapless.models import transformers_config as general  # imports transformers when it is asked

    supported = [family.architecture for family in FAMILIES]
    names = keys.strings("architectures")
    if directory is None or not names:
        raise _unsupported(_called(keys), supported)
    if reason := general.why_not(names[0]):
        raise _unsupported(_called(keys), supported, f"; {reason}")
    if read_quantization(keys, "") is not None:
        raise UnsupportedModel(f"{_called(keys)}: FP8 weights are not supported without a family; use unquantized ones")
    return general.transformers_config(directory, names[0])


def _called(keys: Keys) -> str:
    names = keys.strings("architectures")
    return f"architecture {(names[0] if names else keys.string('model_type', ''))[:80]}"


def _unsupported(what: str, supported: Sequence[str], more: str = "") -> UnsupportedModel:
    return UnsupportedModel(f"{what} is not supported; Gapless runs {', '.join(supported)}{more}")


def _end_ids(vocab_size: int, places: Mapping[str, object]) -> tuple[int, ...]:
    """The end tokens of all places. An id past the vocabulary is never sampled, so it is dropped with a warning."""
    found: list[int] = []
    for where, value in places.items():
        for token_id in token_ids(value, where):
            if token_id < vocab_size:
                found.append(token_id)
            else:
                logger.warning("%s: %d is ignored: the vocabulary has %d tokens", where, token_id, vocab_size)
    return tuple(dict.fromkeys(found))
