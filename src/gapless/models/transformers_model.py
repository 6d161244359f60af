"""A decoder as transformers' own code computes it, with our paged attention in its layers: the general path.

Owns the model, which transformers loads. A step's tokens are one sequence to that code, each with its position; which
of them see each other is known to our attention alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.decoder import AttendLayer
from gapless.models.source import ModelSource
from gapless.models.transformers_attention import RUNS, Unrotated, place
from gapless.models.transformers_config import SplitModel, describe, refusals
from gapless.models.weights import SafetensorsWeights

_MAX_NAMED = 5
_PROBED = (5, 7)  # tokens of the sequences that are compared


class TransformersLM:
    """To be called under torch.inference_mode, one step at a time."""

    __slots__ = ("_attend", "_split", "config")

    def __init__(self, config: ModelConfig, model: nn.Module, value_dims: Mapping[str, int]) -> None:
        """value_dims: of the attention modules, by name, in the order of the layers."""
        self.config = config
        self._split = SplitModel.of(model)
        self._attend: AttendLayer | None = None
        for layer, (name, dim) in enumerate(value_dims.items()):
            place(model.get_submodule(name), _Layer(self, layer, dim))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttendLayer) -> Tensor:
        """token_ids [n], positions [n] int64 -> hidden [n, hidden_size]."""
        self._attend = attend
        try:
            return self._split.hidden(token_ids.long()[None], positions[None])[0]
        finally:
            self._attend = None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden_size] as `forward` gave it -> [m, vocab_size]."""
        return self._split.logits(hidden[None])[0]

    def few_layers(self) -> TransformersLM:
        """All of them: which kernels a layer launches is not ours to know."""
        return self

    def attend(self, layer: int, heads: Tensor, sinks: Tensor | None) -> Tensor:
        """The attention of the step that runs."""
        assert self._attend is not None, "no step is running"
        return self._attend(layer, heads, Unrotated(heads, sinks))  # type: ignore[arg-type]


class _Layer:
    """Answers the calls of one attention module."""

    __slots__ = ("_index", "_model", "_value_dim")

    def __init__(self, model: TransformersLM, index: int, value_dim: int) -> None:
        self._model, self._index, self._value_dim = model, index, value_dim

    def answer(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, extra: Mapping[str, Any]) -> Tensor:
        num_heads, head_dim = q.shape[1], q.shape[3]
        if self._value_dim < head_dim:  # keys and values lie in one pool
            v = nn.functional.pad(v, (0, head_dim - self._value_dim))
        heads = torch.cat((q, k, v), dim=1)[0].transpose(0, 1).contiguous()
        found = self._model.attend(self._index, heads, extra.get("s_aux"))
        return found.view(1, -1, num_heads, head_dim)[..., : self._value_dim]


def load_transformers(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str = "auto",
    max_positions: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TransformersLM:
    """Weights are mapped and read by transformers, one tensor at a time; `seed` counts for dummy weights.

    Weights are not quantized here, so `quantization` has no effect; the kit refuses to ask for it. Positions need no
    table, so `max_positions` has none either.
    """
    found = describe(source.path, config.architecture)
    with refusals(config.architecture):
        if load_format == "dummy":
            model = _dummy(found.hf, config.architecture, dtype, device, seed)
        else:
            model = _load(source, found.hf, config.architecture, dtype, device)
        values = {call.name: call.value_dim for call in found.calls}
        loaded = TransformersLM(config, model.eval().requires_grad_(False), values)
        _check_alike(loaded, model, device)
    if progress is not None:
        total = len(list(model.parameters()))
        progress(total, total)
    return loaded


def _dummy(hf: Any, architecture: str, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    import transformers

    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, architecture)._from_config(hf, attn_implementation=RUNS, dtype=dtype)
    return model


def _load(source: ModelSource, hf: Any, architecture: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    import transformers

    files = SafetensorsWeights(source.path)  # an index, shards and headers are checked before anything is read
    kind = getattr(transformers, architecture)
    try:
        model, report = kind.from_pretrained(
            source.path,
            config=hf,
            dtype=dtype,
            attn_implementation=RUNS,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CorruptModel(f"{source.path}: transformers cannot load the weights ({error})") from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(_named(entry) for entry in report.get(what) or ()):
            kind_of = what.partition("_")[0]
            raise CorruptModel(f"{files.origin(names[0])}: {kind_of} weights: {', '.join(names[:_MAX_NAMED])}")
    _check_values(model, source)
    moved: nn.Module = model.to(device)
    return moved


def _named(entry: Any) -> str:
    """A name, or a name with the shapes that differ: that of the file, and that of the config."""
    if isinstance(entry, str):
        return entry
    name, found, expected = entry
    return f"{name} has shape {tuple(found)}, the config says {tuple(expected)}"


def _check_values(model: nn.Module, source: ModelSource) -> None:
    for name, parameter in model.named_parameters():
        if not bool(parameter.sum(dtype=torch.float32).isfinite()) and not bool(parameter.isfinite().all()):
            raise CorruptModel(f"{source.path}: tensor {name} has values that are NaN or infinite")


@torch.inference_mode()
def _check_alike(loaded: TransformersLM, model: Any, device: torch.device) -> None:
    """Refuse a model that computes something different with our attention than with transformers' own.

    Two short sequences side by side show code that ignores positions, or mixes tokens outside of attention.
    """
    ids = torch.arange(sum(_PROBED), device=device) * 7 % loaded.vocab_size
    positions = torch.cat([torch.arange(length, device=device) for length in _PROBED])
    found = loaded.logits(loaded.forward(ids, positions, _dense(loaded.config, _PROBED))).float()
    model.set_attn_implementation("eager")
    try:
        parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split_with_sizes(_PROBED)]
    finally:
        model.set_attn_implementation(RUNS)
    expected = torch.cat(parts).float()
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-20))
    if not error < (1e-3 if parts[0].dtype == torch.float32 else 0.2):
        raise UnsupportedModel("with our attention its logits differ from transformers' own")


def _dense(config: ModelConfig, lengths: Sequence[int]) -> AttendLayer:
    """Attention among the tokens of each sequence, without a cache."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = torch.arange(len(numbers))
    seen = (numbers[:, None] == numbers) & (places <= places[:, None])

    def attend(layer: int, heads: Tensor, rotation: Any) -> Tensor:
        spec = config.layers[layer].attention
        q, k, v = heads.transpose(0, 1).float().split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
        groups = spec.num_heads // spec.num_kv_heads
        scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * spec.scale
        if spec.soft_cap is not None:
            scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
        within = seen if spec.window is None else seen & (places > places[:, None] - spec.window)
        scores = scores.masked_fill(~within.to(heads.device), -torch.inf)
        if rotation.sinks is not None:
            scores = torch.cat((scores, rotation.sinks.float().view(-1, 1, 1).expand(-1, len(heads), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(heads)]
        found = (weights @ v.repeat_interleave(groups, 0)).transpose(0, 1)
        return found.reshape(len(heads), -1).to(heads.dtype)

    return attend
