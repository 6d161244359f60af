"""The small parts between the products: normalization and token embedding.

Owns their weights. Few torch operations each, for on a CPU with small tensors the number of operations is the cost.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...  # [n, hidden_size] -> [n, hidden_size]


def make_norm(weight: Tensor, eps: float) -> Norm:
    return _NORMS.get(weight.device.type, RMSNorm)(weight, eps)


class RMSNorm:
    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.shape = weight, eps, tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class FusedRMSNorm:
    """One kernel."""

    __slots__ = ("eps", "kernel", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        from gapless.models.fused import rms_norm  # needs Triton, which only GPU installations have

        self.weight, self.eps, self.kernel = weight, eps, rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.eps)


class Embedding:
    __slots__ = ("table",)

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.table)


_NORMS: dict[str, type[FusedRMSNorm]] = {"cuda": FusedRMSNorm}
