"""What the engine process tells of its engine: facts, pulses, timelines. Read from outside the loop's thread."""

from __future__ import annotations

import dataclasses
import logging

from gapless.errors import GaplessError
from gapless.pipeline.engine import Engine, Monitor
from gapless.server.messages import EnginePulse, LaneSpan, Ready
from gapless.trace.files import TraceFiles

LANES = ("cpu", "h2d", "gpu", "d2h")
log = logging.getLogger(__name__)


def describe(engine: Engine) -> Ready:
    """The facts that the API process needs."""
    resolved = engine.resolved
    limits, model = resolved.limits, resolved.model
    return Ready(
        device=resolved.device_name,
        dtype=str(resolved.dtype).removeprefix("torch."),
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        max_model_len=limits.max_model_len,
        num_rows=limits.num_rows,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        windows=limits.windows,
        kv_bytes=resolved.kv_bytes,
    )


def read_pulse(engine: Engine, elapsed_s: float, idle_s: dict[str, float]) -> EnginePulse:
    """A reading of everything, from outside the loop."""
    pulse, monitor = engine.pulse(), engine.monitor
    load = monitor.load()
    return EnginePulse(
        num_turns=pulse.num_turns,
        idle=pulse.idle,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_used_blocks=load.num_used_blocks,
        depth=monitor.depth,
        elapsed_s=elapsed_s,
        stats=dataclasses.asdict(monitor.stats()),
        ledger=monitor.ledger(),
        idle_s=idle_s,
    )


def write_trace(engine: Engine) -> None:
    """The last steps' timeline, where one is wanted."""
    name = engine.options.trace
    if not isinstance(name, str):
        return
    try:
        files = TraceFiles.at(name)
        files.write([engine.monitor.timeline()])
    except GaplessError as error:
        log.warning("no timeline: %s", error)
    else:
        log.info("timeline: %s", files)


def read_timeline(monitor: Monitor, seconds: float) -> tuple[float, dict[str, list[LaneSpan]]]:
    """How many of the last seconds, and their lanes. Takes the interpreter lock from the loop's thread for a moment."""
    found = monitor.timeline_tail(seconds)
    return found["seconds"], {lane: [(-begin, -end, name) for begin, end, name, _ in found[lane]] for lane in LANES}
