"""The parser of the command line: a mistake is one line that says what to do, not a page of usage."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gapless.commands import EXIT_USAGE


class CommandParser(argparse.ArgumentParser):
    """Each subcommand has one, too: argparse makes them of the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown option here, where the known ones are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._about(unknown))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nRun `{self.prog} --help` for the options.\n")

    def _about(self, unknown: Sequence[str]) -> str:
        option = next((word for word in unknown if word.startswith("-")), None)
        if option is None:
            return f"unexpected argument {unknown[0]!r}; text with spaces needs quotes"
        name = option.partition("=")[0]
        close = difflib.get_close_matches(name, list(self._option_string_actions), n=1)
        return f"unknown option {name}" + (f"; did you mean {close[0]}?" if close else "")


def add_command(group: Any, name: str, text: str, handler: Callable[[Any], int]) -> argparse.ArgumentParser:
    """A subcommand, and the function that does it."""
    parser: argparse.ArgumentParser = group.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(handler=handler)
    return parser
