"""Which cluster a command finds, with a Ray that only remembers what it was asked for."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gapless.distributed.cluster import LOCAL, NEAREST, _connect


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
