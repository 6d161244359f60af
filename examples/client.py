"""Talk to a running server with the `openai` package: `gapless serve`, then

.venv/bin/python examples/client.py [MAX_TOKENS] [URL]
"""

import sys

from openai import OpenAI

MAX_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 64
URL = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens from {model}")


if __name__ == "__main__":
    main()
