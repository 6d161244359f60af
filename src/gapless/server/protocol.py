"""The wire types of what clients of the OpenAI API send. Null is the same as absent. Knows no engine and no HTTP.

`neutral` says what becomes of names that are not here.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

MAX_SEED = 2**63 - 1
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


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
PromptBody = Annotated[_PromptType, PlainValidator(_check_prompt, json_schema_input_type=_PromptType)]
TokenIds = Annotated[list[TokenId], PlainValidator(_check_token_ids, json_schema_input_type=list[TokenId])]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="usage so far in every chunk")


class Sampling(Body):
    """The fields that chats, completions and responses share. Names beyond OpenAI's are the engine's own."""

    model: str | None = Field(None, description="a name that /v1/models lists; default: the one model")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0 is greedy")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="0 is greedy")
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 or -1 keeps all tokens")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="before this many, neither a stop token nor a stop string ends the text"
    )
    logprobs_mode: str | None = Field(None, description="raw_logprobs (default) or processed_logprobs")
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100)] | None = Field(None, description="0 or -1 keeps all tokens")
    repetition_penalty: float | None = Field(None, description="of tokens in prompt or output; 1 is none")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(None, description="of tokens in the output")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="of each time that a token is in the output"
    )
    allowed_token_ids: list[TokenId] | None = Field(None, description="no others may come")
    bad_token_ids: list[TokenId] | None = None
    bad_words: list[str | list[TokenId]] | None = Field(None, description="texts, or token ids, that are not completed")
    logit_bias: dict[str, float] | None = Field(None, description="token ids to what is added to their logits")
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = Field(
        None, description="keep the stop string, or the stop token's text, in the text"
    )
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json, json_object, regex, choice, grammar, structural_tag (docs/structured.md)"
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="a JSON schema; older spelling of vLLM")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="Lark, or GBNF")
    guided_whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = Field(None, description="free text in which tags open a shape")
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = Field(None, description="seconds; at most the server's own limit")


class Choosing(Sampling):
    """The fields that chats and completions share."""

    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        None, description="completions to generate; the n with the highest mean log-probability are returned"
    )
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = Field(
        None, description='{"type": "text"}, "json_object", "json_schema" or "structural_tag"'
    )
    echo: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="log-probabilities of the prompt's tokens, and of so many of the likeliest; not in a stream"
    )
    return_token_ids: bool | None = Field(None, description="tell the token ids of prompt and text")
    return_tokens_as_token_ids: bool | None = Field(None, description='log-probabilities name tokens "token_id:5"')


class MessageBody(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Choosing):
    messages: list[MessageBody] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = Field(None, description="begin the assistant's turn; default: true")
    continue_final_message: bool | None = Field(None, description="go on with the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further values for the chat template")
    tools: list[dict[str, Any]] | None = Field(None, description="functions that the model may call")
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto, none, required, or a named function")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call a reply")
    reasoning_effort: str | None = Field(None, description="for the chat template, if it reads it")
    include_reasoning: bool | None = Field(None, description="false: reasoning_content is left out")


class CompletionRequest(Choosing):
    prompt: PromptBody
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None


class ReasoningOptions(Body):
    effort: str | None = Field(None, description="for the chat template, if it reads it")


class ResponsesRequest(Sampling):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="false: the response is not kept")
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None
    reasoning: ReasoningOptions | None = None
    text: dict[str, Any] | None = Field(None, description='{"format": {"type": "json_schema", "schema": {...}}}')
    include: list[str] | None = Field(None, description='may have "message.output_text.logprobs"')
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="functions that the model may call")
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto, none, required, or a named function")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call a reply")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further values for the chat template")
    max_tool_calls: int | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true")
    add_generation_prompt: bool | None = Field(None, description="default: true")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
