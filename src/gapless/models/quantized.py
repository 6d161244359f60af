"""How a checkpoint says that its weights are FP8: the three spellings of `quantization_config` in config.json.

Refuses what would be computed wrongly without an error. Which weights are FP8 the files themselves say, by the type of
each tensor; this says what their scales are called and may look like. Knows no weights and no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.files import shown
from gapless.models.keys import Keys

Grain = Literal["tensor", "channel", "block"]  # what shares a scale
BLOCK = 128  # both sides of a block
METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """The scales of FP8 weights."""

    method: str
    grains: tuple[Grain, ...]  # that they may have
    scale: tuple[str, ...] = ("weight_scale",)  # names of a scale, in place of `weight`; a checkpoint has one of them


def read_quantization(keys: Keys, allowed: str = "") -> Fp8Format | None:
    """The format of FP8 weights; None: there are none. allowed: a method that the family itself knows how to read."""
    config = keys.mapping("quantization_config")
    method = config.get("quant_method", "unknown")
    if not config or method == allowed:
        return None
    if method not in METHODS:
        raise UnsupportedModel(
            f"quantization_config ({shown(method)}) is not supported; use the unquantized model, a GGUF, or one of "
            f"{', '.join(METHODS)}"
        )
    inner = Keys(config, f"{keys.where}, quantization_config")
    read = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "fbgemm_fp8": _fbgemm}
    return read[str(method)](inner)


def _fp8(keys: Keys) -> Fp8Format:
    kind = keys.string("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(f"{keys.where}: fmt {shown(kind)} is not supported; e4m3 is")
    scale = ("weight_scale_inv", "weight_scale")  # multiplied by, whatever it is called
    if keys.get("weight_block_size") is None:
        return Fp8Format("fp8", ("tensor", "channel"), scale)
    _check_block(keys, "weight_block_size", keys.get("weight_block_size"))
    return Fp8Format("fp8", ("block",), scale)


def _fbgemm(keys: Keys) -> Fp8Format:
    return Fp8Format("fbgemm_fp8", ("channel",))


def _compressed_tensors(keys: Keys) -> Fp8Format:
    kind = keys.string("format", "float-quantized")
    if kind not in ("float-quantized", "naive-quantized"):
        raise UnsupportedModel(f"{keys.where}: format {shown(kind)} is not supported; float-quantized is")
    for key in ("sparsity_config", "transform_config"):
        inner = keys.mapping(key)
        if inner and inner.get("format") != "dense":
            raise UnsupportedModel(f"{keys.where}: {key} is not supported")
    grains = [_group_grain(keys, name, group) for name, group in keys.mapping("config_groups").items()]
    if not grains:
        raise CorruptModel(f"{keys.where}: config_groups has no group")
    return Fp8Format("compressed-tensors", tuple(dict.fromkeys(grains)))


def _group_grain(keys: Keys, name: str, group: Any) -> Grain:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    where = f"{keys.where}, config_groups, {name[:80]}"
    if not isinstance(weights, Mapping):
        raise CorruptModel(f"{where}: weights is {shown(weights)}, not an object")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if (bits, kind) != (8, "float"):
        raise UnsupportedModel(f"{where}: weights of {shown(bits)} bits of type {shown(kind)} are not supported")
    if strategy == "block":
        _check_block(Keys(weights, where), "block_structure", weights.get("block_structure"))
        return "block"
    for grain in ("tensor", "channel"):
        if strategy == grain:
            return "tensor" if grain == "tensor" else "channel"
    raise UnsupportedModel(f"{where}: strategy {shown(strategy)} is not supported; tensor, channel and block are")


def _check_block(keys: Keys, key: str, value: Any) -> None:
    if value != [BLOCK, BLOCK]:
        raise UnsupportedModel(f"{keys.where}: {key} {shown(value)} is not supported; [{BLOCK}, {BLOCK}] is")
