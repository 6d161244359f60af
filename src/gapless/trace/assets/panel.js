// Draws a run on a canvas. What a frame costs depends on its width in pixels, not on the length of the run: spans are
// found by binary search, and where many fall on one pixel, sums over ranges are drawn instead of spans.

const runs = data.runs.map((raw) => new Run(raw));
const total = Math.max(0, ...runs.map((run) => run.seconds), 1e-6);
const view = {t0: 0, t1: total};
const panels = [];
let theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "lane", "accent", "card", "focus"]) theme[name] = style.getPropertyValue("--" + name).trim();
}

function surface(canvas, height) {  // a canvas in the pixels of the screen, empty
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 800;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  return g;
}

class Panel {
  constructor(run, parent) {
    this.run = run;
    const card = add(parent, "div", "run"), head = add(card, "div", "head"), s = run.summary;
    add(head, "h3", "", s.label);
    figure(head, percent(s.idle_share), `${noun(s)} idle`);
    figure(head, count(s.tokens_per_s), "tokens/s");
    figure(head, count(s.steps), s.steps === 1 ? "step" : "steps");
    figure(head, time(run.n ? median(run) : 0), "a step");
    figure(head, count(s.tokens), "tokens");
    if (s.num_overrun !== undefined) figure(head, count(s.num_overrun), "wasted tokens");
    if (s.max_blocks_in_flight !== undefined) figure(head, count(s.max_blocks_in_flight), "KV blocks in flight at most");
    this.canvas = add(card, "canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `Timeline of ${s.label}: ${count(s.steps)} steps in ${time(run.seconds)}, ` +
      `${noun(s)} idle ${percent(s.idle_share)}. Lanes: CPU, H2D, GPU, D2H; below them tokens per second and batch size.`);
    this.height = AXIS + 4 * (LANE + SPACE) + 2 * (STRIP + SPACE) + 4;
    listen(this);
  }
  x(t) { return LEFT + (t - view.t0) / (view.t1 - view.t0) * (this.width - LEFT - RIGHT); }
  t(x) { return view.t0 + (x - LEFT) / (this.width - LEFT - RIGHT) * (view.t1 - view.t0); }
  top(lane) { return AXIS + lane * (LANE + SPACE); }

  draw() {
    const g = surface(this.canvas, this.height), {width} = this;
    this.axis(g);
    g.save();
    g.beginPath(); g.rect(LEFT, 0, width - LEFT - RIGHT, this.height); g.clip();
    const {run} = this;
    this.phases(g, this.top(0));
    this.spans(g, run.h2d, this.top(1), COLORS.h2d);
    this.compute(g, this.top(2));
    this.spans(g, run.d2h, this.top(3), COLORS.d2h);
    this.strip(g, "tokens", this.top(4), theme.accent);
    this.strip(g, "batch", this.top(4) + STRIP + SPACE, theme.soft);
    g.restore();
    this.labels(g);
  }

  axis(g) {
    const step = nice((view.t1 - view.t0) * 110 / (this.width - LEFT - RIGHT));
    g.font = FONT; g.textBaseline = "middle"; g.textAlign = "left";
    for (let k = Math.ceil(view.t0 / step); k * step <= view.t1; k++) {
      const x = Math.round(this.x(k * step)) + 0.5;
      g.strokeStyle = theme.line; g.beginPath(); g.moveTo(x, 4); g.lineTo(x, this.height); g.stroke();
      g.fillStyle = theme.soft;
      if (x < this.width - 64) g.fillText(tick(k * step, step), x + 5, 10);
    }
    g.fillStyle = theme.lane;
    for (let lane = 0; lane < 4; lane++) g.fillRect(LEFT, this.top(lane), this.width - LEFT - RIGHT, LANE);
  }

  labels(g) {
    g.textAlign = "left"; g.textBaseline = "middle"; g.font = "600 13px system-ui, sans-serif"; g.fillStyle = theme.ink;
    LANES.forEach((name, lane) => g.fillText(name, 0, this.top(lane) + LANE / 2));
    g.font = FONT; g.fillStyle = theme.soft;
    ["tokens/s", "batch"].forEach((name, i) => g.fillText(name, 0, this.top(4) + i * (STRIP + SPACE) + STRIP / 2));
  }

  rect(g, b, e, y, h, fill) {
    const x0 = this.x(b), x1 = this.x(e);
    g.fillStyle = fill; g.fillRect(x0, y, Math.max(x1 - x0, 0.4), h);
    return x1 - x0;
  }

  phases(g, y) {
    const {cpu_begin: b, cpu_end: e, cpu_phase: p, cpu_step: step} = this.run.c, [i0, i1] = this.run.cpu.range(view.t0, view.t1);
    if (i1 - i0 > 2 * this.width) { this.manyPhases(g, y, i0, i1); return; }
    for (let i = i0; i < i1; i++) {
      if (p[i] === IDLE) continue;
      const waits = p[i] === COLLECT;
      g.globalAlpha = waits ? 0.28 : 1;
      const width = this.rect(g, b[i], e[i], y, LANE, color(PHASES[p[i]]));
      g.globalAlpha = 1;
      if (width > 54) this.name(g, PHASES[p[i]] + (width > 96 && step[i] ? " " + step[i] : ""), b[i], e[i], y, waits ? theme.ink : "#fff");
    }
  }

  manyPhases(g, y, i0, i1) {
    const k = PHASES.length, width = Math.ceil(this.width), bins = new Float64Array(width * k);
    const put = (b, e, phase, seconds) => {  // each pixel gets what falls on it
      const x0 = this.x(b), x1 = Math.max(this.x(e), x0 + 1e-9), last = Math.min(Math.floor(x1), width - 1);
      for (let x = Math.max(Math.floor(x0), LEFT); x <= last; x++) {
        bins[x * k + phase] += seconds * (Math.min(x1, x + 1) - Math.max(x0, x)) / (x1 - x0);
      }
    };
    if (i1 - i0 > MANY) {
      const {sums, begin, end} = this.run.groups;
      for (let j = Math.floor(i0 / GROUP); j * GROUP < i1; j++) {
        for (let phase = 1; phase < k; phase++) if (sums[j * k + phase] > 0) put(begin[j], end[j], phase, sums[j * k + phase]);
      }
    } else {
      const {cpu_begin: b, cpu_end: e, cpu_phase: p} = this.run.c;
      for (let i = i0; i < i1; i++) if (p[i] !== IDLE) put(b[i], e[i], p[i], e[i] - b[i]);
    }
    const pixel = (view.t1 - view.t0) / (this.width - LEFT - RIGHT);
    for (let x = LEFT; x < this.width - RIGHT; x++) {
      let bottom = y + LANE;
      for (let phase = 1; phase < k; phase++) {
        const h = Math.min(bins[x * k + phase] / pixel, 1) * LANE;
        if (h <= 0) continue;
        g.globalAlpha = phase === COLLECT ? 0.28 : 1; g.fillStyle = color(PHASES[phase]);
        g.fillRect(x, bottom - h, 1, h); bottom -= h;
      }
    }
    g.globalAlpha = 1;
  }

  name(g, text, b, e, y, fill) {
    const x0 = Math.max(this.x(b), LEFT), x1 = Math.min(this.x(e), this.width - RIGHT);
    g.font = FONT; g.textAlign = "center"; g.textBaseline = "middle";
    if (x1 - x0 < g.measureText(text).width + 8) return;
    g.fillStyle = fill; g.fillText(text, (x0 + x1) / 2, y + LANE / 2 + 0.5);
  }

  spans(g, lane, y, fill) {
    const [i0, i1] = lane.range(view.t0, view.t1);
    if (i1 - i0 > 2 * this.width) { this.coverage(g, lane, y, fill); return; }
    for (let i = i0; i < i1; i++) {
      const x0 = this.x(lane.begin[i]), x1 = this.x(lane.end[i]);
      g.fillStyle = fill; g.fillRect(x0, y, Math.max(x1 - x0, 1), LANE);
      if (x1 - x0 > 40) this.name(g, String(this.run.c.step[i]), lane.begin[i], lane.end[i], y, "#fff");
    }
  }

  coverage(g, lane, y, fill, gaps) {
    let before = lane.covered(this.t(LEFT));
    const pixel = (view.t1 - view.t0) / (this.width - LEFT - RIGHT);
    for (let x = LEFT; x < this.width - RIGHT; x++) {
      const after = lane.covered(this.t(x + 1)), share = Math.min((after - before) / pixel, 1);
      const h = share > 0 ? Math.max(LANE * share, 1.5) : 0;
      g.fillStyle = fill; g.fillRect(x, y + LANE - h, 1, h);
      if (gaps && share < 0.995) gaps(x, LANE * (1 - share));
      before = after;
    }
  }

  compute(g, y) {
    const {run} = this, {gap, gpu_begin: b, gpu_end: e, step} = run.c, [i0, i1] = run.gpu.range(view.t0, view.t1);
    if (i1 - i0 > this.width / 2) {
      this.coverage(g, run.gpu, y, theme.accent, (x, h) => {
        const i = Math.max(above(b, this.t(x)) - 1, 0), j = Math.min(above(b, this.t(x + 1)) + 1, run.n);
        let most = 0, cause = "";
        run.sumIdle.forEach((sums, k) => { const s = sums[j] - sums[i]; if (s > most && !INSIDE.includes(run.causes[k])) { most = s; cause = run.causes[k]; } });
        if (cause) { g.fillStyle = color(cause); g.fillRect(x, y, 1, h); }
      });
      return;
    }
    for (let i = i0; i < Math.min(i1 + 1, run.n); i++) {
      let t = gap[i];
      if (b[i] - gap[i] > 5e-7) for (const [cause, seconds] of run.split(i)) {
        this.rect(g, t, Math.min(t + seconds, b[i]), y + LANE * 0.62, LANE * 0.38, color(cause)); t += seconds;
      }
      this.rect(g, b[i], e[i], y, LANE, theme.accent);
      const x0 = this.x(b[i]);
      if (i && b[i] - e[i - 1] < 1e-5) { g.fillStyle = theme.card; g.fillRect(x0 - 0.5, y, 1, LANE); }  // steps without a gap
      if (this.x(e[i]) - x0 > 40) this.name(g, "step " + step[i], b[i], e[i], y, theme.card);
    }
  }

  measure() {  // tokens/s and batch size in bins of a few pixels
    const {run} = this, bin = BIN, tokens = [], batch = [];
    for (let x = LEFT; x < this.width - RIGHT; x += bin) {
      const t0 = Math.max(this.t(x), 0), t1 = Math.min(this.t(x + bin), run.seconds);
      if (t1 <= t0) break;
      let i = above(run.c.gpu_end, t0), j = above(run.c.gpu_end, t1);
      const k = Math.min(above(run.c.gpu_begin, (t0 + t1) / 2), run.n);
      batch.push([x, j > i ? (run.sumRows[j] - run.sumRows[i]) / (j - i) : k ? run.c.rows[k - 1] : 0]);
      if (j - i < 4) { i = Math.max(Math.min(i - 2, run.n - 4), 0); j = Math.min(i + 4, run.n); }  // a rate needs a few steps
      const seconds = j > i ? run.c.gpu_end[j - 1] - (i ? run.c.gpu_end[i - 1] : 0) : 0;
      tokens.push([x, seconds > 0 ? (run.sumRows[j] - run.sumRows[i]) / seconds : 0]);
    }
    this.points = {tokens, batch};
  }

  strip(g, name, y, stroke) {
    const points = this.points[name], bin = BIN;
    const most = Math.max(...panels.map((panel) => panel.points[name].reduce((top, p) => Math.max(top, p[1]), 0))), high = most || 1;
    g.beginPath();
    for (const [x, value] of points) {
      const top = y + STRIP - 2 - (STRIP - 16) * value / high;
      g.lineTo(x, top); g.lineTo(x + bin, top);
    }
    g.strokeStyle = stroke; g.lineWidth = 1.5; g.stroke(); g.lineWidth = 1;
    if (points.length) {
      g.lineTo(points[points.length - 1][0] + bin, y + STRIP); g.lineTo(points[0][0], y + STRIP); g.closePath();
      g.globalAlpha = 0.12; g.fillStyle = stroke; g.fill(); g.globalAlpha = 1;
    }
    g.font = FONT; g.textAlign = "left"; g.textBaseline = "top"; g.fillStyle = theme.soft;
    if (most) g.fillText(count(high), LEFT + 5, y);
  }

  describe(x, y) {  // what lies at a point: a title and pairs of words
    const {run} = this, {c} = run, t = this.t(x), lane = Math.floor((y - AXIS) / (LANE + SPACE));
    if (x < LEFT || t < 0 || t > run.seconds || lane < 0) return null;
    if (lane === 0) {
      const i = run.cpu.at(t);
      if (i < 0 || c.cpu_phase[i] === IDLE) return ["CPU waits for requests", []];
      return [`CPU: ${PHASES[c.cpu_phase[i]]}`, [...(c.cpu_step[i] ? [["step", c.cpu_step[i]]] : []), ["took", time(c.cpu_end[i] - c.cpu_begin[i])]]];
    }
    if (lane === 1 || lane === 3) {
      const which = lane === 1 ? run.h2d : run.d2h, i = which.at(t);
      return i < 0 ? null : [`${LANES[lane]}: step ${c.step[i]}`, [["took", time(which.end[i] - which.begin[i])]]];
    }
    const i = lane === 2 ? run.gpu.at(t) : Math.min(above(c.gpu_begin, t), run.n) - 1;
    if (i >= 0) return this.step(i);
    const next = above(c.gpu_begin, t);
    if (next >= run.n) return ["GPU idle", []];
    return [`GPU idle for ${time(c.gpu_begin[next] - c.gap[next])} before step ${c.step[next]}`, run.split(next).map(([cause, s]) => [cause, time(s)])];
  }

  step(i) {
    const {run} = this, {c} = run, gap = c.gpu_begin[i] - c.gap[i];
    const rows = [["took", time(c.gpu_end[i] - c.gpu_begin[i])], ["batch", c.rows[i]], ["tokens in", c.tokens[i]], ["steps in flight", c.in_flight[i]]];
    if (c.flags[i] & 1) rows.push(["graph", "none"]);
    if (c.flags[i] & 4) rows.push(["preempted", "yes"]);
    for (const [cause, s] of run.split(i, true)) rows.push([`idle within: ${cause}`, time(s)]);
    rows.push(["idle before", time(Math.max(gap, 0))]);
    return [`GPU: step ${c.step[i]}`, [...rows, ...(gap > 5e-6 ? run.split(i).map(([cause, s]) => ["\u2003" + cause, time(s)]) : [])]];
  }
}

class Overview {  // the whole of each run, a row each, and the part that is shown
  constructor(canvas) { this.canvas = canvas; this.row = 10; this.height = runs.length * (this.row + 6) + 6; this.left = LEFT; }
  x(t) { return this.left + t / total * (this.width - this.left - RIGHT); }
  t(x) { return (x - this.left) / (this.width - this.left - RIGHT) * total; }
  draw() {
    this.width = this.canvas.clientWidth || 800;
    const g = surface(this.canvas, this.height), key = [this.width, this.canvas.width, theme.accent, theme.soft].join();
    if (key !== this.key) {  // what does not move is drawn once
      this.key = key;
      g.font = FONT;
      this.left = Math.ceil(Math.max(LEFT, ...runs.map((run) => g.measureText(run.summary.label).width + 10)));
      runs.forEach((run, i) => this.line(g, run, 6 + i * (this.row + 6)));
      this.still = document.createElement("canvas");
      this.still.width = this.canvas.width; this.still.height = this.canvas.height;
      this.still.getContext("2d").drawImage(this.canvas, 0, 0);
    } else {
      g.drawImage(this.still, 0, 0, this.width, this.height);
    }
    const x0 = this.x(view.t0), x1 = Math.max(this.x(view.t1), x0 + 3);
    g.fillStyle = theme.focus; g.globalAlpha = 0.16; g.fillRect(x0, 0, x1 - x0, this.height); g.globalAlpha = 1;
    g.strokeStyle = theme.focus; g.strokeRect(x0 + 0.5, 0.5, x1 - x0 - 1, this.height - 1);
  }
  line(g, run, y) {
    const pixel = total / (this.width - this.left - RIGHT);
    let before = 0;
    for (let x = this.left; x < this.width - RIGHT && this.t(x) < run.seconds; x++) {
      const after = run.gpu.covered(this.t(x + 1)), share = Math.min((after - before) / pixel, 1);
      g.fillStyle = theme.lane; g.fillRect(x, y, 1, this.row);
      g.fillStyle = theme.accent; g.globalAlpha = share; g.fillRect(x, y, 1, this.row); g.globalAlpha = 1;
      before = after;
    }
    g.font = FONT; g.textBaseline = "middle"; g.textAlign = "left"; g.fillStyle = theme.soft;
    g.fillText(run.summary.label, 0, y + this.row / 2 + 1);
  }
}
