"""Decoders of the installed transformers that no family describes: their config, and what their attention needs.

The model is built without memory, on the meta device, and one pass through it shows every call of attention. Refuses
at once what the general path cannot run. Never runs code from a model's folder.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import CorruptModel, ModelError, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.spec import LayerSpec, MlpSpec, NormSpec
from gapless.models.transformers_attention import NOTES, AttentionCall, Notes, place, register

NUM_PROBED = 4  # tokens of the pass
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
# The code that computes these is transformers' own, so nothing of ours reads them.
_UNKNOWN_MLP, _UNKNOWN_NORM = MlpSpec(size=1), NormSpec(eps=1.0)


@dataclass(frozen=True, slots=True)
class Description:
    """All that is known of a model before its weights are read."""

    hf: Any  # transformers' config
    calls: tuple[AttentionCall, ...]
    vocab_size: int
    hidden_size: int


def transformers_config(directory: Path, architecture: str) -> ModelConfig:
    """The config of such a model, end tokens aside. Raises UnsupportedModel with the reason."""
    found = describe(directory, architecture)
    layers = tuple(LayerSpec(call.spec, _UNKNOWN_MLP, _UNKNOWN_NORM) for call in found.calls)
    return ModelConfig(
        architecture=architecture,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        layers=layers,
        last_norm=_UNKNOWN_NORM,
        max_position_embeddings=_max_positions(found.hf),
        tie_embeddings=False,
        is_general=True,
    )


def describe(directory: Path, architecture: str) -> Description:
    """Build the model on the meta device and look at one pass."""
    register()
    hf = read_hf(directory, architecture)
    with refusals(architecture):
        model = _build(hf, architecture)
        return _probe(hf, model)


def why_not(architecture: str) -> str | None:
    """Why the general path has no such model, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "other decoders need the package transformers, which is not installed (pip install 'gapless[general]')"
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    entries = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)}
    return None if architecture in names else f"the installed transformers {__version__} has no such decoder either"


def read_hf(directory: Path, architecture: str) -> Any:
    """transformers' config, with what it refuses as our error."""
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever its checks of a config raise
        raise CorruptModel(
            f"{directory / 'config.json'}: transformers cannot read it ({_first_line(error)})"
        ) from error
    kinds = set(_rope_kinds(getattr(hf, "rope_parameters", None)))
    if changing := kinds & {"dynamic", "longrope"}:
        raise _refused(architecture, f"its rope {min(changing)} depends on the length of a sequence")
    if sparse := [name for name in vars(hf) if name.startswith(("index_topk", "sparse_"))]:
        raise _refused(architecture, f"its attention chooses among positions ({sparse[0]})")
    return hf


def _build(hf: Any, architecture: str) -> nn.Module:
    """The model on the meta device, to be looked at. Its experts are computed in the way that asks for no number."""
    import transformers

    kind = getattr(transformers, architecture)
    if getattr(kind, "_is_stateful", False):
        raise UnsupportedModel("it has layers with a recurrent state, which Gapless does not keep")
    if getattr(hf, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder, and Gapless runs decoders")
    if not hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedModel("its code does not call transformers' attention interface")
    with torch.device("meta"):
        model: nn.Module = kind._from_config(
            deepcopy(hf), attn_implementation=NOTES, experts_implementation="batched_mm"
        ).eval()
    return model


@contextmanager
def refusals(architecture: str) -> Iterator[None]:
    """Errors of transformers' code as a refusal of the model."""
    try:
        yield
    except UnsupportedModel as error:
        raise _refused(architecture, str(error)) from error
    except ModelError:
        raise
    except Exception as error:  # whatever modelling code raises
        if "meta tensor" in str(error):
            raise _refused(architecture, "its code decides by computed numbers, such as those of a router") from error
        reason = f"its code in transformers fails on the general path ({type(error).__name__}: {_first_line(error)})"
        raise _refused(architecture, reason) from error


@torch.inference_mode()
def _probe(hf: Any, model: nn.Module) -> Description:
    notes = Notes({module: name for name, module in model.named_modules()})
    for module in model.modules():
        place(module, notes)
    split = SplitModel.of(model)
    ids = torch.zeros(1, NUM_PROBED, dtype=torch.int64, device="meta")
    positions = torch.arange(NUM_PROBED, device="meta")[None]
    # a mask of ones: without it transformers looks at the positions for several sequences in one
    hidden = split.hidden(ids, positions, attention_mask=torch.ones_like(ids))
    if not notes.calls:
        raise UnsupportedModel("its code does not call transformers' attention interface")
    logits = split.logits(hidden)
    return Description(hf, tuple(notes.calls), logits.shape[-1], hidden.shape[-1])


class SplitModel:
    """A model in two halves: hidden states of the decoder, and everything that comes after them.

    The second half is the model's own `forward`, in which the decoder gives back the hidden states it is told.
    """

    __slots__ = ("_decoder", "_forward", "_kind", "_told", "_whole")

    def __init__(self, whole: nn.Module, decoder: nn.Module) -> None:
        self._whole, self._decoder, self._forward = whole, decoder, decoder.forward
        self._told: Tensor | None = None
        self._kind: Any = None
        decoder.forward = self._answer

    @classmethod
    def of(cls, model: Any) -> SplitModel:
        from transformers import PreTrainedModel

        for decoder in (model.get_decoder(), model.base_model):
            if isinstance(decoder, PreTrainedModel) and decoder is not model:
                return cls(model, decoder)
        raise UnsupportedModel("its decoder is no part of its own")

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs) if self._told is None else self._kind(last_hidden_state=self._told)

    def hidden(self, ids: Tensor, positions: Tensor, **more: Any) -> Tensor:  # [1, n] -> [1, n, hidden_size]
        found = self._decoder(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True, **more)
        self._kind = type(found)
        last: Tensor = found.last_hidden_state
        return last

    def logits(self, hidden: Tensor) -> Tensor:  # [1, m, hidden_size] -> [1, m, vocab_size]
        self._told = hidden
        try:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            found: Tensor = self._whole(input_ids=ids, use_cache=False, return_dict=True).logits
            return found
        finally:
            self._told = None


def _max_positions(hf: Any) -> int:
    for name in _LENGTHS:
        value = getattr(hf, name, None)
        if type(value) is int and value > 0:
            return value
    raise CorruptModel(f"config.json: none of the keys {', '.join(_LENGTHS)} says how long a sequence may be")


def _rope_kinds(parameters: Any) -> Iterator[str]:
    if not isinstance(parameters, Mapping):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters["rope_type"]
    for value in parameters.values():
        yield from _rope_kinds(value)


def _refused(architecture: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"architecture {architecture} is not supported: {reason}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
