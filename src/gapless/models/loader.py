"""From a model source to a model in memory: the config, then the weights, each checked before it is read.

Owns the order of loading. Knows no file format (`weights`), no family (`registry`) and no layer (`decoder`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from gapless.errors import ConfigError, CorruptModel, ModelError, UnsupportedModel
from gapless.models.checks import check_shapes, check_types
from gapless.models.config import ModelConfig
from gapless.models.cut import weight_cuts
from gapless.models.decoder import CausalLM
from gapless.models.files import read_object, shown
from gapless.models.fp8 import Fp8Scheme, MakeLinear, dequantize
from gapless.models.fp8_weights import Fp8Weights, are_numbers
from gapless.models.gguf_file import GGUFFile
from gapless.models.gguf_scheme import KINDS, PANEL
from gapless.models.layers import PLAIN, Layers
from gapless.models.linear import plain
from gapless.models.mapped_scheme import mapped as mapped_weight
from gapless.models.mxfp4 import BLOCKS, Mxfp4Weights
from gapless.models.mxfp4_scheme import Mxfp4Scheme, are_powers
from gapless.models.part_weights import PartWeights, divisible
from gapless.models.registry import gguf_config, hf_config
from gapless.models.shapes import layer_matrices, weight_shapes
from gapless.models.source import ModelSource
from gapless.models.spec import KVUnits
from gapless.models.weight import Weight
from gapless.models.weights import DummyWeights, GGUFWeights, SafetensorsWeights, Shapes, Weights

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "none", "fp8"]  # as stored; made whole; FP8 also where the checkpoint is not
LoadProgress = Callable[[int, int], None]  # tensors read so far, of how many
_CHECKED_AT_ONCE = 2**24


def load_config(source: ModelSource) -> ModelConfig:
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        if (count := file.metadata.get("split.count", 1)) != 1:
            raise UnsupportedModel(
                f"{source.path}: is one of {shown(count)} parts; make them one file with `llama-gguf-split --merge`"
            )
        config = gguf_config(file)
        file.check()  # a file that was not downloaded to its end shows before anything else is made
        return replace(config, kinds=_kinds(file, config))
    generation = read_object(source.path / "generation_config.json", optional=True)
    return _with_ends(source, hf_config(read_object(source.path / "config.json"), generation, source.path))


def _with_ends(source: ModelSource, config: ModelConfig) -> ModelConfig:
    """Where a config ties the head to the embedding, what the checkpoint has of both decides, as in transformers.

    A head that differs from the embedding is used, and a head alone is the embedding too.
    """
    if config.is_general or not config.tie_embeddings:
        return config
    names = config.names
    table, head = f"{names.embedding}.weight", f"{names.head}.weight"
    try:
        weights = SafetensorsWeights(source.path, first=table)
    except ModelError:  # a config alone is enough for random weights; who wants these is told then
        return config
    if head not in weights.shapes:
        return config
    if table not in weights.shapes:
        return replace(config, names=replace(names, embedding=names.head))
    if torch.equal(weights.read(head), weights.read(table)):
        return config
    logger.warning("%s: tie_word_embeddings is true, but %s is not %s; both are used", source.path, head, table)
    return replace(config, tie_embeddings=False)


def load_model(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    max_positions: int | None = None,
    quantization: Quantization = "auto",
    fp8_linear: MakeLinear | None = None,
    keeps_mxfp4: bool = False,
    layers: Layers = PLAIN,
    progress: LoadProgress | None = None,
    narrow_kv: bool = False,
) -> CausalLM:
    """Reads weights one at a time onto the device; `seed` counts for dummy weights, which need no weight files.

    fp8_linear: products with FP8 weights on this device; None: they are made whole. narrow_kv: the KV cache is FP8.
    keeps_mxfp4: the layers multiply by MXFP4 weights as they are.
    """
    read = open_weights(
        source,
        config,
        dtype=dtype,
        device=device,
        load_format=load_format,
        seed=seed,
        quantization=quantization,
        fp8_linear=fp8_linear,
        keeps_mxfp4=keeps_mxfp4,
        progress=progress,
    )
    kv_units = read.kv_units(config) if narrow_kv else ()
    with torch.inference_mode():
        return CausalLM(config, read, max_positions, layers=layers, kv_units=kv_units)


def open_weights(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    quantization: Quantization = "auto",
    fp8_linear: MakeLinear | None = None,
    keeps_mxfp4: bool = False,
    progress: LoadProgress | None = None,
    stored: bool = False,
    mapped: bool = False,
) -> "WeightReader":
    """All weights are there and have the config's shapes; the function reads one by its name.

    stored: matrices of a GGUF come as they are stored, if `why_not_stored` has no reason against it.
    mapped: matrices of safetensors that have the dtype already stay where the file is mapped.
    """
    expected = weight_shapes(config if config.shard is None else config.shard.whole)
    weights = _open_source(source, config, expected, dtype, device, load_format, seed)
    check_shapes(weights, expected, config, source)
    if config.shard is not None:
        weights = PartWeights(divisible(weights), weight_cuts(config.shard))
    kept = weights if stored and isinstance(weights, GGUFWeights) else None
    scheme = None if quantization == "none" else Fp8Scheme(dtype, fp8_linear)
    is_chosen = quantization == "fp8" or (load_format == "dummy" and config.fp8 is not None)
    chosen = layer_matrices(config) if is_chosen else frozenset()
    checks = load_format != "dummy"
    reader = WeightReader(weights, len(expected), dtype, device, progress, checks=checks, stored=kept)
    reader.narrow(scheme, chosen, Mxfp4Scheme(dtype) if keeps_mxfp4 and quantization != "none" else None)
    reader.keeps_mapped = mapped
    return reader


def why_not_stored(config: ModelConfig) -> str | None:
    """Why the native step cannot multiply by the matrices of a GGUF as they are stored; None where it can."""
    if not config.kinds:
        return "the weights are not those of a GGUF"
    if others := [kind for kind in config.kinds if kind not in KINDS.values()]:
        return f"{others[0]} weights"
    kv_size = config.num_kv_heads * config.head_dim
    return f"keys of {kv_size} numbers, which is no multiple of {PANEL}" if kv_size % PANEL else None


def _kinds(file: GGUFFile, config: ModelConfig) -> tuple[str, ...]:
    """Of the matrices that are multiplied by. A table of positions is only looked up; a router is never quantized."""
    sizes: Counter[str] = Counter()
    names = config.names
    aside = {f"{names.positions}.weight"}
    routers = (names.router, names.shared_router)
    aside |= {f"{names.of_layer(index, name)}.weight" for index in range(config.num_layers) for name in routers}
    for name in weight_shapes(config):
        tensor = file.tensors.get(name)
        if tensor is None or len(tensor.shape) == 1:
            continue
        if name.endswith(".weight") and name not in aside:  # biases of experts are a table too
            sizes[tensor.checked_kind().name] += prod(tensor.shape)
    return tuple(kind for kind, _ in sizes.most_common())


def _open_source(
    source: ModelSource,
    config: ModelConfig,
    expected: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    seed: int,
) -> Weights:
    if load_format == "dummy":
        return DummyWeights(expected, dtype, device, seed)
    if source.kind == "gguf":
        return GGUFWeights(GGUFFile(source.path))
    weights = SafetensorsWeights(source.path, first=next(iter(expected)))
    check_types(weights, config)
    if config.fp8 is not None:
        return Fp8Weights(weights, config.fp8)
    return Mxfp4Weights(weights) if any(name.endswith(BLOCKS) for name in weights.shapes) else weights


class WeightReader:
    """Reads a weight by name onto the device and reports progress. The last one brings the check of all values."""

    def __init__(
        self,
        weights: Weights,
        num_total: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: LoadProgress | None,
        *,
        checks: bool,
        stored: GGUFWeights | None = None,
    ) -> None:
        """stored: the same weights, of which matrices are read as they are stored."""
        self._weights, self._dtype, self._device, self._progress = weights, dtype, device, progress
        self._seen: set[str] = set()  # a weight may be read twice
        self._num_total = num_total
        self._checks, self._stored = checks, stored
        self._scheme: Fp8Scheme | None = None
        self._mxfp4: Mxfp4Scheme | None = None
        self._chosen: Collection[str] = ()
        self.keeps_mapped = False
        self._sums: dict[str, Tensor] = {}  # [] on the device; finite only if every value is

    def narrow(self, scheme: Fp8Scheme | None, chosen: Collection[str], mxfp4: Mxfp4Scheme | None) -> None:
        """Schemes of FP8 and of MXFP4 weights; None: they are made whole. chosen: weights to be quantized to FP8."""
        self._scheme, self._chosen, self._mxfp4 = scheme, chosen, mxfp4

    def has_narrow_experts(self, config: ModelConfig) -> bool:
        """Whether all experts of safetensors come as numbers of 4 bits."""
        weights = self._weights
        if self._mxfp4 is None or not isinstance(weights, Mxfp4Weights):
            return False
        stacks = [name for name, shape in weight_shapes(config).items() if len(shape) == 3]
        return all(weights.is_mxfp4(name) for name in stacks)

    def kv_units(self, config: ModelConfig) -> tuple[KVUnits, ...]:
        """Of each layer, what a 1 in an FP8 cache stands for; empty: 1."""
        if not isinstance(self._weights, Fp8Weights):
            return ()
        return self._weights.read_kv_units(config.names, config.num_layers)

    def __call__(self, name: str) -> Weight:
        weight = self._read(name)
        self._seen.add(name)
        if self._checks and len(self._seen) == self._num_total:
            self._check_values()
        if self._progress is not None:
            self._progress(len(self._seen), self._num_total)
        return weight

    def _read(self, name: str) -> Weight:
        if self._stored is not None and self._stored.kind(name) in KINDS.values():
            return self._stored.read_stored(name)
        weight, total = self._read_numbers(name)
        if self._checks:
            self._sums[name] = total
        return weight

    def _read_numbers(self, name: str) -> tuple[Weight, Tensor]:
        """The weight, and a number that is finite only if every value is."""
        weights = self._weights
        if isinstance(weights, Fp8Weights) and weights.is_narrow(name):
            data = weights.read(name).to(self._device)
            scales = weights.read_scales(name).to(self._device)
            scheme = self._scheme or Fp8Scheme(self._dtype)
            weight = Weight(data, scheme, scales)
            total = scales.sum() + torch.where(are_numbers(data, scales), 0.0, torch.inf)
            return (plain(weight.dense()) if self._scheme is None else weight), total
        if self._mxfp4 is not None and isinstance(weights, Mxfp4Weights | GGUFWeights) and weights.is_mxfp4(name):
            blocks, powers = (part.to(self._device) for part in weights.read_mxfp4(name))
            return Weight(blocks, self._mxfp4, powers), torch.where(are_powers(powers), 0.0, torch.inf)
        found = weights.read(name)
        tensor = found.to(device=self._device, dtype=self._dtype)
        if self._scheme is not None and name in self._chosen:
            return Weight(tensor, self._scheme), tensor.sum()
        can_stay = isinstance(weights, SafetensorsWeights | Mxfp4Weights) and weights.is_mapped(name)
        stays = self.keeps_mapped and can_stay and tensor is found and tensor.dim() > 1
        return (mapped_weight(tensor) if stays else plain(tensor)), tensor.sum()

    def _check_values(self) -> None:
        """Refuse NaN and infinite weights. A sum may overflow, so whatever it points at is looked at again."""
        are_finite = torch.stack(list(self._sums.values())).isfinite().tolist()  # the one wait for the device
        for name, is_finite in zip(self._sums, are_finite, strict=True):
            if not is_finite:
                self._check_weight(name)
        self._sums.clear()

    def _check_weight(self, name: str) -> None:
        weights, stored = self._weights, self._weights.read(name)
        if isinstance(weights, Fp8Weights) and weights.is_narrow(name):
            if not _is_finite(scales := weights.read_scales(name)):
                origin, scale = weights.origin_of_scales(name)
                raise CorruptModel(f"{origin}: tensor {scale} has values that are NaN or infinite")
            stored = dequantize(stored, scales, torch.float32)
        if not _is_finite(stored):
            raise CorruptModel(f"{self._weights.origin(name)}: tensor {name} has values that are NaN or infinite")
        if not _is_finite(stored.to(self._dtype)):
            raise ConfigError(
                f"dtype {str(self._dtype).removeprefix('torch.')} is too narrow for the values of tensor {name}; "
                "use bfloat16 or float32"
            )


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in torch.split(tensor.flatten(), _CHECKED_AT_ONCE))
