"""The parts of a decoder layer on a GPU for models that the fused kernels cannot make up: torch's own, one by one.

They can be captured, because no part asks the device for a number. The fused ones are in `skinny_layers`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gapless.kernels.cublas import library_product
from gapless.kernels.products import Workspace
from gapless.models.config import ModelConfig
from gapless.models.grouped_experts import GroupedExperts
from gapless.models.layers import ExpertWeights, Hidden, Norm, PlainLayers
from gapless.models.spec import GENERAL_LAYERS, MlpSpec, lacking
from gapless.models.weight import Weight


class GeneralLayers(PlainLayers):
    """Makes the parts."""

    def __init__(self) -> None:
        self._workspace: Workspace | None = None  # of experts

    @staticmethod
    def why_not(config: ModelConfig) -> str | None:
        """Why these parts do not make up the model, or None."""
        missing = lacking(config.features(), GENERAL_LAYERS)
        return None if missing is None else f"its layers have no {missing}"

    def experts(
        self, norm: Norm | None, spec: MlpSpec, weights: ExpertWeights, after: Norm | None = None
    ) -> Callable[[Hidden], Hidden]:
        assert after is None
        if self._workspace is None:
            self._workspace = Workspace(weights.router.dense().device)
        return GroupedExperts(norm, spec, weights, self._workspace, library_product, fused=False)

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        data = weight.dense()
        return lambda x: library_product(x, data, dtype=torch.float32)
