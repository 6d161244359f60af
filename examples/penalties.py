"""The same prompt without a penalty, with each of the penalties, and with tokens made impossible by a bias.

.venv/bin/python examples/penalties.py [MAX_TOKENS]
"""

import sys

from gapless import LLM, SamplingParams

MAX_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 64
PROMPT = "The sky, the sky, the sky,"
PENALTIES = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},  # tokens of the prompt count, too
    "presence": {"presence_penalty": 1.5},  # tokens that were generated, whether once or often
    "frequency": {"frequency_penalty": 0.8},  # tokens that were generated, for each time
}


def main() -> None:
    with LLM("smollm2") as llm:
        assert llm.tokenizer is not None
        sky = llm.tokenizer.encode(" sky", add_special_tokens=False)
        choices = PENALTIES | {"bias": {"logit_bias": dict.fromkeys(sky, -100)}}
        params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **values) for values in choices.values()]
        results = llm.generate([PROMPT] * len(params), params)  # one batch: each request has its own penalties
        for name, result in zip(choices, results, strict=True):
            print(f"{name}: {len(set(result.token_ids))} different tokens of {len(result.token_ids)}: {result.text!r}")


if __name__ == "__main__":
    main()
