"""The shape of a whole reply: what its tools demand, its reasoning, and the shape that its text was asked to have.

Joins a response format with tools and reasoning into one value for the engine. Knows no grammar.
"""

from __future__ import annotations

import json
from dataclasses import replace

from gapless.core.params import SamplingParams
from gapless.core.structured import Structured, read_structured
from gapless.errors import InvalidRequest
from gapless.server.errors import ApiError, refused
from gapless.server.replies import ReplyPlan
from gapless.text.tools.base import TagShape
from gapless.text.tools.demand import Demand, reply_shape


def demanded(plan: ReplyPlan, params: SamplingParams) -> SamplingParams:
    """The parameters with the shape of the whole reply in place of that of its text. Raises ApiError."""
    if plan.toolbox.mode == "required":
        for name in ("min_tokens", "ignore_eos"):
            if getattr(params, name):
                raise ApiError(400, f"{name} contradicts tool_choice: the calls say where to end", param=name)
    with refused("tools"):
        shape = _shape(plan, params.structured)
        return params if shape is params.structured else replace(params, structured=shape)


def _shape(plan: ReplyPlan, answer: Structured | None) -> Structured | None:
    demand = _demand(plan, answer)
    if demand is None and (answer is None or plan.format.reasoning is None):
        return answer
    inner = None if answer is None else _as_tags(answer)
    if inner is None and answer is not None:
        if demand is not None:
            raise InvalidRequest(f"{answer.param}: this {answer.kind} does not go together with tools", answer.param)
        return answer
    format, is_reasoning = plan.format, plan.is_reasoning
    shape = reply_shape(format.tools, demand, format.reasoning, is_reasoning=is_reasoning, answer=inner)
    return read_structured({"structural_tag": {"format": shape}}, "tools" if answer is None else answer.param)


def _demand(plan: ReplyPlan, answer: Structured | None) -> Demand | None:
    toolbox = plan.toolbox
    if not toolbox.offered or not (toolbox.needs_grammar or answer is not None):
        return None
    is_required = toolbox.mode == "required"
    return Demand(toolbox.callable, is_required=is_required, is_parallel=toolbox.is_parallel, enforces_all=is_required)


def _as_tags(answer: Structured) -> TagShape | None:
    """A shape as a part of structural tags; None for one that only stands alone."""
    match answer.kind:
        case "json_schema" if answer.whitespace is None:
            return {"type": "json_schema", "json_schema": json.loads(answer.text)}
        case "json_object" if answer.whitespace is None:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": answer.text}
        case "choice":
            texts = json.loads(answer.text)
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        case "grammar" if "::=" not in answer.text:
            return {"type": "grammar", "grammar": answer.text}
        case "structural_tag":
            format: TagShape | None = json.loads(answer.text).get("format")
            return format
        case _:
            return None
