"""What the API needs of the engines behind it, one or many: a supervisor is one, a pool of replicas is many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gapless.core.params import SamplingParams
from gapless.core.structured import Structured
from gapless.server.messages import GrammarChecked, Ready
from gapless.server.roster import Flight
from gapless.server.totals import EngineTotals

if TYPE_CHECKING:
    from gapless.server.supervisor import Supervisor

ONLY = ""  # the name of an engine that has no others beside it


class Engines(Protocol):
    """Always there, sometimes slow. A flight that they take never ends because an engine did."""

    on_over: list[Callable[[Flight], None]]

    @property
    def info(self) -> Ready | None: ...  # of the latest engine that was ready

    @property
    def is_ready(self) -> bool: ...  # whether any of them takes requests

    @property
    def in_quarantine(self) -> bool: ...  # whether requests wait until it is known which one crashes engines

    @property
    def num_rows(self) -> int: ...  # requests that run at the same time

    @property
    def num_restarts(self) -> int: ...

    @property
    def loaded_share(self) -> float: ...

    def unfinished(self) -> Sequence[Flight]: ...

    def members(self) -> Mapping[str, Supervisor]: ...  # by name

    def totals(self) -> Mapping[str, EngineTotals]: ...  # by name; of former engines too

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, changed: asyncio.Event, session: str | None = None
    ) -> Flight: ...

    def abort(self, flight: Flight, reason: str = "abort") -> None: ...

    async def ping(self, timeout_s: float) -> bool: ...

    async def check_grammar(self, structured: Structured, timeout_s: float) -> GrammarChecked | None: ...

    async def run(self) -> None: ...

    def restart(self) -> None: ...  # replace every engine, while requests go on

    async def close(self) -> None: ...

    def kill(self) -> None: ...
