"""`gapless chat`: a conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gapless import __version__
from gapless.chat.dialogue import Dialogue, load
from gapless.chat.lines import PipedLines, TypedLines
from gapless.chat.orders import NAMES
from gapless.chat.reply import Partner
from gapless.chat.screen import Screen
from gapless.chat.session import Session, check_params
from gapless.chat.tool_file import read_tools
from gapless.commands import EXIT_FAILED
from gapless.config import EngineOptions, api_key, state_dir, wants_colour
from gapless.errors import ConfigError
from gapless.server.options import ServerOptions
from gapless.text.tools.base import Tool

FORMATS = ("tool_format", "reasoning_format")  # options that a server has, too
TEMPERATURE = 0.7  # as on the server's page; the engine's own default, 1.0, is for texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `gapless chat`, besides those of the engine and of sampling."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="the system message")
    add("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    add("--tools", metavar="FILE", help="JSON list of tools to offer; you type the results of calls")
    for field in dataclasses.fields(ServerOptions):
        if field.name in FORMATS:
            add("--" + field.name.replace("_", "-"), metavar="FORMAT", help=field.metadata["help"] + " (default: auto)")
    add("--history", metavar="FILE", help="lines typed before (default: chat_history in XDG_STATE_HOME)")
    add("--no-history", action="store_true", help="neither read nor keep the lines that are typed")
    add("--url", help="talk with an OpenAI endpoint such as http://127.0.0.1:8000; loads no model here")
    add("--api-key", metavar="KEY", help="key of the endpoint (default: GAPLESS_API_KEY)")
    add("--served-model", metavar="NAME", help="name of the model there; default: the first it lists")


def chat(args: argparse.Namespace, options: EngineOptions, params: dict[str, Any]) -> int:
    """Talk until the input ends; 1 when anything that was said could not be answered."""
    dialogue, kept = load(args.load) if args.load is not None else (Dialogue(), {})
    dialogue.system = args.system if args.system is not None else dialogue.system
    chosen = {"temperature": TEMPERATURE, **kept, **params}
    check_params(chosen)
    tools = read_tools(args.tools) if args.tools is not None else ()
    partner = _partner(args, options)
    try:
        return _talk(partner, args, dialogue, chosen, tools)
    finally:
        partner.close()


def _partner(args: argparse.Namespace, options: EngineOptions) -> Partner:
    if args.url is None:
        for flag in ("api_key", "served_model"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} needs --url")
        from gapless.chat.local import LocalPartner
        from gapless.llm import LLM

        tools, reasoning = (getattr(args, name) or "auto" for name in FORMATS)
        ServerOptions(tool_format=tools, reasoning_format=reasoning)  # raises ConfigError before the model is loaded
        llm = LLM(**dataclasses.asdict(options))
        return LocalPartner(llm, options.model, tool_format=tools, reasoning_format=reasoning)
    for name in (*(field.name for field in dataclasses.fields(EngineOptions)), *FORMATS):
        if getattr(args, name, None) is not None:
            hint = "; --served-model names the server's" if name == "model" else ""
            raise ConfigError(f"--{name.replace('_', '-')} is for a local model; leave it out with --url{hint}")
    from gapless.chat.remote import RemotePartner

    return RemotePartner(args.url, args.api_key or api_key(), args.served_model)


def _talk(
    partner: Partner, args: argparse.Namespace, dialogue: Dialogue, params: dict[str, Any], tools: Sequence[Tool] = ()
) -> int:
    screen = Screen(colour=wants_colour())
    if not sys.stdin.isatty():
        session = Session(partner, PipedLines(), screen, dialogue, params, tools)
        session.run(stoppable=False)
        return EXIT_FAILED if session.num_errors else 0
    lines = TypedLines(NAMES, _history(args))
    session = Session(partner, lines, screen, dialogue, params, tools)
    screen.note(f"Gapless {__version__}: {partner.description}")
    screen.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    try:
        session.run(stoppable=True)
    finally:
        lines.close()
    return 0


def _history(args: argparse.Namespace) -> Path | None:
    if args.no_history:
        return None
    return Path(args.history) if args.history is not None else state_dir() / "chat_history"
