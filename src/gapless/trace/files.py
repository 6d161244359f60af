"""The files of a timeline: T.json for Perfetto's viewer, and T.html, the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gapless.errors import ConfigError
from gapless.trace import page, perfetto
from gapless.trace.timeline import Timeline


@dataclass(frozen=True, slots=True)
class TraceFiles:
    """The two files, by one name."""

    json: Path
    html: Path

    @classmethod
    def at(cls, name: str) -> TraceFiles:
        """The files of a name; T, T.json and T.html mean the same. Raises ConfigError if they cannot be there."""
        path = Path(name)
        base = path.with_suffix("") if path.suffix in (".json", ".html") else path
        if not base.name or not base.absolute().parent.is_dir():
            raise ConfigError(f"{name}: a trace cannot be written there: no such folder")
        found = cls(base.with_name(base.name + ".json"), base.with_name(base.name + ".html"))
        if path.is_dir() or found.json.is_dir() or found.html.is_dir():
            raise ConfigError(f"{name}: a trace cannot be written there: is a folder")
        return found

    def write(self, timelines: Sequence[Timeline]) -> None:
        """Write both."""
        models = dict.fromkeys(str(timeline.facts.get("model", "")) for timeline in timelines)
        title = ": ".join(["Gapless timeline", *filter(None, [", ".join(filter(None, models))])])
        try:
            with self.json.open("w", encoding="utf-8") as file:
                perfetto.write(timelines, file)
            self.html.write_text(page.render(timelines, title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self.json}: cannot be written: {error.strerror}") from None

    def __str__(self) -> str:
        return f"{self.html} (report), {self.json} (for Perfetto's viewer)"
