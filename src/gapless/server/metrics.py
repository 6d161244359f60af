"""The metrics of `/metrics`, in Prometheus's text format.

Owns the counters of the API process, and totals of the engine's counters that go on when another engine takes over.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gapless.server.messages import EnginePulse
from gapless.server.roster import Flight
from gapless.server.supervisor import Supervisor

disable_created_metrics()  # type: ignore[no-untyped-call]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ENGINE_COUNTERS = {
    "num_steps": ("gapless_steps", "forward passes"),
    "num_prompt_tokens": ("gapless_prompt_tokens", "tokens of admitted prompts"),
    "num_cached_tokens": ("gapless_prefix_hit_tokens", "prompt tokens found in the prefix cache"),
    "num_generated": ("gapless_generated_tokens", "tokens generated"),
    "num_overrun": ("gapless_wasted_tokens", "tokens sampled for requests that had already ended"),
    "num_preemptions": ("gapless_preemptions", "requests that gave way for lack of KV blocks"),
    "num_recomputed": ("gapless_recomputed_positions", "positions that preemptions threw away"),
    "busy_s": ("gapless_device_busy_seconds", "seconds in which the compute stream worked"),
}


class EngineTotals:
    """The engine's counters, summed over the engines that there were."""

    def __init__(self) -> None:
        self._before: Tally[tuple[str, str]] = Tally()
        self._now: dict[tuple[str, str], float] = {}

    def observe(self, pulse: EnginePulse) -> None:
        now = {("stats", name): value for name, value in pulse.stats.items()}
        now |= {("ledger", reason): float(count) for reason, count in pulse.ledger.items()}
        self._now = now | {("idle", cause): seconds for cause, seconds in pulse.idle_s.items()}

    def engine_died(self) -> None:
        self._before.update(self._now)
        self._now = {}

    def get(self, kind: str, name: str) -> float:
        return self._before[kind, name] + self._now.get((kind, name), 0.0)

    def names(self, kind: str) -> list[str]:
        return sorted({name for found, name in (*self._before, *self._now) if found == kind})


class Metrics:
    """All metrics of one server."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.registry = CollectorRegistry()
        self.totals = EngineTotals()
        self._supervisor = supervisor
        supervisor.on_over.append(self._observe)
        supervisor.on_pulse.append(self.totals.observe)
        supervisor.on_crash.append(self.totals.engine_died)
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
        supervisor, pulse = self._supervisor, self._supervisor.pulse
        info = supervisor.info
        running = pulse.num_running if pulse is not None else 0
        yield GaugeMetricFamily("gapless_running_requests", "requests in the batch", running)
        waiting = max(0, len(supervisor.roster) - running)
        yield GaugeMetricFamily("gapless_waiting_requests", "requests in the queue", waiting)
        used = pulse.num_used_blocks / info.num_blocks if pulse is not None and info is not None else 0.0
        yield GaugeMetricFamily("gapless_kv_use_ratio", "share of KV blocks in use", used)
        yield GaugeMetricFamily("gapless_engine_up", "1 when the engine takes requests", int(supervisor.is_ready))
        restarts = supervisor.num_restarts
        yield CounterMetricFamily("gapless_engine_restarts", "engines that died and were replaced", restarts)
        for name, (metric, text) in ENGINE_COUNTERS.items():
            yield CounterMetricFamily(metric, text, self.totals.get("stats", name))
        yield self._labelled("gapless_gpu_idle_seconds", "device idle seconds by cause", "idle", "cause")
        yield self._labelled("gapless_ledger", "fast paths missed, by reason", "ledger", "reason")

    def _labelled(self, name: str, text: str, kind: str, label: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=[label])
        for found in self.totals.names(kind):
            family.add_metric([found], self.totals.get(kind, found))
        return family
