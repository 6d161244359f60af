"""Which cluster a command finds, with a Ray that only remembers what it was asked for."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gapless.distributed.cluster import LOCAL, NEAREST, Placement, Wishes, _connect, place
from gapless.errors import ConfigError


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ray_that_remembers(last: str | None, asked: list[str]) -> Any:
    services = SimpleNamespace(find_bootstrap_address=lambda _: last)
    return SimpleNamespace(_private=SimpleNamespace(services=services), init=lambda address, **_: asked.append(address))


def test_a_head_that_was_killed_is_not_waited_for() -> None:
    """Ray's file with the last address outlives it."""
    asked: list[str] = []
    _connect(ray_that_remembers(f"127.0.0.1:{closed_port()}", asked), NEAREST)
    assert asked == [LOCAL]


@pytest.mark.parametrize("remembers", [True, False])
def test_a_cluster_that_answers_or_was_never_written_down_is_ray_s_to_find(remembers: bool) -> None:
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as head:
        last = f"127.0.0.1:{head.getsockname()[1]}" if remembers else None
        _connect(ray_that_remembers(last, asked), NEAREST)
    assert asked == [NEAREST]


def nodes_of(monkeypatch: pytest.MonkeyPatch, *gpus: int) -> None:
    """A cluster whose nodes have so many GPUs each."""
    nodes = [{"Alive": True, "Resources": {"GPU": count, "CPU": 8}} for count in gpus]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))


def test_the_ranks_of_a_replica_have_a_gpu_each_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, 4, 3, 1)
    assert place(Wishes(LOCAL, ranks=2)) == Placement(3, 2, 1)
    assert place(Wishes(LOCAL, gpus_per_replica=0, ranks=2)) == Placement(3, 0, 1)  # on CPUs
    with pytest.raises(ConfigError, match="too few GPUs: 1 replica needs 8 each on one node, and the cluster has 8"):
        place(Wishes(LOCAL, ranks=8))
    with pytest.raises(ConfigError, match="--gpus-per-replica 1: tensor_parallel 2 needs as many GPUs"):
        place(Wishes(LOCAL, gpus_per_replica=1, ranks=2))
