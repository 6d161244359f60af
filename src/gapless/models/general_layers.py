"""The parts of a decoder layer on a GPU for models that the fused kernels cannot make up: torch's own, one by one.

They can be captured, because no part asks the device for a number. The fused ones are in `skinny_layers`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gapless.kernels.cublas import library_product
from gapless.models.config import ModelConfig
from gapless.models.layers import PlainLayers
from gapless.models.spec import GENERAL_LAYERS, lacking
from gapless.models.weight import Weight


class GeneralLayers(PlainLayers):
    """Makes the parts."""

    @staticmethod
    def why_not(config: ModelConfig) -> str | None:
        """Why these parts do not make up the model, or None."""
        missing = lacking(config.features(), GENERAL_LAYERS)
        return None if missing is None else f"its layers have no {missing}"

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        data = weight.dense()
        return lambda x: library_product(x, data, dtype=torch.float32)
