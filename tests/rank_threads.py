"""Ranks as threads of one process: what each of them does runs side by side, and they meet at barriers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")
TIMEOUT_S = 30


class ThreadRank:
    """One of them."""

    def __init__(self, rank: int, size: int, places: list[torch.Tensor], barrier: Barrier) -> None:
        self.rank, self.size = rank, size
        self._places, self._barrier = places, barrier

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._places[self.rank] = tensor
        self._barrier.wait(TIMEOUT_S)
        found = torch.stack(self._places)
        self._barrier.wait(TIMEOUT_S)
        return found

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.gather(tensor).sum(0)

    def share(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.gather(tensor)[0])


def on_ranks(size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """What the work of each rank returns."""
    places, barrier = [torch.empty(0)] * size, Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadRank(rank, size, places, barrier) for rank in range(size)]))
