"""Load the embedded model, continue a few prompts, and answer a message.

.venv/bin/python examples/quickstart.py [MAX_TOKENS]
"""

import sys

from gapless import LLM, SamplingParams

MAX_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 48
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]


def main() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    varied = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=MAX_TOKENS)
    with LLM("smollm2") as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, [greedy, greedy, varied]), strict=True):
            print(f"{prompt!r} -> {result.text!r} ({result.finish_reason}, {len(result.token_ids)} tokens)")
        answer = llm.chat([{"role": "user", "content": "Why is the sky blue? One sentence."}], greedy)
        print(answer.text)


if __name__ == "__main__":
    main()
