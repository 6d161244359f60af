"""`gapless serve`: an HTTP server that speaks the OpenAI API. Loads what it needs of the extra `serve`, or says so."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from gapless.config import EngineOptions
from gapless.errors import ConfigError
from gapless.server.options import ServerOptions


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
    return run(options, engine)
