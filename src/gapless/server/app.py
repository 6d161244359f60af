"""The routes: HTTP in, HTTP out. What a request means is decided in `service`, how an answer looks in `chat`,
`completions` and `responses`; here they meet FastAPI, which also writes the OpenAPI page.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from gapless import __version__
from gapless.server.absent import about
from gapless.server.answers import (
    ChatResponse,
    CompletionResponse,
    DeletedResponse,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    ResponseObject,
    TokenizeResponse,
    TokenizerInfo,
)
from gapless.server.chat import answer_chat, turn
from gapless.server.completions import answer_completion
from gapless.server.description import ERRORS, STREAM, describe
from gapless.server.errors import ApiError, dump, error_response, first_finding
from gapless.server.gate import CLIENT, Gate
from gapless.server.memory import Memory
from gapless.server.metrics import Metrics
from gapless.server.neutral import refuse_unsupported
from gapless.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, ResponsesRequest, TokenizeRequest
from gapless.server.responses import answer_response
from gapless.server.service import Caller, Service
from gapless.server.sse import ClientGone, EventStream, LongResponse, finish_for
from gapless.server.state import read_state
from gapless.server.tools import chat_tools
from gapless.server.traces import Traces

PAGE = Path(__file__).parent / "page"
SESSION_HEADER = "x-session-id"
CLIENT_GONE = 499  # nobody reads it; it is for the log
GENERATION_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses"))


class Cors(CORSMiddleware):
    """Starlette's, with the error object for whom it turns away."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        refusal = error_response(ApiError(answer.status_code, bytes(answer.body).decode(), code="cors_refused"))
        for name, value in answer.headers.items():
            refusal.headers.setdefault(name, value)
        return refusal


class Answer(Protocol):
    """An answer under way."""

    async def whole(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...

    def error_event(self, error: ApiError) -> bytes: ...


def build_app(service: Service, metrics: Metrics, keys: Sequence[str], traces: Traces) -> FastAPI:
    """The application, with all its layers."""
    app = FastAPI(
        title="Gapless", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS, redirect_slashes=False
    )
    memory = Memory()
    service.on_default_limit = metrics.default_limits.inc
    _add_generation(app, service, metrics, memory)
    _add_responses(app, memory)
    _add_text(app, service)
    _add_operation(app, service, metrics)
    _add_pages(app)
    _add_errors(app, metrics)
    describe(app)
    app.add_middleware(Gate, options=service.options, keys=keys, metrics=metrics, traces=traces)
    if service.options.cors_origin:  # outside of the gate: what a browser asks first comes without a key
        origins = service.options.cors_origin
        app.add_middleware(Cors, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _add_generation(app: FastAPI, service: Service, metrics: Metrics, memory: Memory) -> None:
    async def begin(work: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return await work
        except ApiError as error:
            metrics.observe_refusal(error.status)
            raise

    @app.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        answer = await begin(answer_chat(service, body, _caller(request)))
        return await _respond(service, request, answer, body.stream)

    @app.post("/v1/completions", response_model=CompletionResponse, responses=STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        answer = await begin(answer_completion(service, body, _caller(request)))
        return await _respond(service, request, answer, body.stream)

    @app.post("/v1/responses", response_model=ResponseObject, responses=STREAM)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        answer = await begin(answer_response(service, body, memory, _caller(request)))
        return await _respond(service, request, answer, body.stream)


def _add_responses(app: FastAPI, memory: Memory) -> None:
    @app.get("/v1/responses/{response_id}", response_model=ResponseObject)
    async def read_response(response_id: str, stream: bool = False) -> Response:
        if stream:
            raise ApiError(400, "a response that is kept is not streamed again", param="stream")
        return Response(memory.read(response_id), media_type="application/json")

    @app.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
    async def forget_response(response_id: str) -> Response:
        memory.forget(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})


def _caller(request: Request) -> Caller:
    """The name of a session is only compared, so a short hash of it serves as well, however long it is."""
    client, session = str(request.scope[CLIENT]), request.headers.get(SESSION_HEADER)
    if session is None:
        return Caller(client)
    return Caller(client, blake2b(f"{client} {session}".encode(), digest_size=16).hexdigest())


async def _respond(service: Service, request: Request, answer: Answer, stream: bool | None) -> Response:
    if stream:
        return EventStream(answer.events(), answer.error_event, answer.close, service.options.write_timeout)
    try:
        return LongResponse(dump(await finish_for(request, answer.whole())), service.options.write_timeout)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        answer.close()


def _add_text(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        return _json({"object": "list", "data": [_card(service, name) for name in service.names]})

    @app.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model(model: str) -> Response:
        return _json(_card(service, service.check_model(model)))

    @app.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        refuse_unsupported(body)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await service.prompts.encode(body.prompt, param="prompt", add_special_tokens=special)
        else:
            prompts, tools = service.prompts, chat_tools(body.tools, None, None).offered
            messages = prompts.chat_messages(body.messages or [])
            tokens = await prompts.encode_chat(messages, tools=tools, **turn(prompts, body))
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": service.info.max_model_len})

    @app.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        refuse_unsupported(body)
        service.check_tokens(body.tokens, "tokens")
        return _json({"prompt": await service.prompts.decode(body.tokens)})

    @app.get("/tokenizer_info", response_model=TokenizerInfo)
    async def tokenizer_info() -> Response:
        return _json(service.tokenizer_info())


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.engines.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "gapless",
        "max_model_len": info.max_model_len if info is not None else None,
    }


def _add_operation(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 when the engine's loop answers, 503 when it is dead, stuck or loading."""
        alive = await service.engines.ping(service.options.health_timeout)
        return _json({"status": "ok"}) if alive else error_response(ApiError(503, "the engine does not answer"))

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """200 when requests are served at once, 503 while loading, restarting, recovering or draining."""
        reason = service.not_ready()
        return _json({"status": "ready"}) if reason is None else error_response(ApiError(503, reason, code=reason))

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/state")
    async def state(seconds: Annotated[float, Query(ge=0, le=60)] = 4.0) -> Response:
        """The state that the page at / shows."""
        return _json(await read_state(service, seconds))


def _add_pages(app: FastAPI) -> None:
    def page(name: str) -> Callable[[], Any]:
        text = re.sub(
            r"<!-- (\w+\.\w+) -->", lambda part: (PAGE / part[1]).read_text("utf-8"), (PAGE / name).read_text("utf-8")
        )

        async def show() -> HTMLResponse:
            return HTMLResponse(text, headers={"content-security-policy": POLICY})

        return show

    app.get("/", include_in_schema=False)(page("index.html"))
    app.get("/docs", include_in_schema=False)(page("docs.html"))


# The pages load nothing: their scripts and styles are in them, and they talk to this server only.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        text = {404: about(request.url.path), 405: f"{request.method} is not allowed here"}
        answer = error_response(ApiError(error.status_code, text.get(error.status_code, str(error.detail))))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        if request.method == "POST" and request.url.path in GENERATION_PATHS:
            metrics.observe_refusal(400)
        if request.method == "POST" and "json" not in request.headers.get("content-type", ""):
            return error_response(
                ApiError(415, "the body must be JSON, with the header content-type: application/json")
            )
        return error_response(_validation_error(error.errors()))


def _validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first finding of pydantic, with the name of the parameter."""
    place, text = first_finding(errors)
    if errors[0]["type"] == "json_invalid":  # the place is a position in the text
        return ApiError(400, "the body is not valid JSON")
    if place == ("body",):
        return ApiError(400, "the body must be a JSON object")
    param = ".".join(str(part) for part in place if part not in ("body", "query")) or None
    return ApiError(400, f"{param}: {text}" if param else text, param=param)


def _json(value: Any) -> Response:
    return Response(dump(value), media_type="application/json")
