"""Writes a line for each request that ended: when it came, how long it was, what its prompt shares with others.

`gapless sim` replays the file. It has hashes of the prompts' blocks, and no text and no tokens. A disk that is full
ends the recording, with a line in the log, and no request.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from gapless.core.prefix_hashes import prefix_hashes
from gapless.errors import ConfigError
from gapless.server.roster import Flight

HASH_TOKENS = 16  # of one hash, as in a block of the KV cache
HASH_DIGITS = 12  # hexadecimal: other readers of JSON may have 53 bits for an integer

log = logging.getLogger(__name__)


class RequestTrace:
    """A file of requests, one line each, in the order of their ends. The event loop is its only writer."""

    def __init__(self, path: str) -> None:
        """Append to this file. Raises ConfigError."""
        self._path = path
        self._began_s = (
            time.monotonic() - time.time()
        )  # so that runs of a server, one after the other, may share a file
        try:
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 -- open while the server runs
        except OSError as error:
            raise ConfigError(f"record_trace {path}: {error.strerror}") from None

    def add(self, flight: Flight) -> None:
        """A request is over."""
        if self._file.closed or not flight.tokens:
            return  # without a token it cost the engine little, and often nothing
        try:
            self._file.write(json.dumps(self._row(flight)) + "\n")
        except OSError as error:
            log.warning("record_trace %s: %s; requests are not recorded any more", self._path, error.strerror)
            self.close()

    def _row(self, flight: Flight) -> dict[str, Any]:
        row: dict[str, Any] = {
            "arrival_s": round(flight.arrived_s - self._began_s, 4),
            "prompt_tokens": len(flight.prompt),
            "output_tokens": len(flight.tokens),
            "hash_tokens": HASH_TOKENS,
            "hashes": [int(value.hex()[:HASH_DIGITS], 16) for value in prefix_hashes(flight.prompt, HASH_TOKENS)],
            "cached_tokens": flight.num_cached or 0,
        }
        for name, at_s in (("first_token_s", flight.first_token_s), ("end_s", flight.over_s)):
            row[name] = None if at_s is None else round(at_s - flight.arrived_s, 4)
        return row

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.warning("record_trace %s: %s", self._path, error.strerror)
