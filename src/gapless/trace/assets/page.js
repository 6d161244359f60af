// The page around the canvases: moving about, pointing, tables.

// -- moving about

let waiting = false;
function redraw() {
  document.getElementById("range").textContent = `${moment(view.t0)} to ${moment(view.t1)}, of ${time(total)}`;
  const began = performance.now();
  for (const panel of panels) { panel.width = panel.canvas.clientWidth || 800; panel.measure(); }
  for (const panel of panels) panel.draw();
  overview.draw();
  api.drawMs = performance.now() - began;
  api.numDraws += 1;
}
function moment(t) {  // as exact as what is shown is short
  const [unit, name] = view.t1 < 1e-3 ? [1e-6, "µs"] : view.t1 < 1 ? [1e-3, "ms"] : [1, "s"];
  return (t / unit).toFixed(Math.min(Math.max(Math.round(2 - Math.log10((view.t1 - view.t0) / unit)), 0), 9)) + " " + name;
}
function say(text) { document.getElementById("range").textContent = text; }
function later() {
  if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; redraw(); }); }
}
function show(t0, t1) {
  const length = Math.min(Math.max(t1 - t0, 2e-6), total);
  view.t0 = Math.min(Math.max(t0, 0), total - length); view.t1 = view.t0 + length;
  later();
}
function zoom(factor, at = (view.t0 + view.t1) / 2) { show(at - (at - view.t0) * factor, at + (view.t1 - at) * factor); }
function move(share) { const d = (view.t1 - view.t0) * share; show(view.t0 + d, view.t1 + d); }
function goTo(run, i) {
  const {gap, gpu_begin: b} = run.c, length = Math.max(8 * (b[i] - gap[i]), 2e-5), middle = (gap[i] + b[i]) / 2;
  show(middle - length / 2, middle + length / 2);
}
function jump(event) {
  const half = (view.t1 - view.t0) / 2, t = overview.t(event.offsetX);
  show(t - half, t + half);
}
function begin() {  // where gaps can be seen: a few steps in the middle
  const run = runs[0], i = run ? run.n >> 1 : 0, few = Math.min(i, 5);
  if (run && run.n > 60) { view.t0 = run.c.gpu_begin[i - few]; view.t1 = run.c.gpu_end[i + few]; }
}
function nextGap() {
  let best = null;
  const middle = (view.t0 + view.t1) / 2 + (view.t1 - view.t0) * 1e-6;
  for (const run of runs) {
    const i = run.gaps.find((k) => (run.c.gap[k] + run.c.gpu_begin[k]) / 2 > middle);
    if (i !== undefined && (!best || run.c.gap[i] < best[0].c.gap[best[1]])) best = [run, i];
  }
  if (best) goTo(...best); else say("no gap after this one");
}
function largestGap() {
  let best = null, most = 0;
  for (const run of runs) for (const i of run.gaps) {
    const length = run.c.gpu_begin[i] - run.c.gap[i];
    if (i > 0 && length > most) { most = length; best = [run, i]; }
  }
  if (best) goTo(...best); else say("no gap between two steps");
}
const ACTIONS = {
  in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25), all: () => show(0, total),
  gap: nextGap, largest: largestGap,
};
const KEYS = {"+": "in", "=": "in", "-": "out", "_": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all", n: "gap", l: "largest"};

function listen(panel) {
  const {canvas} = panel;
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / 1200);
    else zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0018)), panel.t(event.offsetX));
  }, {passive: false});
  canvas.addEventListener("pointerdown", (event) => {
    drag = {x: event.offsetX, t0: view.t0, t1: view.t1};
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const d = (drag.x - event.offsetX) / (panel.width - LEFT - RIGHT) * (drag.t1 - drag.t0);
      show(drag.t0 + d, drag.t1 + d);
    }
    tip(panel.describe(event.offsetX, event.offsetY), event.clientX, event.clientY);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { drag = null; });
  canvas.addEventListener("pointerleave", () => tip(null));
}

function tip(found, x, y) {
  const box = document.getElementById("tip");
  box.style.visibility = found ? "visible" : "hidden";
  if (!found) return;
  box.replaceChildren();
  add(box, "b", "", found[0]);
  const list = add(box, "dl");
  for (const [name, value] of found[1]) { add(list, "dt", "", name); add(list, "dd", "", String(value)); }
  box.style.left = Math.min(x + 16, window.innerWidth - box.offsetWidth - 12) + "px";
  box.style.top = (y + 20 + box.offsetHeight > window.innerHeight ? y - 14 - box.offsetHeight : y + 20) + "px";
}

// -- the page around the canvases

function add(parent, tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}
function figure(parent, value, name) {
  const span = add(parent, "span", "figure");
  add(span, "b", "", value);
  span.append(" " + name);
}

function verdict() {
  if (runs.every((run) => run.n === 0)) return "No step was recorded: nothing ran, or nothing ran to its end.";
  const first = runs[0].summary, last = runs[runs.length - 1].summary;
  const where = `${first.model ? first.model + " on " + first.device + ". " : ""}`;
  if (runs.length === 1 && first.steps === 1) return `${where}A single step was recorded: there is nothing that it could overlap with.`;
  if (runs.length === 1) return `${where}The ${noun(first)} was idle ${percent(first.idle_share)} of the time between the first step and the last.`;
  if (runs.length > 2) return `${where}${runs.length} runs on one time axis, each from its own begin.`;
  const ratio = last.tokens_per_s / first.tokens_per_s;
  return `${where}From ${first.label} to ${last.label} the ${noun(first)}'s idle share went from ${percent(first.idle_share)} to ` +
    `${percent(last.idle_share)}, and tokens per second are ${ratio.toFixed(2)} times as many.`;
}

function failures() {  // steps that raised, by run; empty where none did
  return runs.filter((run) => (run.summary.ledger || {})["step failed"]).map((run) => {
    const n = run.summary.ledger["step failed"];
    return ` In the run of ${run.summary.label}, ${n} ${n === 1 ? "step" : "steps"} failed and ended the requests in it.`;
  }).join("");
}

function key(parent) {  // what the lanes are, and what their colours mean
  const lanes = add(parent, "div", "row");
  add(lanes, "b", "", "Lanes");
  const gpu = runs.some((run) => run.summary.device === "cpu") ? "GPU: the model's computation, here on a thread of the CPU" : "GPU: the model's computation";
  for (const text of ["CPU: the host's loop", "H2D: the plan's copy to the device", gpu, "D2H: the tokens' copy back"]) add(lanes, "span", "", text);
  const phases = add(parent, "div", "row");
  add(phases, "b", "", "Colours");
  for (const name of PHASES.filter((_, phase) => phase !== IDLE)) {
    const entry = add(phases, "span");
    add(entry, "span", "chip").style.cssText = `background: ${color(name)}; opacity: ${name === PHASES[COLLECT] ? 0.28 : 1}`;
    entry.append(name === PHASES[COLLECT] ? "collect: waits for the device" : name);
  }
  add(phases, "span", "", "A gap of the GPU has the colours of its causes, below.");
}

function causes(parent) {
  if (runs.every((run) => run.summary.idle_s === 0)) { add(parent, "p", "hint", "No idle time was recorded."); return; }
  const most = Math.max(...runs.map((run) => run.summary.idle_s), 1e-12);
  for (const run of runs) {
    const s = run.summary, row = add(parent, "div", "cause-run");
    add(row, "h3", "", s.label);
    const stack = add(row, "div", "stack");
    stack.setAttribute("role", "img");
    stack.setAttribute("aria-label", Object.entries(s.idle_by_cause).map(([name, x]) => `${name} ${time(x)}`).join(", "));
    for (const [name, seconds] of Object.entries(s.idle_by_cause)) {
      const part = add(stack, "i");
      part.style.width = 100 * seconds / most + "%"; part.style.background = color(name);
      part.title = `${name}: ${time(seconds)}`;
    }
    const within = INSIDE.reduce((sum, name) => sum + (s.idle_by_cause[name] || 0), 0);
    add(row, "div", "sum", `idle ${time(s.idle_s)} of ${time(s.seconds)}, in ${count(s.gaps)} ${s.gaps === 1 ? "gap" : "gaps"}` + (within ? `; ${time(within)} of it within steps` : ""));
  }
  legend(parent);
}

function legend(parent) {
  const table = add(parent, "table"), head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  for (const name of ["cause", ...runs.map((run) => run.summary.label)]) add(head, "th", "", name).scope = "col";
  add(head, "th", "means", "what happened").scope = "col";
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.summary.idle_by_cause)))];
  const sum = (name) => runs.reduce((x, run) => x + (run.summary.idle_by_cause[name] || 0), 0);
  for (const name of names.filter((x) => sum(x) > 1e-7).sort((a, b) => sum(b) - sum(a))) {
    const row = add(body, "tr"), cell = add(row, "th");
    cell.scope = "row";
    add(cell, "span", "chip").style.background = color(name);
    cell.append(name);
    for (const run of runs) {
      const seconds = run.summary.idle_by_cause[name] || 0, found = add(row, "td", "", seconds ? time(seconds) + " " : "");
      add(found, "small", "", seconds ? percent(seconds / run.summary.idle_s) : "");
    }
    add(row, "td", "means", MEANS[name] || "");
  }
}

function ledger(parent) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.summary.ledger || {})))];
  document.getElementById("notes").hidden = names.length === 0;
  const table = add(parent, "table"), head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  for (const name of ["overlap reduced, a fast path missed, or a first time after the engine was ready", ...runs.map((run) => run.summary.label)]) add(head, "th", "", name).scope = "col";
  for (const name of names) {
    const row = add(body, "tr");
    add(row, "th", "", name).scope = "row";
    for (const run of runs) add(row, "td", "", String((run.summary.ledger || {})[name] || ""));
  }
}

const api = window.gapless = {runs, view, panels, show, zoom, redraw, drawMs: 0, numDraws: 0};
document.getElementById("verdict").textContent = verdict() + failures();
key(document.getElementById("key"));
causes(document.getElementById("causes"));
ledger(document.getElementById("ledger"));
const overview = new Overview(document.getElementById("overview"));
overview.canvas.addEventListener("pointerdown", jump);
overview.canvas.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
for (const run of runs) panels.push(new Panel(run, document.getElementById("runs")));
document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => ACTIONS[button.dataset.do]()));
document.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (action && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); ACTIONS[action](); }
});
window.addEventListener("resize", later);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); later(); });
readTheme();
begin();
redraw();
