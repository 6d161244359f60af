"""`gapless serve` with replicas: what the flags ask for, and the engines of a cluster for the API process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.config import EngineOptions
from gapless.distributed.autoscaler import Autoscaler
from gapless.distributed.cluster import Placement, Wishes, connected, here, place
from gapless.distributed.pool import EnginePool
from gapless.distributed.serve_app import ServeApp
from gapless.errors import ConfigError
from gapless.server.engines import Engines
from gapless.server.options import ServerOptions
from gapless.trace.files import TraceFiles
from gapless.trace.timeline import load

log = logging.getLogger(__name__)


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

            _check_serve()
            placement = place(self.wishes)
            _check_processors(placement, ray.nodes())
            app = ServeApp(f"gapless-{socket.gethostname()}-{os.getpid()}", placement, options.drain_timeout)
            least = placement.num_replicas
            scaler = Autoscaler(least, self.most if self.most is not None else least)
            if os.path.exists(engine.model):  # replicas run in other folders
                engine = dataclasses.replace(engine, model=os.path.abspath(engine.model))
            there = dataclasses.replace(engine, trace=bool(engine.trace) or None)  # recorded there, written here
            pool = EnginePool(there, options, app, scaler, ray.util.get_node_ip_address(), here())
            yield pool
            if isinstance(engine.trace, str):
                write_traces(engine.trace, pool.traces)


def write_traces(name: str, saved: Iterable[tuple[str, bytes]]) -> None:
    """One file for all replicas: each is a run in it, and times begin with its engine."""
    found = [(replica, load(io.BytesIO(data))) for replica, data in saved]
    timelines = [dataclasses.replace(timeline, label=f"replica {replica}") for replica, timeline in found]
    files = TraceFiles.at(name)
    files.write(timelines)
    log.info("timeline: %s", files)


def _check_serve() -> None:
    try:
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"replicas need Ray Serve: pip install 'gapless[ray]' ({error})") from None


def _check_processors(placement: Placement, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if replicas on CPUs would wait for ever. (`place` has checked the GPUs.)"""
    room = sum(int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])
    if placement.num_cpus and not placement.num_gpus and placement.num_replicas > room:
        raise ConfigError(
            f"too few CPUs: {placement.num_replicas} replicas need 1 each, and the cluster has {room}; "
            f"use --replicas {room}"
        )


def read_range(text: str) -> tuple[int, int]:
    """MIN:MAX of `--autoscale`. Raises ConfigError."""
    try:
        least, most = (int(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"--autoscale must be MIN:MAX, two whole numbers, got {text!r}") from None
    if not 1 <= least <= most:
        raise ConfigError(f"--autoscale needs 1 <= MIN <= MAX, got {text}")
    return least, most
