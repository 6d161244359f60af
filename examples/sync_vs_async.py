"""The same prompts with one step in flight, then with two: the same tokens, and a line that says how each overlapped.

    .venv/bin/python examples/sync_vs_async.py [MAX_TOKENS]

In float32, because a batch may have another size at another depth, and on a GPU bfloat16 products of another size round
differently. On a CPU expect the two to be about as fast: docs/pipeline.md says why.
"""

import sys

from gapless import LLM, SamplingParams
from gapless.report import overlap_line

MAX_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 48
PROMPTS = [
    f"{topic} is" for topic in ("A river", "The Moon", "Bread", "A prime number", "Paris", "A tree", "Rain", "Salt")
]


def generate(depth: int) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM("smollm2", dtype="float32", depth=depth) as llm:
        before = llm.stats()
        results = llm.generate(PROMPTS, params)
        print(overlap_line(llm.stats() - before, llm.engine.monitor))
    return [result.token_ids for result in results]


def main() -> None:
    synchronous, asynchronous = generate(depth=1), generate(depth=2)
    assert synchronous == asynchronous, "tokens must not depend on the depth"
    print(f"{sum(map(len, synchronous))} tokens, equal at both depths")


if __name__ == "__main__":
    main()
