"""The metrics of `/metrics`, in Prometheus's text format.

Owns the counters of the API process. What engines count is read when it is asked for; with several engines, the label
`replica` says which one counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gapless.server.engines import ONLY, Engines
from gapless.server.roster import Flight
from gapless.server.totals import EngineTotals

disable_created_metrics()  # type: ignore[no-untyped-call]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ENGINE_COUNTERS = {
    "num_steps": ("gapless_steps", "forward passes"),
    "num_prompt_tokens": ("gapless_prompt_tokens", "tokens of admitted prompts"),
    "num_cached_tokens": ("gapless_prefix_hit_tokens", "prompt tokens found in the prefix cache"),
    "num_generated": ("gapless_generated_tokens", "tokens generated"),
    "num_forced": ("gapless_forced_tokens", "generated tokens without a step of their own: nothing else could come"),
    "num_overrun": ("gapless_wasted_tokens", "tokens sampled for requests that had already ended"),
    "num_preemptions": ("gapless_preemptions", "requests that gave way for lack of KV blocks"),
    "num_recomputed": ("gapless_recomputed_positions", "positions that preemptions threw away"),
    "busy_s": ("gapless_device_busy_seconds", "seconds in which the compute stream worked"),
}


class Metrics:
    """All metrics of one server."""

    def __init__(self, engines: Engines) -> None:
        self.registry = CollectorRegistry()
        self._engines = engines
        engines.on_over.append(self._observe)
        self.http = Counter("gapless_http_requests", "answers", ("path", "status"), registry=self.registry)
        self.log_lines_lost = Counter("gapless_log_lines_lost", "lines not written", registry=self.registry)
        self.default_limits = Counter(
            "gapless_default_limit", "generations that ended at default_max_tokens", registry=self.registry
        )
        self._outcomes = Counter(
            "gapless_requests", "generations that ended, by outcome", ("outcome",), registry=self.registry
        )
        self._ttft = self._histogram("gapless_time_to_first_token_seconds", "from arrival to the first token")
        self._tpot = self._histogram("gapless_time_per_output_token_seconds", "between tokens after the first, mean")
        self._queue = self._histogram("gapless_queue_seconds", "from arrival to the first step")
        self._whole = self._histogram("gapless_request_seconds", "from arrival to the end")
        self.registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)

    def observe_refusal(self, status: int) -> None:
        """A request for a generation that never reached the queue."""
        self._outcomes.labels("refused" if status in (429, 503) else "invalid").inc()

    def _observe(self, flight: Flight) -> None:
        assert flight.over is not None
        assert flight.over_s is not None
        self._outcomes.labels(flight.over.reason).inc()
        self._whole.observe(flight.over_s - flight.arrived_s)
        if flight.started_s is not None:
            self._queue.observe(flight.started_s - flight.arrived_s)
        if flight.first_token_s is not None:
            self._ttft.observe(flight.first_token_s - flight.arrived_s)
            if len(flight.tokens) > 1:
                self._tpot.observe((flight.over_s - flight.first_token_s) / (len(flight.tokens) - 1))

    def collect(self) -> Iterable[Metric]:
        """Values that are read when they are collected, for the registry."""
        engines = self._engines
        yield from self._gauges()
        yield CounterMetricFamily(
            "gapless_engine_restarts", "engines that died and were replaced", engines.num_restarts
        )
        totals = engines.totals()
        for name, (metric, text) in ENGINE_COUNTERS.items():
            family = _family(CounterMetricFamily, metric, text, totals)
            for replica, found in totals.items():
                family.add_metric(_values(replica), found.get("stats", name))
            yield family
        yield _by_name(totals, "gapless_gpu_idle_seconds", "device idle seconds by cause", "idle", "cause")
        yield _by_name(totals, "gapless_ledger", "fast paths missed, by reason", "ledger", "reason")

    def _gauges(self) -> Iterable[Metric]:
        members = self._engines.members()
        families = [
            _family(GaugeMetricFamily, name, text, members)
            for name, text in (
                ("gapless_running_requests", "requests in the batch"),
                ("gapless_kv_use_ratio", "share of KV blocks in use"),
                ("gapless_engine_up", "1 when the engine takes requests"),
            )
        ]
        for replica, member in members.items():
            for family, value in zip(families, (member.num_running, member.kv_use, member.is_ready), strict=True):
                family.add_metric(_values(replica), value)
        yield from families
        num_running = sum(member.num_running for member in members.values())
        waiting = max(0, len(self._engines.unfinished()) - num_running)
        yield GaugeMetricFamily("gapless_waiting_requests", "requests in the queue", waiting)


def _family(kind: Any, name: str, text: str, engines: Mapping[str, object], *labels: str) -> Any:
    """A metric of each engine. An engine that has no others beside it needs no label."""
    return kind(name, text, labels=[*labels, *([] if ONLY in engines else ["replica"])])


def _values(replica: str, *labels: str) -> list[str]:
    return [*labels, *([] if replica == ONLY else [replica])]


def _by_name(totals: Mapping[str, EngineTotals], name: str, text: str, kind: str, label: str) -> Metric:
    family = _family(CounterMetricFamily, name, text, totals, label)
    for replica, found in totals.items():
        for what in found.names(kind):
            family.add_metric(_values(replica, what), found.get(kind, what))
    assert isinstance(family, Metric)
    return family
