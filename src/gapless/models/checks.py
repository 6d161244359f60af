"""What a checkpoint has against what its config describes, from headers alone: names, shapes and types of tensors.

Owns what may be there beside the weights of a model. Reads no weight.
"""

import logging
import re
from collections.abc import Sequence

from gapless.errors import CorruptModel, UnsupportedModel
from gapless.models.config import ModelConfig
from gapless.models.fp8_weights import STORED
from gapless.models.gguf_config import LONG, SHORT
from gapless.models.mxfp4 import BLOCKS, SCALES
from gapless.models.source import ModelSource
from gapless.models.weights import SafetensorsWeights, Shapes, Weights

logger = logging.getLogger(__name__)

_MAX_NAMED = 5
_NUMBERS = ("BF16", "F16", "F32", "F64")
_FP8 = ("F8_E4M3", "F8_E5M2")
_FREQUENCIES = re.compile(r"inv_freq$")
_MASK = re.compile(r"\b(attn|attention)\.(masked_)?bias$")
_EYES = re.compile(r"^(vision_tower|multi_modal_projector)\.")
_TEXT_PART = "language_model."  # how names of a model that also sees begin


def check_types(weights: SafetensorsWeights, config: ModelConfig) -> None:
    """Numbers of 8 bits or fewer mean nothing without their scales."""
    for name, kind in weights.dtypes.items():
        if kind in _NUMBERS or _is_spare(name, weights.shapes, config):
            continue
        if name.endswith((BLOCKS, SCALES)):
            continue  # Mxfp4Weights looks at them
        why = "quantized weights need a GGUF, FP8 or MXFP4"
        if kind in _FP8:
            if config.fp8 is not None and kind == STORED:
                continue
            why = "config.json has no quantization_config" if kind == STORED else f"only {STORED} is supported"
        raise UnsupportedModel(f"{weights.origin(name)}: tensor {name} is {kind}: {why}")


def check_shapes(weights: Weights, expected: Shapes, config: ModelConfig, source: ModelSource) -> None:
    """Every weight is there and has its shape, and nothing is there that the model would leave out."""
    unused = [name for name in weights.shapes if name not in expected]
    extra = [name for name in unused if not _is_spare(name, weights.shapes, config)]
    if missing := [name for name in expected if name not in weights.shapes]:
        instead = f"; there is {_listed(extra)}, which it does not have" if extra else ""
        raise CorruptModel(f"{source.path}: missing weights: {_listed(missing)}{instead}")
    for name, shape in expected.items():
        if weights.shapes[name] != shape:
            raise CorruptModel(
                f"{weights.origin(name)}: tensor {name} has shape {weights.shapes[name]}, the config says {shape}"
            )
    if extra:
        raise CorruptModel(
            f"{weights.origin(extra[0])}: the model that the config describes has no tensor {_listed(extra)}"
        )
    if unused:
        logger.debug("%s: %d unused tensors: %s", source.path, len(unused), ", ".join(unused[:_MAX_NAMED]))


def _is_spare(name: str, shapes: Shapes, config: ModelConfig) -> bool:
    """Whether the model is whole without a tensor that is not among its weights.

    Such are tables of frequencies, causal masks (which are no vectors, as a bias is), a head that is the embedding,
    what a model sees with, and factors of the rope, which the config of a GGUF file holds already.
    """
    shape = shapes[name]
    if _FREQUENCIES.search(name) or name == f"{config.names.head}.weight":
        return True
    if _MASK.search(name):
        return len(shape) != 1 or shape == (1,)
    if _EYES.search(name):
        return config.names.embedding.startswith(_TEXT_PART)
    return name == "rope_freqs.weight" or (name in (LONG, SHORT) and LONG in shapes and SHORT in shapes)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(name[:200] for name in names[:_MAX_NAMED]) + more
