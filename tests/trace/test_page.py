"""The report in a real browser: lanes are drawn, zoom, keys and pointer work, numbers are those of the trace file.

Chromium opens a copy of the page with a script at its end that does what a user would, and prints what it saw.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import simulated

from gapless.trace import page, perfetto
from gapless.trace.columns import PHASES
from gapless.trace.recorder import STEP_FAILED
from gapless.trace.timeline import Timeline

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]
TIMEOUT_S = 120.0
FRAME_MS = 50.0  # a drawing may take this long, on a machine in use
TOOLS = """
function colours(panel, lane) {  // how often each colour occurs in a lane, the background left out
  const ratio = panel.canvas.width / panel.width, g = panel.canvas.getContext("2d"), found = {};
  const y = (AXIS + lane * (LANE + SPACE) + LANE - 4) * ratio, width = panel.canvas.width - (LEFT + RIGHT) * ratio;
  const data = g.getImageData(LEFT * ratio, y, width, 1).data;
  for (let i = 0; i < data.length; i += 4) {
    const key = data.slice(i, i + 3).join();
    found[key] = (found[key] || 0) + 1;
  }
  return found;
}
const inked = (panel, lane) => Object.keys(colours(panel, lane)).length;
"""


def visit(timelines: list[Timeline], script: str, tmp_path: Path, *flags: str) -> Any:
    """Run a script that returns a value at the end of the page, and give that value."""
    body = f"try {{ seen = (() => {{ {script} }})(); }} catch (error) {{ seen = String(error); }}"
    hook = f"<script>{{ {TOOLS} let seen; {body}"
    hook += """const out = document.body.appendChild(document.createElement("pre"));
    out.id = "seen"; out.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(seen)))); }</script>"""
    path = tmp_path / "page.html"
    path.write_text(page.render(timelines, "Test").replace("</body>", hook + "</body>"), encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", *flags]
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [*command, folder, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    found = re.search(r'<pre id="seen">([A-Za-z0-9+/=]+)</pre>', done.stdout)
    assert found, f"the page's script failed: {done.stderr[-2000:]}"
    return json.loads(base64.b64decode(found[1]))


@pytest.fixture(scope="module")
def both() -> list[Timeline]:
    return [simulated(400, 1, seed=1, num_generated=9999), simulated(400, 2, seed=2, num_generated=9998)]


def test_lanes_are_drawn_and_gaps_show_at_depth_1_only(both: list[Timeline], tmp_path: Path) -> None:
    script = """
    const view = {...gapless.view}, panels = gapless.panels;
    const accent = (lane) => Math.max(...Object.values(lane));
    return {
      window: view.t1 - view.t0, lanes: panels.map((p) => [0, 1, 2, 3].map((lane) => inked(p, lane))),
      gpu: panels.map((p) => accent(colours(p, 2)) / (p.canvas.width - (LEFT + RIGHT))),
      idleColours: panels.map((p) => inked(p, 2)),
    };"""
    seen = visit(both, script, tmp_path)
    assert seen["window"] < both[0].seconds / 10, "it opens on a few steps"
    for lanes in seen["lanes"]:
        assert all(count >= 2 for count in lanes), "each lane has more than its background"
    assert 0.75 < seen["gpu"][0] < 0.93
    assert seen["gpu"][1] > 0.97 - 0.03
    assert seen["idleColours"][0] >= 5, "gaps have the colours of their causes"


def test_numbers_are_those_of_the_trace_file(both: list[Timeline], tmp_path: Path) -> None:
    file = io.StringIO()
    perfetto.write(both, file)
    runs = json.loads(file.getvalue())["otherData"]["runs"]
    script = """return {
      summaries: gapless.runs.map((run) => run.summary),
      busy: gapless.runs.map((run) => run.gpu.covered(1e9)),
      idle: gapless.runs.map((run) => run.causes.map((cause, j) => [cause, run.sumIdle[j][run.n]])),
      text: document.body.innerText,
    };"""
    seen = visit(both, script, tmp_path)
    assert seen["summaries"] == runs
    for run, busy, idle in zip(runs, seen["busy"], seen["idle"], strict=True):
        assert busy == pytest.approx(run["busy_s"])
        assert dict(idle) == pytest.approx(run["idle_by_cause"], rel=1e-4)
    assert f"{100 * runs[0]['idle_share']:.1f}% GPU idle" in seen["text"]
    assert "9,999 tokens" in seen["text"]
    assert "the host planned the step" in seen["text"]


def test_wheel_keys_buttons_and_dragging(both: list[Timeline], tmp_path: Path) -> None:
    script = """
    const panel = gapless.panels[0], canvas = panel.canvas, lengths = [], look = () => {
      gapless.redraw(); lengths.push([gapless.view.t0, gapless.view.t1]); };
    gapless.show(0, 1e9); look();
    canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -800, cancelable: true, clientX: 700, clientY: 300})); look();
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "+"})); look();
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"})); look();
    document.querySelector("[data-do=out]").click(); look();
    const at = canvas.getBoundingClientRect(), point = (kind, x, y = 40) =>
      canvas.dispatchEvent(new PointerEvent(kind, {clientX: at.left + x, clientY: at.top + y, bubbles: true}));
    point("pointerdown", 600); point("pointermove", 500); point("pointerup", 500); look();
    document.querySelector("[data-do=largest]").click(); look();
    const middle = panel.width / 2 + 24;
    point("pointermove", middle);
    const tip = document.getElementById("tip"), host = tip.innerText;
    point("pointermove", middle, AXIS + 2.4 * (LANE + SPACE));
    const gap = tip.innerText, shown = getComputedStyle(tip).visibility;
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "Home"})); look();
    return {lengths, host, gap, shown};"""
    seen = visit(both, script, tmp_path)
    whole, wheel, key, right, out, dragged, largest, home = seen["lengths"]
    length = [end - begin for begin, end in seen["lengths"]]
    assert whole == home == [0, pytest.approx(max(t.seconds for t in both))]
    assert length[1] < 0.5 * length[0]
    assert length[2] == pytest.approx(0.5 * length[1])
    assert right[0] > key[0]
    assert length[4] == pytest.approx(2 * length[3])
    assert dragged[0] > out[0]
    assert length[5] == pytest.approx(length[4])
    assert length[6] < 5e-3
    assert wheel[0] > 0
    assert largest != home
    assert seen["host"].startswith("CPU")
    assert "GPU idle for" in seen["gap"]
    assert "host: schedule" in seen["gap"]
    assert seen["shown"] == "visible"


def test_dark_and_light(both: list[Timeline], tmp_path: Path) -> None:
    script = "return getComputedStyle(document.body).backgroundColor;"
    light, dark = (
        visit(both, script, tmp_path, f"--blink-settings=preferredColorScheme={scheme}") for scheme in (1, 0)
    )
    assert light == "rgb(251, 251, 249)"
    assert dark == "rgb(18, 19, 22)"


def test_nothing_is_fetched(both: list[Timeline]) -> None:
    text = page.render(both, "Test")
    assert not re.search(r"(src|href)\s*=|url\(|https?://|import\s*\(|fetch\s*\(", text)


def test_a_page_of_no_steps_opens(tmp_path: Path) -> None:
    empty = replace(simulated(10, 1), steps=simulated(10, 1).steps.part(0, 0))
    script = "gapless.show(0, 1); gapless.redraw(); return [gapless.runs.map((run) => run.n), document.body.innerText];"
    for timelines, steps in (([empty], [0]), ([], [])):
        found, text = visit(timelines, script, tmp_path)
        assert found == steps
        assert "No step was recorded" in text
        assert "No idle time was recorded." in text


def test_a_page_of_one_step_has_a_rate(tmp_path: Path) -> None:
    script = """const {tokens} = gapless.panels[0].points;
    document.querySelector("[data-do=largest]").click();
    return {text: document.body.innerText, rates: [...new Set(tokens.map((p) => Math.round(p[1])))]};"""
    seen = visit([simulated(1, 2)], script, tmp_path)
    assert "A single step was recorded" in seen["text"]
    assert "1 step " in seen["text"].replace("\n", " ")
    assert "no gap between two steps" in seen["text"]
    assert len(seen["rates"]) == 1
    assert seen["rates"][0] > 10_000


def test_a_failed_step_is_told_first(tmp_path: Path) -> None:
    failed = simulated(80, 2, ledger={STEP_FAILED: 2})
    told = visit([failed], 'return document.getElementById("verdict").textContent;', tmp_path)
    assert "In the run of depth 2, 2 steps failed" in told


def test_lanes_colours_and_keys_are_explained(both: list[Timeline], tmp_path: Path) -> None:
    on_cpu = replace(both[0], facts={**both[0].facts, "device": "cpu"})
    script = """const key = document.getElementById("key");
    gapless.show(0.1, 0.1001); gapless.redraw();
    return {text: key.innerText, chips: key.querySelectorAll(".chip").length,
      range: document.getElementById("range").textContent, hint: document.querySelector(".hint").innerText};"""
    seen = visit([on_cpu], script, tmp_path)
    for word in (*PHASES[1:], "H2D: the plan's copy", "here on a thread of the CPU"):
        assert word in seen["text"]
    assert seen["chips"] == len(PHASES) - 1
    assert seen["range"].startswith("100.000 ms to 100.100 ms")
    assert "n goes to the next gap" in seen["hint"]


def test_a_hundred_thousand_steps_move_at_an_interactive_rate(tmp_path: Path) -> None:
    """From the whole down to a few steps, panned at each zoom; medians of real drawings."""
    long = [simulated(100_000, depth=1)]
    script = """
    const total = Math.max(...gapless.runs.map((run) => run.seconds)), middle = total / 2, found = [];
    for (let length = total; length > 1e-3; length /= 4) {
      const times = [];
      for (let i = 0; i < 5; i++) {
        gapless.show(middle + i * length / 10, middle + i * length / 10 + length); gapless.redraw();
        gapless.panels[0].canvas.getContext("2d").getImageData(0, 0, 1, 1);  // until it is really drawn
        times.push(gapless.drawMs);
      }
      found.push([length, times.sort((a, b) => a - b)[2]]);
    }
    const lanes = [0, 1, 2, 3].map((lane) => inked(gapless.panels[0], lane));
    return {steps: gapless.runs.map((run) => run.n), found, lanes};"""
    seen = visit(long, script, tmp_path)
    assert seen["steps"] == [100_000]
    slowest = max(ms for _, ms in seen["found"])
    print("drawing, ms, by seconds shown:", [(round(length, 4), round(ms, 1)) for length, ms in seen["found"]])
    assert slowest < FRAME_MS, seen["found"]
    assert all(count >= 2 for count in seen["lanes"])
