"""Let a model call functions of this program, with the `openai` package: `gapless serve --model ...`, then

.venv/bin/python examples/tools.py [MAX_TOKENS] [URL]

The model should have been trained to call tools, as Qwen3 and Llama 3.1 were; docs/tools.md has the details.
"""

import json
import sys

from openai import OpenAI

MAX_TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 256
URL = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
MAX_ROUNDS = 4  # a model may call tools again when it has seen their results


def get_weather(city: str) -> str:
    return {"Oslo": "4 degrees, rain", "Rome": "19 degrees, sunny"}.get(city, "unknown")


FUNCTIONS = {"get_weather": get_weather}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    options = {"model": client.models.list().data[0].id, "tools": TOOLS, "max_tokens": MAX_TOKENS, "temperature": 0}
    talk = [{"role": "user", "content": "Is it warmer in Oslo or in Rome?"}]
    for _ in range(MAX_ROUNDS):
        message = client.chat.completions.create(messages=talk, **options).choices[0].message
        talk.append(message)
        for call in message.tool_calls or ():
            try:
                result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            except (TypeError, ValueError) as error:  # without `strict` the model may write any arguments
                result = f"error: {error}"
            print(f"{call.function.name} {call.function.arguments} -> {result}")
            talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    print(message.content)


if __name__ == "__main__":
    main()
