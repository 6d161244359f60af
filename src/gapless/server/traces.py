"""A span for each HTTP request, sent to an OpenTelemetry endpoint when one is configured and the packages are there.

A span belongs to the trace that the client's headers name, if they do. Loads nothing otherwise. The standard variables
OTEL_* are read by OpenTelemetry itself.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any

from starlette.types import Scope

log = logging.getLogger(__name__)
TraceSpan = AbstractContextManager[Any]


class Traces:
    """Makes spans, or nothing."""

    def __init__(self, endpoint: str | None) -> None:
        self._provider: Any = _provider() if endpoint else None
        self._tracer: Any = self._provider.get_tracer("gapless") if self._provider is not None else None

    def span(self, scope: Scope, request_id: str) -> TraceSpan:
        """A block that is one span, given to it; or None where there are no traces."""
        if self._tracer is None:
            return contextlib.nullcontext()
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "gapless.request_id": request_id,
        }
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return _server_span(self._tracer, f"{scope['method']} {scope['path']}", headers, attributes)

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _server_span(tracer: Any, name: str, headers: dict[str, str], attributes: dict[str, str]) -> TraceSpan:
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    span: TraceSpan = tracer.start_as_current_span(name, extract(headers), SpanKind.SERVER, attributes)
    return span


def _provider() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("an OpenTelemetry endpoint is configured, but %s; pip install 'gapless[otel]'", error)
        return None
    given = OTELResourceDetector().detect().attributes
    provider = TracerProvider(resource=Resource.create({"service.name": "gapless", **given}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
