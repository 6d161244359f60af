"""`gapless serve` with replicas: what the flags ask for, and the engines of a cluster for the API process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from gapless.config import EngineOptions
from gapless.distributed.autoscaler import Autoscaler
from gapless.distributed.cluster import Wishes, connected, here, place
from gapless.distributed.pool import EnginePool
from gapless.distributed.serve_app import ServeApp
from gapless.errors import ConfigError
from gapless.server.engines import Engines
from gapless.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class ReplicaWishes:
    """How many replicas there are to be, and where."""

    wishes: Wishes
    most: int | None = None  # with wishes.replicas as the least; None: a fixed number

    @contextlib.contextmanager
    def engines(self, options: ServerOptions, engine: EngineOptions) -> Iterator[Engines]:
        """Raises ConfigError for what the cluster cannot do."""
        with connected(self.wishes.address):
            import ray

            placement = place(self.wishes)
            app = ServeApp(f"gapless-{socket.gethostname()}-{os.getpid()}", placement, options.drain_timeout)
            least = placement.num_replicas
            scaler = Autoscaler(least, self.most if self.most is not None else least)
            yield EnginePool(engine, options, app, scaler, ray.util.get_node_ip_address(), here())


def read_range(text: str) -> tuple[int, int]:
    """MIN:MAX of `--autoscale`. Raises ConfigError."""
    try:
        least, most = (int(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"--autoscale must be MIN:MAX, two whole numbers, got {text!r}") from None
    if not 1 <= least <= most:
        raise ConfigError(f"--autoscale needs 1 <= MIN <= MAX, got {text}")
    return least, most
