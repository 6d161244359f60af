"""Answers without an engine: flights whose tokens come in bursts, as the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from gapless.config import EngineOptions
from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams
from gapless.server.chat import ChatAnswer
from gapless.server.completions import CompletionAnswer
from gapless.server.generation import Choice, Generation
from gapless.server.logprobs import TokenTexts
from gapless.server.memory import Memory
from gapless.server.messages import Over, pack_scores
from gapless.server.protocol import ChatRequest, ResponsesRequest
from gapless.server.replies import ReplyPlan
from gapless.server.responses import ResponseAnswer
from gapless.server.roster import Flight
from gapless.server.supervisor import Supervisor
from gapless.server.tools import Toolbox
from gapless.text.parts import TokenizerParts
from gapless.text.reply import ReplyFormat
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools.plain import Plain
from gapless.text.transcript import Transcript

EOS, PROMPT = 0, (5, 6)
TALK: Any = [{"role": "user", "content": "Hello"}]
REPLIES = ReplyPlan(ReplyFormat(Plain(), None), Toolbox(), (), is_reasoning=False)


def make_tokenizer() -> Tokenizer:
    """A token for each byte, after the special end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({"</s>": EOS, **{char: 1 + i for i, char in enumerate(alphabet)}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(TokenizerParts(backend))


TOKENIZER = make_tokenizer()


def scored(token: int) -> bytes:
    return pack_scores([TokenLogprob(token, -1.0, 1, ())])


def play(
    body: Any,
    bursts: Sequence[Sequence[int]],
    reason: str,
    *,
    stop: Sequence[str] = (),
    tells_all: bool = True,
    replies: ReplyPlan = REPLIES,
    logprobs: int | None = 0,
) -> Any:
    """The answer to a flight whose tokens come in bursts: an object, or the chunks or events of a stream."""

    async def go() -> Any:
        changed = asyncio.Event()
        flight = Flight(
            0, PROMPT, SamplingParams(seed=1, logprobs=logprobs, stop=tuple(stop), prompt_logprobs=0), changed
        )
        flight.prompt_logprobs = [pack_scores([None, TokenLogprob(PROMPT[1], -2.0, 3, ())])]
        choice = Choice(0, flight, Transcript(TOKENIZER, stop, tells_starts=True), tells_all=tells_all)
        generation = Generation(Supervisor(EngineOptions()), [choice], changed, asyncio.get_running_loop().time() + 60)
        texts = TokenTexts(TOKENIZER, by_id=bool(getattr(body, "return_tokens_as_token_ids", False)))
        if isinstance(body, ChatRequest):
            answer: Any = ChatAnswer(generation, body, "tiny", texts, replies)
        elif isinstance(body, ResponsesRequest):
            answer = ResponseAnswer(generation, body, "tiny", [], Memory(), texts, replies)
        else:
            echoes = [TOKENIZER.decode(PROMPT, skip_special_tokens=False)] if body.echo else []
            answer = CompletionAnswer(generation, body, "tiny", echoes, texts)
        reading = asyncio.create_task(read(answer, bool(body.stream)))
        for burst in bursts:
            flight.tokens.extend(burst)
            flight.logprobs.extend(map(scored, burst))
            changed.set()
            for _ in range(5):
                await asyncio.sleep(0)
        flight.over = Over(0, reason)
        changed.set()
        return await reading

    return asyncio.run(go())


async def read(answer: Any, stream: bool) -> Any:
    if not stream:
        return json.loads(json.dumps(await answer.whole(), default=lambda raw: json.loads(bytes(raw))))
    data = b"".join([event async for event in answer.events()])
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
