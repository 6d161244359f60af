"""Several streams at once from one engine: requests join and leave the running batch at any step.

.venv/bin/python examples/streaming.py [MAX_TOKENS]
"""

import asyncio
import sys

from gapless import AsyncLLM, SamplingParams

MAX_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 32
QUESTIONS = ["Why is the sky blue?", "Name three rivers.", "What is a prime number?"]


async def ask(llm: AsyncLLM, number: int, question: str) -> int:
    """Print each piece as it comes; return how many tokens there were."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    num_tokens = 0
    async for delta in llm.stream_chat([{"role": "user", "content": question}], params):
        num_tokens += len(delta.token_ids)
        if delta.text:
            print(f"[{number}] {delta.text!r}", flush=True)
        if delta.completion is not None:
            print(f"[{number}] done: {delta.completion.finish_reason}", flush=True)
    return num_tokens


async def main() -> None:
    async with AsyncLLM("smollm2") as llm:
        counts = await asyncio.gather(*(ask(llm, number, text) for number, text in enumerate(QUESTIONS)))
        print(f"{sum(counts)} tokens in {llm.stats().num_steps} steps")


if __name__ == "__main__":
    asyncio.run(main())
