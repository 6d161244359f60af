"""`gapless serve` with the engine process of `faulty_engine`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from gapless.cli import build_parser, engine_options
from gapless.commands.serve import server_options
from gapless.config import EngineOptions
from gapless.server.engine_child import children
from gapless.server.options import ServerOptions
from gapless.server.run import serve
from gapless.server.supervisor import Supervisor
from gapless.server.watchdog import Watchdog

if __name__ == "__main__":
    args = build_parser().parse_args()
    engine = Path(__file__).parent / "faulty_engine.py"

    @contextlib.contextmanager
    def faulty(options: ServerOptions, wanted: EngineOptions) -> Iterator[Supervisor]:
        watchdog = Watchdog(options.load_timeout, options.step_timeout)
        yield Supervisor(wanted, watchdog, children((sys.executable, str(engine))))

    sys.exit(serve(server_options(args), engine_options(args), faulty))
