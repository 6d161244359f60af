"""The format of a model's tool calls: from its chat template, or by name."""

from __future__ import annotations

from gapless.errors import ConfigError
from gapless.text.tools.base import ToolFormat
from gapless.text.tools.gemma import Gemma
from gapless.text.tools.hermes import Hermes
from gapless.text.tools.llama3 import Llama3
from gapless.text.tools.mistral import Mistral
from gapless.text.tools.plain import Plain
from gapless.text.tools.qwen_xml import QwenXml

FORMATS: tuple[ToolFormat, ...] = (
    QwenXml(),
    Hermes(),
    Mistral(has_args=True),
    Mistral(has_args=False),
    Gemma("gemma", "<|tool_call>", "<tool_call|>", '<|"|>'),
    Gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    Llama3(),
    Plain(),
)  # the first that fits
NAMES = tuple(each.name for each in FORMATS)


def find_format(template: str | None, name: str = "auto") -> ToolFormat:
    """The named format; with "auto" the one that the template is made for. Raises ConfigError."""
    if name == "auto":
        return next(each for each in FORMATS if each.fits(template or ""))
    found = next((each for each in FORMATS if each.name == name), None)
    if found is None:
        raise ConfigError(f"tool_format must be one of auto, {', '.join(NAMES)}; got {name!r}")
    return found
