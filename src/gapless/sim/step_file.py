"""Engines as the simulator sees them: limits and step times, measured here or shipped.

A file of measured steps has a line for the engine and a line for each step; `gapless bench steps` writes it. The
shipped ones hold only what was fitted, and say what they were measured on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gapless.core.limits import Limits
from gapless.errors import ConfigError
from gapless.sim.costs import TERMS, Costs, MeasuredStep, StepShape, fit

LIMIT_NAMES = ("num_rows", "num_blocks", "block_size", "max_batch_tokens", "max_model_len", "prefix_cache")
SHIPPED = ("h200-8b", "h200-0.6b")
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class StepFile:
    """Measured steps, and the engine that ran them."""

    limits: Limits
    depth: int
    name: str  # of the model and the device
    steps: tuple[MeasuredStep, ...]


@dataclass(frozen=True, slots=True)
class SimEngine:
    """An engine to simulate."""

    limits: Limits
    depth: int
    name: str  # of the model and the device
    costs: Costs


def write_steps(path: str, found: StepFile) -> None:
    """A line for the engine, and a line for each step."""
    limits = {name: getattr(found.limits, name) for name in LIMIT_NAMES}
    head = {"name": found.name, "depth": found.depth, "limits": limits}
    lines = [json.dumps(head), *(json.dumps({**asdict(s.shape), "seconds": s.seconds}) for s in found.steps)]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def read_engine(source: str) -> SimEngine:
    """The engine of a file of measured steps, or one that is shipped. Raises ConfigError."""
    if source in SHIPPED:
        return _shipped(source)
    try:
        found = read_steps(source)
    except FileNotFoundError:
        raise ConfigError(
            f"--costs {source}: no such file; shipped are {', '.join(SHIPPED)}; `gapless bench steps` measures others"
        ) from None
    return SimEngine(found.limits, found.depth, found.name, fit(found.steps))


def _shipped(name: str) -> SimEngine:
    row = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    limits, depth = _limits(name, row)
    seconds = tuple(float(row["seconds"][term]) for term in TERMS)
    return SimEngine(limits, depth, row["name"], Costs(seconds, row["num_steps"], row["error"], row["error_p90"]))


def read_steps(path: str) -> StepFile:
    """The steps of a file that `gapless bench steps` wrote. Raises ConfigError, or FileNotFoundError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path}: the measured steps cannot be read: {reason}") from None
    rows = [_object(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows or not isinstance(rows[0].get("limits"), dict):
        raise ConfigError(f"{path}: line 1 has no limits; `gapless bench steps` writes such files")
    limits, depth = _limits(path, rows[0])
    steps = tuple(_step(path, number, row) for number, row in enumerate(rows[1:], 2))
    return StepFile(limits, depth, str(rows[0].get("name", path)), steps)


def _limits(path: str, row: dict[str, Any]) -> tuple[Limits, int]:
    """The limits and the depth of the engine."""
    sizes: dict[str, Any] = {name: _integer(path, 1, row["limits"], name) for name in LIMIT_NAMES[:-1]}
    limits = Limits(**sizes, prefix_cache=bool(row["limits"].get("prefix_cache", True)))
    return limits, _integer(path, 1, row, "depth")


def _object(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {number}: not a JSON object; `gapless bench steps` writes such files")
    return row


def _integer(path: str, number: int, row: dict[str, Any], name: str, least: int = 1) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{path}, line {number}: {name} must be an integer of at least {least}, not {value!r}")
    return value


def _step(path: str, number: int, row: dict[str, Any]) -> MeasuredStep:
    seconds = row.get("seconds")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < float("inf"):
        raise ConfigError(f"{path}, line {number}: seconds must be a number above 0, not {seconds!r}")
    counts = {f.name: _integer(path, number, row, f.name, 0) for f in fields(StepShape)}
    return MeasuredStep(StepShape(**counts), float(seconds))
