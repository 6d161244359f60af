"""The ranks that hold one model together, as its layers see them: sums, gathers, and what rank 0 knows.

Every call is made by all ranks, in the same order, on their compute streams. Knows no process and no library.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """What ranks do together. A rank that does not come in time, or at all, makes the others raise."""

    rank: int
    size: int

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. It takes the place of the tensor."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, in their order: [size, *shape]."""

    def share(self, tensor: Tensor) -> None:
        """Rank 0's numbers become everybody's."""


class OneRank:
    """A group of one, which has nobody to talk to."""

    rank = 0
    size = 1

    def add(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]

    def share(self, tensor: Tensor) -> None:
        return


ONE_RANK: RankGroup = OneRank()
