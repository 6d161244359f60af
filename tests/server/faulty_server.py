"""`gapless serve` with the engine process of `faulty_engine`."""

from __future__ import annotations

import sys
from pathlib import Path

from gapless.cli import build_parser, engine_options
from gapless.commands.serve import server_options
from gapless.server.run import serve

if __name__ == "__main__":
    args = build_parser().parse_args()
    engine = Path(__file__).parent / "faulty_engine.py"
    sys.exit(serve(server_options(args), engine_options(args), (sys.executable, str(engine))))
