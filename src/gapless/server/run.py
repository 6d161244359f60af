"""The API process from start to end: the socket, the signals, the drain.

SIGTERM or Ctrl-C   take no more requests, finish what runs within the drain time, exit 0
the second one      now, exit 143
SIGUSR1             replace the engines one after the other, while requests go on (replicas only)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from gapless.config import EngineOptions, api_key, log_level, trace_endpoint
from gapless.errors import ConfigError, ModelNotFound
from gapless.garbage import collect_rarely
from gapless.models.source import ModelSource, resolve
from gapless.server.app import build_app
from gapless.server.engines import Engines
from gapless.server.logs import LineWriter, set_up_logs
from gapless.server.metrics import Metrics
from gapless.server.options import ServerOptions, read_keys
from gapless.server.render_pool import RenderPool
from gapless.server.request_trace import RequestTrace
from gapless.server.service import Service
from gapless.server.supervisor import Supervisor
from gapless.server.traces import Traces
from gapless.server.watchdog import Watchdog
from gapless.server.wire import Http
from gapless.text import load_tokenizer
from gapless.text.local_chat import template_source
from gapless.text.tokenizer import Tokenizer

EXIT_NOW = 143
SHUTDOWN_S = 1.0  # for answers already written to reach their clients
BACKLOG = 2048
log = logging.getLogger(__name__)


EnginesMaker = Callable[[ServerOptions, EngineOptions], AbstractContextManager[Engines]]


@contextlib.contextmanager
def own_engine(options: ServerOptions, engine: EngineOptions) -> Iterator[Engines]:
    """One engine, in a process of this machine."""
    yield Supervisor(engine, Watchdog(options.load_timeout, options.step_timeout))


def serve(options: ServerOptions, engine: EngineOptions, make_engines: EnginesMaker = own_engine) -> int:
    """Serve until told to stop; returns the exit status. Raises GaplessError when it cannot start."""
    keys = read_keys(options, api_key())
    options.check_tls()
    source = resolve(engine.model)
    tokenizer = _tokenizer(source, options.chat_template)
    sock = _listen(options)
    try:
        writer = set_up_logs(options.log_file, log_level())
    except OSError as error:
        raise ConfigError(f"log_file {options.log_file}: {error}") from error
    recorded = None if options.record_trace is None else RequestTrace(options.record_trace)
    if not options.is_loopback and not keys:
        log.warning("listening on %s without an API key: anybody who reaches it can use it", options.host)
    try:
        with make_engines(options, engine) as engines, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            if recorded is not None:
                engines.on_over.append(recorded.add)
            return runner.run(_serve(options, engine, engines, source, tokenizer, keys, sock, writer))
    finally:
        writer.close()
        if recorded is not None:
            recorded.close()


async def _serve(
    options: ServerOptions,
    engine: EngineOptions,
    engines: Engines,
    source: ModelSource,
    tokenizer: Tokenizer | None,
    keys: Sequence[str],
    sock: socket.socket,
    writer: LineWriter,
) -> int:
    renderer = RenderPool(template_source(tokenizer), options.template_timeout)
    service = Service(
        options,
        engines,
        tokenizer,
        renderer,
        options.served_model_name or (source.name,),
        allow_special_tokens=engine.allow_special_tokens,
    )
    metrics = Metrics(engines)
    writer.on_loss = metrics.log_lines_lost.inc
    traces = Traces(trace_endpoint())
    app = build_app(service, metrics, keys, traces)
    collect_rarely()
    host, port = sock.getsockname()[:2]
    if tokenizer is not None and tokenizer.chat_template is not None:
        await renderer.start()
        if not engine.allow_special_tokens:
            tokenizer.control.prepare()
    scheme = "http" if options.ssl_certfile is None else "https"
    log.info("listening on %s://%s:%d", scheme, host, port, extra={"port": port, "model": source.name})
    try:
        return await Life(service, app, sock).run()
    finally:
        await engines.close()
        renderer.close()
        await asyncio.to_thread(traces.close)


class Life:
    """Server and engines side by side, until a signal or a failure."""

    def __init__(self, service: Service, app: FastAPI, sock: socket.socket) -> None:
        options = service.options
        self._service = service
        self._sock = sock
        self._server = _Server(
            uvicorn.Config(
                app,
                http=partial(Http, header_timeout_s=options.header_timeout),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                server_header=False,
                timeout_graceful_shutdown=int(SHUTDOWN_S),
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
            )
        )
        self._num_signals = 0
        self._status = 0
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGUSR1, self._service.engines.restart)
        engines = asyncio.create_task(self._service.engines.run())
        serving = asyncio.create_task(self._server.serve([self._sock]))
        await asyncio.wait((engines, serving), return_when=asyncio.FIRST_COMPLETED)
        self._server.should_exit = True
        await serving
        if engines.done():
            engines.result()  # raises why there is no engine
        await self._service.engines.close()  # which still hears what the engine has to say
        engines.cancel()
        return self._status

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._service.draining = True
            self._drain = asyncio.create_task(self._finish())
        else:
            log.warning("second signal: stopping now")
            self._service.engines.kill()
            os._exit(EXIT_NOW)

    async def _finish(self) -> None:
        """Let what runs finish, end what does not, and stop."""
        engines, options = self._service.engines, self._service.options
        log.info("draining: %d requests have %g s to finish", len(engines.unfinished()), options.drain_timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.drain_timeout):
                while engines.unfinished():
                    await asyncio.sleep(0.02)
        for flight in engines.unfinished():
            engines.abort(flight)
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn, without its own idea of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(options: ServerOptions) -> socket.socket:
    """A bound socket: wrong addresses are found before anything is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error}") from error
    return sock


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _tokenizer(source: ModelSource, template: str | None) -> Tokenizer | None:
    try:
        tokenizer = load_tokenizer(source)
    except ModelNotFound as error:
        log.warning("%s", error)
        return None
    return tokenizer if template is None else tokenizer.with_template(read_template(template))


def read_template(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path}: {error}") from error
