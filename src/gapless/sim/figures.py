"""The figures of a simulated run, and where its next bottleneck lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.sim.fleet import FleetRun
from gapless.sim.replica import CAUSES, COMPUTE, MEMORY, ROWS, Served

CROWDED = 0.05  # of the busy time: a shorter wait is no bottleneck
FULL = 0.85  # a device so busy has no room for bursts
ROUTER_FULL = 0.5  # of one processor: bursts are faster than the mean
UNEVEN = 1.25  # the most used twentieth of the replicas against the mean


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Latency:
        return cls(*np.quantile(values, (0.5, 0.9, 0.99)).tolist()) if len(values) else cls(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SimFigures:
    """What a run says."""

    num_requests: int
    num_refused: int
    seconds: float  # from the first arrival to the last token
    output_tokens_per_s: float
    input_tokens_per_s: float
    ttft: Latency
    tpot: Latency  # time per output token after the first
    whole: Latency
    cached_share: float  # of prompt tokens
    busy_share: float  # of the time; mean over replicas
    used_share: float  # of the capacity: busy, less what fuller steps would share
    most_used_share: float  # mean of the most used twentieth
    rows_per_step: float
    kv_share: float  # most blocks in use on any replica
    waited: dict[str, float]  # share of the busy time in which requests waited, by cause
    num_preemptions: int
    route_us: float  # processor time of the router for a request, on the machine that simulates
    router_share: float  # of one processor, at this rate of requests
    cost: float
    cost_per_million: float  # output tokens
    bottleneck: str


def ttfts(served: Sequence[Served]) -> list[float]:
    return [each.first_s - each.arrival.at_s for each in served]


def tpots(served: Sequence[Served]) -> list[float]:
    several = (each for each in served if each.arrival.num_output > 1)
    return [(each.end_s - each.first_s) / (each.arrival.num_output - 1) for each in several]


def wholes(served: Sequence[Served]) -> list[float]:
    return [each.end_s - each.arrival.at_s for each in served]


def figures_of(run: FleetRun, ranks: int, price: float) -> SimFigures:
    """price: of a GPU for an hour; each replica has `ranks` of them."""
    served = run.served
    seconds = max(run.end_s, 1e-9)
    num_output = sum(each.arrival.num_output for each in served)
    num_prompt = sum(each.arrival.num_prompt for each in served)
    busy = np.array([totals.busy_s for totals in run.totals])
    num_steps = sum(totals.num_steps for totals in run.totals)
    used = np.array([totals.work_s for totals in run.totals]) / seconds
    top = np.sort(used)[-max(len(used) // 20, 1) :]
    waited = np.sum([totals.waited_s for totals in run.totals], axis=0) / max(float(busy.sum()), 1e-9)
    cost = price * ranks * run.options.replicas * seconds / 3600
    shares = (float(used.mean()), float(top.mean()))
    chunk_share = sum(totals.chunk_s for totals in run.totals) / max(float(busy.sum()), 1e-9)
    return SimFigures(
        num_requests=len(served),
        num_refused=run.num_refused,
        seconds=seconds,
        output_tokens_per_s=num_output / seconds,
        input_tokens_per_s=num_prompt / seconds,
        ttft=Latency.of(ttfts(served)),
        tpot=Latency.of(tpots(served)),
        whole=Latency.of(wholes(served)),
        cached_share=sum(each.num_cached for each in served) / max(num_prompt, 1),
        busy_share=float(busy.mean()) / seconds,
        used_share=shares[0],
        most_used_share=shares[1],
        rows_per_step=sum(totals.num_rows for totals in run.totals) / max(num_steps, 1),
        kv_share=max(totals.most_blocks for totals in run.totals) / run.options.limits.num_blocks,
        waited=dict(zip(CAUSES, waited.tolist(), strict=True)),
        num_preemptions=run.num_preemptions,
        route_us=1e6 * run.router_s / max(len(served) + run.num_refused, 1),
        router_share=run.router_s / seconds,
        cost=cost,
        cost_per_million=cost / max(num_output, 1) * 1e6,
        bottleneck=bottleneck(shares, waited.tolist(), chunk_share, run.router_s / seconds),
    )


def bottleneck(
    used: tuple[float, float], waited: Sequence[float], chunk_share: float, router_share: float = 0.0
) -> str:
    """What to change first. used: the mean share of the capacity, and that of the most used replicas."""
    mean, most = used
    if router_share > ROUTER_FULL:
        return f"the router: choosing takes {router_share:.0%} of one processor; split the clients over several routers"
    crowded = sum(waited) > CROWDED
    if crowded and most > UNEVEN * mean and mean < FULL:
        return (
            f"routing: the most used replicas use {most:.0%} of their capacity and the mean {mean:.0%}; "
            "a router that knows loads would even them out"
        )
    if crowded:
        cause = int(np.argmax(waited))
        share = f"requests waited in {waited[cause]:.0%} of the busy time"
        return {
            ROWS: f"rows: {share} because all rows were taken; raise num_rows",
            MEMORY: f"KV memory: {share} because no blocks were free; add memory, ranks or replicas",
            COMPUTE: f"compute: {share} because steps were full of prompt tokens; add replicas or ranks",
        }[cause]
    if mean > FULL:
        part = "chunks of prompts" if chunk_share > 0.5 else "decode steps"
        return f"compute: {mean:.0%} of the capacity is used, mostly by {part}; add replicas"
    return f"none yet: {mean:.0%} of the capacity is used, and requests seldom wait"
