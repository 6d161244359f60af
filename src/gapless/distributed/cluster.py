"""The Ray cluster that a command works with: how it is found or started, what it has, and what is wrong with it.

Ray is imported here and in the other files of this folder, when a command asks for it and never before. Every mistake
that a user can make with a cluster becomes one line that says what to do.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import gapless
from gapless.errors import ConfigError, OutputError

LOCAL = "local"  # the address of a cluster of our own, on this machine
NEAREST = "auto"  # a cluster that this machine belongs to
LONGEST_REASON = 300  # characters of a message of Ray
CONNECT_S = 10  # how long a cluster may take to answer


@dataclass(frozen=True, slots=True)
class NodeVersions:
    """What must be equal on all nodes: other versions may give other tokens, or not understand each other."""

    gapless: str
    python: str
    ray: str

    def difference(self, theirs: NodeVersions) -> str:
        """In words; empty if there is none."""
        names = {"gapless": "Gapless", "python": "Python", "ray": "Ray"}
        pairs = ((told, getattr(theirs, name), getattr(self, name)) for name, told in names.items())
        return ", ".join(f"{told} {there} instead of {here}" for told, there, here in pairs if there != here)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user asks of a cluster; None is the default."""

    address: str
    replicas: int | None = None
    gpus_per_replica: float | None = None
    ranks: int = 1  # of each replica, all on one node


@dataclass(frozen=True, slots=True)
class Placement:
    """How many replicas there are to be, and what Ray reserves for each."""

    num_replicas: int
    num_gpus: float
    num_cpus: float


def here() -> NodeVersions:
    import ray

    return NodeVersions(gapless.__version__, platform.python_version(), ray.__version__)


def import_ray() -> Any:
    """Raises ConfigError."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"a cluster needs Ray: pip install 'gapless[ray]' ({error})") from None
    return ray


def connect(address: str, option: str = "--ray") -> None:
    """Connect this process to a cluster, as `connected` does. option: what the user calls the address.

    Raises ConfigError.
    """
    _check_address(address, option)
    _connect(import_ray(), address, option)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A cluster for the length of the block; one is started on this machine if there is none.

    Raises ConfigError, and OutputError if the cluster fails.
    """
    connect(address)
    ray = import_ray()
    try:
        yield
    except ray.exceptions.RayError as error:
        raise OutputError(f"the Ray cluster has failed: {' '.join(str(error).split())[:LONGEST_REASON]}") from None
    finally:
        ray.shutdown()


def answers() -> bool:
    """False if the head is gone. Any other question would take a minute, after which Ray ends this process."""
    try:
        _knock(import_ray().get_runtime_context().gcs_address)
    except OSError:
        return False
    return True


def own_job() -> str:
    """What Ray calls the life of this process."""
    return str(import_ray().get_runtime_context().get_job_id())


def is_job_over(job: str) -> bool:
    """Whether the process of a job has ended, or its node has; False if the cluster does not say."""
    if not answers():
        return False
    return any(one["JobID"] == job and one["IsDead"] for one in import_ray()._private.state.state.job_table())


def _check_address(address: str, option: str) -> None:
    if address not in (LOCAL, NEAREST) and ":" not in address:
        hint = "; name files before --ray, or write --ray=auto" if option == "--ray" else ""
        raise ConfigError(f"{option} {address}: an address is HOST:PORT, auto or local{hint}")
    if "://" in address:
        raise ConfigError(f"{option} {address}: run this command on a node of the cluster, with the head's HOST:PORT")


def _connect(ray: Any, address: str, option: str = "--ray") -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address == NEAREST:
        try:
            _knock_at_last(ray)
            return _init(ray, NEAREST, quiet, option)
        except OSError:
            address = LOCAL
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        return _init(ray, LOCAL, {**quiet, "include_dashboard": False}, option)
    try:
        _knock(address)  # Ray itself would try for a minute, and print much
        _init(ray, address, quiet, option)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{option} {address}: no Ray cluster answers there ({reason}); start one with `ray start --head`, or use "
            f"{option} local"
        ) from None


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
        pass


def _knock_at_last(ray: Any) -> None:
    """Ray remembers the last cluster of this machine in a file, which stays when a head is killed; then Ray would try
    for minutes to reach it."""
    last = ray._private.services.find_bootstrap_address(None)
    if last is not None:
        _knock(last)


def _init(ray: Any, address: str, options: dict[str, Any], option: str) -> None:
    try:
        ray.init(address=address, **options)
    except RuntimeError as error:
        if "ersion" not in str(error):
            raise ConnectionError(str(error)) from None
        raise ConfigError(
            f"{option} {address}: Ray or Python differ between this process and the cluster; install the same versions "
            f"({' '.join(str(error).split())})"
        ) from None


def place(wishes: Wishes) -> Placement:
    """Replicas that the cluster has room for. Raises ConfigError."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    total = sum(node["Resources"].get("GPU", 0) for node in nodes)
    per_replica = wishes.gpus_per_replica if wishes.gpus_per_replica is not None else wishes.ranks * float(total > 0)
    if 0 < per_replica < wishes.ranks != 1:
        raise ConfigError(f"--gpus-per-replica {per_replica:g}: tensor_parallel {wishes.ranks} needs as many GPUs")
    able = sum(node["Resources"].get("CPU", 0) >= 1 for node in nodes)
    if not per_replica:
        return Placement(wishes.replicas or max(1, able), 0, float(able > 0))
    room = sum(_fits(node["Resources"].get("GPU", 0), per_replica) for node in nodes)
    wanted = wishes.replicas or max(1, room)
    if wanted > room:
        instead = f"use --replicas {room}" if room else "add GPUs, or use --gpus-per-replica 0 for CPUs"
        raise ConfigError(
            f"too few GPUs: {wanted} {'replica needs' if wanted == 1 else 'replicas need'} {per_replica:g} each on one "
            f"node, and the cluster has {total:g} on {len(nodes)} nodes; {instead}"
        )
    return Placement(wanted, per_replica, float(able > 0))


def _fits(gpus: float, per_replica: float) -> int:
    return int(gpus / per_replica) if per_replica <= 1 else int(gpus) // ceil(per_replica)
