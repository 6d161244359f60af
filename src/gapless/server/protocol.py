"""The wire types of the OpenAI API that the server takes, and what it says to parameters it does not have.

A parameter is taken, or known to change nothing, or refused by name with status 400: none is silently ignored.
Knows no engine and no HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from gapless.server.errors import ApiError

MAX_SEED = 2**63 - 1
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

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
# Parameters that Gapless does not have, and the values that ask for nothing; null always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
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
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "echo": (False,),
    "include_reasoning": (True, False),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "continuous_usage_stats": (False,),
}


class Body(BaseModel):
    """A request body. Types are taken as they are: the text "5" is not a number."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _check_prompt(value: object) -> object:
    """As the type says; by hand, because a megabyte of token ids takes the general way half a second."""
    if isinstance(value, str) or (isinstance(value, list) and _check_list(value)):
        return value
    raise ValueError("must be text, token ids, or a list of either")


def _check_list(values: list[Any]) -> bool:
    kinds = {type(value) for value in values}
    if kinds == {list}:
        return all(_check_ids(value) for value in values)
    return kinds in (set(), {str}) or _check_ids(values)


def _check_ids(values: Any) -> bool:
    return set(map(type, values)) <= {int} and (not values or 0 <= min(values) <= max(values) < 2**31)


def _check_token_ids(value: object) -> object:
    if isinstance(value, list) and _check_ids(value):
        return value
    raise ValueError("must be a list of token ids")


_PromptType = str | list[str] | list[TokenId] | list[list[TokenId]]
Prompt = Annotated[_PromptType, PlainValidator(_check_prompt, json_schema_input_type=_PromptType)]
TokenIds = Annotated[list[TokenId], PlainValidator(_check_token_ids, json_schema_input_type=list[TokenId])]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Body):
    """What all three ways to generate share. Names beyond OpenAI's are the engine's own."""

    model: str | None = Field(None, description="a name that /v1/models lists; default: the one model")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 or -1 keeps all tokens")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = Field(None, description="seconds; at most the server's own limit")


class Message(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class CompletionRequest(Sampling):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = Field(None, description="tell the token ids of each piece beside its text")


class ResponsesRequest(Sampling):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = Field(None, description='may have "message.output_text.logprobs"')
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


def refuse_unsupported(body: Body) -> None:
    """Raise ApiError for the first parameter that asks for something Gapless does not have."""
    for name, value in (body.model_extra or {}).items():
        if name in HARMLESS:
            continue
        if name not in NEUTRAL:
            raise ApiError(400, f"unknown parameter: {name!r}", param=name, code="unknown_parameter")
        if value is not None and not any(value == neutral and _same_kind(value, neutral) for neutral in NEUTRAL[name]):
            raise ApiError(400, f"{name!r} is not supported with this value", param=name, code="unsupported_parameter")
    options = getattr(body, "stream_options", None)
    if options is not None and not getattr(body, "stream", None):
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    if options is not None:
        refuse_unsupported(options)


def _same_kind(value: object, neutral: object) -> bool:
    """True == 1 in Python; on the wire they differ."""
    return isinstance(value, bool) == isinstance(neutral, bool)
