"""Texts of a given shape, in one batch: JSON by a schema, a regex, a choice, and free text beside them.

    .venv/bin/python examples/structured.py [MAX_TOKENS]

Over HTTP the same is `response_format`, or vLLM's `structured_outputs`; docs/structured.md has all kinds.
"""

import json
import sys

from gapless import LLM, SamplingParams

MAX_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 64
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
    },
    "required": ["city", "inhabitants", "continent"],
    "additionalProperties": False,
}
QUESTIONS = {
    "Describe Tokyo as JSON.": {"structured": {"json_schema": SCHEMA}, "max_tokens": 64},
    "When did the first human walk on the Moon?": {"structured": {"regex": r"[12]\d{3}-\d{2}-\d{2}"}},
    "Is the Sun a star?": {"structured": {"choice": ["yes", "no"]}},
    "Why is the sky blue?": {},
}


def main() -> None:
    params = [SamplingParams(**{"temperature": 0, "max_tokens": MAX_TOKENS, **values}) for values in QUESTIONS.values()]
    with LLM("smollm2") as llm:
        talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, answer in zip(QUESTIONS, llm.chat(talks, params), strict=True):
            print(f"{question} {answer.text!r} ({answer.finish_reason})")
            if question.endswith("JSON."):
                print(json.loads(answer.text)["city"])


if __name__ == "__main__":
    main()
