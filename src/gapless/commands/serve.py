"""`gapless serve`: an HTTP server that speaks the OpenAI API. Loads what it needs of the extra `serve`, or says so."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from gapless.config import EngineOptions
from gapless.errors import ConfigError
from gapless.server.options import ServerOptions

if TYPE_CHECKING:
    from gapless.distributed.serving import ReplicaWishes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of ServerOptions."""
    group = parser.add_argument_group("server")
    for field in dataclasses.fields(ServerOptions):
        flag = "--" + field.name.replace("_", "-")
        shown = "" if field.default in (None, ()) else f" (default: {field.default})"
        if field.default == ():
            group.add_argument(flag, action="append", default=None, metavar="TEXT", help=field.metadata["help"])
        else:
            kind = type(field.default) if field.default is not None else str
            group.add_argument(flag, type=kind, default=None, help=field.metadata["help"] + shown)
    add_replica_arguments(parser.add_argument_group("replicas, on a Ray cluster"))


def add_replica_arguments(group: argparse._ArgumentGroup) -> None:
    number = group.add_mutually_exclusive_group()
    number.add_argument(
        "--replicas", type=int, metavar="N", help="engines; each has a process on a node of the cluster"
    )
    number.add_argument("--autoscale", metavar="MIN:MAX", help="as many engines as the load needs, within these limits")
    group.add_argument(
        *("--ray",), nargs="?", const="auto", metavar="ADDRESS", help="HOST:PORT of the head, local, or auto (default)"
    )
    group.add_argument("--gpus-per-replica", type=float, metavar="X", help="default: 1 if the cluster has GPUs, else 0")


def replica_wishes(args: argparse.Namespace, engine: EngineOptions) -> ReplicaWishes | None:
    """What the flags ask of a cluster; None without one. Raises ConfigError."""
    if args.replicas is None and args.autoscale is None and args.ray is None:
        if args.gpus_per_replica is not None:
            raise ConfigError("--gpus-per-replica needs --replicas, --autoscale or --ray")
        return None
    if engine.ranks_on_ray is not None:
        raise ConfigError("--ranks-on-ray is for one engine; the ranks of a replica are on its node, without this flag")
    from gapless.distributed.cluster import NEAREST, Wishes
    from gapless.distributed.serving import ReplicaWishes, read_range

    least, most = read_range(args.autoscale) if args.autoscale is not None else (args.replicas, None)
    if least is not None and least < 1:
        raise ConfigError(f"--replicas must be at least 1, got {least}")
    if args.gpus_per_replica is not None and not 0 <= args.gpus_per_replica < math.inf:
        raise ConfigError(f"--gpus-per-replica must be 0 or more, got {args.gpus_per_replica}")
    return ReplicaWishes(Wishes(args.ray or NEAREST, least, args.gpus_per_replica, engine.tensor_parallel), most)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Options from flags. Raises ConfigError."""
    given: dict[str, Any] = {field.name: getattr(args, field.name) for field in dataclasses.fields(ServerOptions)}
    found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    return ServerOptions(**found)


def serve(args: argparse.Namespace, engine: EngineOptions) -> int:
    """Run the server until it is told to stop."""
    options = server_options(args)
    if isinstance(engine.trace, str):
        from gapless.trace.files import TraceFiles

        TraceFiles.at(engine.trace)  # raises ConfigError where it could not be written in the end
    try:
        from gapless.server.run import serve as run
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}; run `pip install 'gapless[serve]'`") from error
    wishes = replica_wishes(args, engine)
    return run(options, engine, wishes.engines) if wishes is not None else run(options, engine)
