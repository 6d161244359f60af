"""Groups by gloo, whose ranks are threads here: sums, gathers, rank 0's numbers, and time limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gapless.ranks.torch_group import CollectiveFailed, TorchGroup, find_store, host_store


def on_gloo(size: int, work: Callable[[TorchGroup], Any], timeout_s: float = 30.0) -> list[Any]:
    store = host_store(timeout_s)

    def run(rank: int) -> Any:
        own = store if rank == 0 else find_store("127.0.0.1", store.port, timeout_s)
        return work(TorchGroup("gloo", own, rank, size, timeout_s))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int, dtype: torch.dtype) -> None:
    def work(group: TorchGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = torch.arange(6.0).view(3, 2).to(dtype) + group.rank
        tokens = torch.tensor([group.rank + 4, -group.rank])
        gathered, total = group.gather(mine), group.add(mine.clone())
        group.share(tokens)
        return gathered, total, tokens

    parts = torch.stack([torch.arange(6.0).view(3, 2).to(dtype) + rank for rank in range(size)])
    for gathered, total, tokens in on_gloo(size, work):
        torch.testing.assert_close(gathered, parts, atol=0, rtol=0)
        torch.testing.assert_close(total, parts.sum(0))
        assert tokens.tolist() == [4, 0]


def test_sums_are_the_same_bits_on_every_rank() -> None:
    def work(group: TorchGroup) -> torch.Tensor:
        return group.add(torch.randn(1001, generator=torch.Generator().manual_seed(group.rank)))

    first, *others = on_gloo(3, work)
    assert all(torch.equal(first, other) for other in others)


def test_a_rank_that_does_not_come() -> None:
    """The others raise in time, and say so."""

    def work(group: TorchGroup) -> float:
        began = time.monotonic()
        if group.rank == 0:
            with pytest.raises(CollectiveFailed, match=r"^a rank is gone, or did not come within 0\.5 s"):
                group.add(torch.ones(3))
        else:
            time.sleep(1.5)
        return time.monotonic() - began

    assert on_gloo(2, work, timeout_s=0.5)[0] < 5


def test_nobody_to_meet() -> None:
    with pytest.raises(CollectiveFailed):
        TorchGroup("gloo", host_store(0.3), 0, 2, 0.3)
