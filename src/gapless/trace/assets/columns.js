"use strict";
// The runs as columns, and what can be asked of them in a time that does not grow with their length.
const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = {float64: Float64Array, float32: Float32Array, int32: Int32Array, uint8: Uint8Array};
const PHASES = data.phases, IDLE = 0, COLLECT = 5;
const COLORS = {
  "idle": "#9aa1ab", "nothing to run": "#9aa1ab",
  "admit": "#e3b341", "schedule": "#e8923a", "fill": "#dc6b2f", "launch": "#c64a34", "collect": "#8593a6",
  "commit": "#a8476f", "deliver": "#7b4f9d",
  "garbage collection": "#5b4bb5", "interpreter lock": "#a08ae0", "copy late": "#2f7dbd", "hand-over": "#79b4d8",
  "memory pressure": "#b8255f", "no free row": "#de7aa5", "grammar": "#3f6b3a", "eager fallback": "#8a6d3b", "graph capture": "#b8a26a",
  "masks": "#5f9455", "unknown": "#54585f", "compile": "#3d7a74", "allocation": "#6aa84f", "h2d": "#3f86c6", "d2h": "#7a7fd6",
};
const MEANS = {
  "nothing to run": "no request was there",
  "host: admit": "the host took in requests", "host: schedule": "the host planned the step",
  "host: fill": "the host packed the plan", "host: launch": "the host queued the work",
  "host: collect": "tokens were on their way back, and the host on its way to them",
  "host: commit": "the host settled the step before", "host: deliver": "the host told the callers",
  "garbage collection": "Python collected garbage",
  "interpreter lock": "the loop's thread was ready and did not run: another held the lock, or the core",
  "copy late": "the plan was still being copied to the device",
  "hand-over": "all was there; streams, or threads on a CPU, passed the work on",
  "memory pressure": "KV blocks had run out", "no free row": "requests waited for a place in the batch",
  "grammar": "requests waited while their grammar was compiled",
  "eager fallback": "the step had no graph, so its kernels were launched one by one",
  "graph capture": "a graph was being captured",
  "host: masks": "the host filled the masks of guided requests",
  "unknown": "not explained",
  "launch": "within a step: its kernels were done before the host had launched the next ones",
  "compile": "within a step: a kernel was compiled or loaded",
  "allocation": "within a step: memory was taken from the device",
  "masks": "within a step: the model was done before the masks were there",
};
const INSIDE = ["launch", "compile", "allocation", "masks"];  // causes of idle time within steps; all others are of gaps before them
const ORDER = ["nothing to run", "grammar", "no free row", "memory pressure", "host: collect", "host: commit", "host: masks", "host: deliver",
  "host: admit", "host: schedule", "host: fill", "host: launch", "graph capture",
  "eager fallback", "garbage collection", "interpreter lock", "unknown", "copy late", "hand-over"];  // as they follow
const color = (name) => COLORS[name] || COLORS[name.replace("host: ", "")] || "#888";
const GROUP = 64, MANY = 40000;  // phases in a group; above so many, groups are drawn
const AXIS = 24, LANE = 26, SPACE = 7, STRIP = 40, BIN = 6, LEFT = 56, RIGHT = 8;
const FONT = "12px system-ui, sans-serif";
const LANES = ["CPU", "H2D", "GPU", "D2H"];

// -- numbers as people read them

const digits = (x) => x.toFixed(x >= 100 ? 0 : x >= 10 ? 1 : 2);
function time(s) {
  const x = Math.abs(s);
  return x === 0 ? "0" : x < 1e-3 ? digits(s * 1e6) + " µs" : x < 1 ? digits(s * 1e3) + " ms" : digits(s) + " s";
}
const percent = (x) => (100 * x).toFixed(x < 0.1 ? 2 : 1) + "%";
const noun = (summary) => summary.device === "cpu" ? "device" : "GPU";
const count = (x) => Math.round(x).toLocaleString("en");

// -- columns

function unpack([kind, text]) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new KINDS[kind](bytes.buffer);
}
function above(sorted, x) {  // how many entries are <= x
  let low = 0, high = sorted.length;
  while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] <= x) low = mid + 1; else high = mid; }
  return low;
}
function prefix(n, value) {
  const sums = new Float64Array(n + 1);
  for (let i = 0; i < n; i++) sums[i + 1] = sums[i] + value(i);
  return sums;
}

class Lane {  // spans in order, and how much of the time up to any moment they cover
  constructor(begin, end) { this.begin = begin; this.end = end; this.sum = prefix(begin.length, (i) => end[i] - begin[i]); }
  covered(t) {
    const i = above(this.begin, t);
    return i === 0 ? 0 : this.sum[i] - Math.max(this.end[i - 1] - t, 0);
  }
  at(t) { const i = above(this.begin, t) - 1; return i >= 0 && this.end[i] >= t ? i : -1; }
  range(t0, t1) { return [Math.max(above(this.end, t0) - 1, 0), above(this.begin, t1)]; }
}

class Run {
  constructor(raw) {
    this.summary = raw.summary; this.causes = raw.causes;
    const c = {};
    for (const name in raw.columns) c[name] = unpack(raw.columns[name]);
    this.c = c; this.n = c.step.length; this.seconds = raw.summary.seconds;
    for (const lane of ["gpu", "h2d", "d2h"]) c[lane + "_end"] = c[lane + "_begin"].map((t, i) => t + c[lane + "_took"][i]);
    c.cpu_end = c.cpu_begin.map((_, i) => i + 1 < c.cpu_begin.length ? c.cpu_begin[i + 1] : this.seconds);
    this.gpu = new Lane(c.gpu_begin, c.gpu_end);
    this.h2d = new Lane(c.h2d_begin, c.h2d_end);
    this.d2h = new Lane(c.d2h_begin, c.d2h_end);
    this.cpu = new Lane(c.cpu_begin, c.cpu_end);
    this.sumRows = prefix(this.n, (i) => c.rows[i]);
    const k = this.causes.length;
    this.sumIdle = this.causes.map((_, j) => prefix(this.n, (i) => c.idle[i * k + j]));
    this.order = this.causes.map((_, j) => j).sort((a, b) => ORDER.indexOf(this.causes[a]) - ORDER.indexOf(this.causes[b]));
    this.gaps = [];
    for (let i = 0; i < this.n; i++) if (c.gpu_begin[i] - c.gap[i] > 5e-6) this.gaps.push(i);
    this.groups = this.grouped();
  }
  grouped() {  // time by phase in groups of phases
    const {cpu_begin: b, cpu_end: e, cpu_phase: p} = this.c, groups = Math.ceil(b.length / GROUP), k = PHASES.length;
    const sums = new Float32Array(groups * k), begin = new Float64Array(groups), end = new Float64Array(groups);
    for (let i = 0; i < b.length; i++) sums[Math.floor(i / GROUP) * k + p[i]] += e[i] - b[i];
    for (let g = 0; g < groups; g++) { begin[g] = b[g * GROUP]; end[g] = e[Math.min((g + 1) * GROUP, b.length) - 1]; }
    return {sums, begin, end};
  }
  split(i, inside = false) {  // why the GPU idled before a step, or within it
    const k = this.causes.length;
    return this.order.map((j) => [this.causes[j], this.c.idle[i * k + j]]).filter((pair) => pair[1] > 0 && INSIDE.includes(pair[0]) === inside);
  }
}

function median(run) {
  const some = [], stride = Math.max(Math.floor(run.n / 2000), 1);
  for (let i = 0; i < run.n; i += stride) some.push(run.c.gpu_end[i] - run.c.gpu_begin[i]);
  return some.sort((a, b) => a - b)[some.length >> 1];
}
function nice(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= x);
}
function tick(t, step) {
  if (t === 0) return "0";
  const [unit, name] = step < 1e-3 ? [1e-6, "µs"] : step < 0.1 ? [1e-3, "ms"] : [1, "s"];
  return +(t / unit).toFixed(3) + " " + name;
}
