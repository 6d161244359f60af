"""Parameters that the server does not have: which of them change nothing, and what is said to the others.

A parameter is taken, or asks for nothing, or is refused by name with status 400: none is silently ignored. Null is the
same as absent, for any name.
"""

from __future__ import annotations

from typing import Any

from gapless.server.errors import ApiError
from gapless.server.protocol import Body

# Parameters that never change the tokens.
HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "max_tool_calls",
        "request_id",
        "cache_salt",
        "priority",
    )
)
# Parameters that Gapless does not have, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),  # of a response, which has text.format
    "guided_decoding_backend": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "reasoning": ({},),
    "verbosity": (),
    "moderation": (),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "include": ([],),
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "prompt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "include_reasoning": (True, False),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "continuous_usage_stats": (False,),
}
NEWER = {"functions": "tools", "function_call": "tool_choice"}


def refuse_unsupported(body: Body) -> None:
    """Raise ApiError for the first parameter that asks for something Gapless does not have."""
    for name, value in (body.model_extra or {}).items():
        if value is not None and name not in HARMLESS:
            _check(name, value)
    if (reasoning := getattr(body, "reasoning", None)) is not None:
        refuse_unsupported(reasoning)
    options = getattr(body, "stream_options", None)
    if options is not None and not getattr(body, "stream", None):
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    if options is not None:
        refuse_unsupported(options)


def _check(name: str, value: object) -> None:
    if name == "chat_template":
        message = "a chat template is set by the server's flag --chat-template only"
        raise ApiError(400, message, param=name, code="unsupported_parameter")
    if name in NEWER and value not in NEUTRAL[name]:
        message = f"{name!r} is not supported; its newer form, {NEWER[name]!r}, is"
        raise ApiError(400, message, param=name, code="unsupported_parameter")
    if name not in NEUTRAL:
        raise ApiError(400, f"unknown parameter: {name!r}", param=name, code="unknown_parameter")
    if not any(value == neutral and _same_kind(value, neutral) for neutral in NEUTRAL[name]):
        raise ApiError(400, f"{name!r} is not supported with this value", param=name, code="unsupported_parameter")


def _same_kind(value: object, neutral: object) -> bool:
    """True == 1 in Python; on the wire they differ."""
    return isinstance(value, bool) == isinstance(neutral, bool)
