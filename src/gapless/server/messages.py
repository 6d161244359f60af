"""Messages between the API process and its child processes. Values only; msgspec turns them into bytes.

Token ids travel as raw little-endian int32, everything else as MessagePack. Nothing here can carry code.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams
from gapless.core.structured import Structured

LaneSpan = tuple[float, float, str]  # begin and end, in seconds before now, and what it was
Scores = bytes  # log-probabilities of a token, or of some in a row, packed: most of the time they are only passed on
_encode_scores = msgspec.msgpack.Encoder().encode
_decode_scores = msgspec.msgpack.Decoder(list[TokenLogprob | None]).decode


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the tag tells them apart."""


# -- to the engine process ---------------------------------------------------------------------------------------------


class Start(WireMessage, frozen=True):
    """The first message: what to load."""

    options: dict[str, Any]  # fields of EngineOptions


class SubmitFlight(WireMessage, frozen=True):
    """Run this. `generated` are tokens that an engine before this one already sampled."""

    id: int
    prompt: bytes
    generated: bytes
    params: SamplingParams  # with its seed


class AbortFlight(WireMessage, frozen=True):
    id: int


class PingLoop(WireMessage, frozen=True):
    id: int


class ReadTimeline(WireMessage, frozen=True):
    id: int
    seconds: float


class ReadTrace(WireMessage, frozen=True):
    id: int


class CompileGrammar(WireMessage, frozen=True):
    id: int
    structured: Structured


class CloseEngine(WireMessage, frozen=True):
    """End."""


ToEngine = Start | SubmitFlight | AbortFlight | PingLoop | ReadTimeline | ReadTrace | CompileGrammar | CloseEngine


# -- from the engine process -------------------------------------------------------------------------------------------


class Loading(WireMessage, frozen=True):
    """How many tensors are loaded, of how many. Sent every fraction of a second by a thread that does not load."""

    done: int
    total: int
    processor_s: float = 0.0  # time that all threads have used, to a tenth: it stands still where loading is stuck


class LoadFailed(WireMessage, frozen=True):
    """The last message of an engine that could not start."""

    message: str


class Ready(WireMessage, frozen=True):
    """The engine takes requests; what the API needs to know of it."""

    device: str
    dtype: str
    architecture: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_rows: int
    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...]  # of each group of layers
    kv_bytes: int


class Over(WireMessage, frozen=True):
    """A request has ended."""

    id: int
    reason: str  # "stop", "length", "abort", "error", or "invalid": refused before the queue
    num_cached: int = 0
    error: str | None = None
    param: str | None = None  # what an invalid request is invalid for


class News(WireMessage, frozen=True):
    """New tokens since the last message, in order, and after them the requests that ended."""

    ids: list[int]
    tokens: list[int]
    over: list[Over]
    logprobs: dict[int, Scores] = {}  # by index in `tokens`, of those who asked
    prompt_logprobs: dict[int, list[Scores]] = {}  # by request, with its first token


class Pong(WireMessage, frozen=True):
    id: int


class GrammarChecked(WireMessage, frozen=True):
    """A grammar was compiled, or is refused."""

    id: int
    refusal: str | None = None
    is_busy: bool = False  # it is refused because others are being compiled


class EnginePulse(WireMessage, frozen=True):
    """Sent every fraction of a second by a thread that is not the loop's."""

    num_turns: int
    idle: bool
    num_running: int
    num_waiting: int
    num_used_blocks: int
    depth: int
    elapsed_s: float  # since the engine was ready
    stats: dict[str, float]  # counters of Monitor.stats
    ledger: dict[str, int]
    idle_s: dict[str, float]  # of the device, by cause


class LaneTimes(WireMessage, frozen=True):
    """The last seconds of each lane."""

    id: int
    seconds: float  # fewer than asked for, where too much happened in them
    lanes: dict[str, list[LaneSpan]]


class SavedTrace(WireMessage, frozen=True):
    """The timeline of the last steps, as `Timeline.save` writes it."""

    id: int
    data: bytes


class Failed(WireMessage, frozen=True):
    """The engine's last words: a step raised, or the loop died. These requests were in it."""

    message: str
    suspects: list[int]


class Log(WireMessage, frozen=True):
    level: int
    logger: str
    message: str


FromEngine = (
    Loading | LoadFailed | Ready | News | Pong | GrammarChecked | EnginePulse | LaneTimes | SavedTrace | Failed | Log
)


def pack_scores(scores: Sequence[TokenLogprob | None]) -> Scores:
    return _encode_scores(scores)


def unpack_scores(scores: Scores) -> list[TokenLogprob | None]:
    return _decode_scores(scores)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    values = array("i", tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
