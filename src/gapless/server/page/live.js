// The live state beside the chat: figures, speed and lanes, read from /state twice a second.

const SPAN_S = 2, EVERY_MS = 500, KEPT = 120;
const rates = [];
let last = null, polls = 0;

async function refresh() {
  if (document.hidden) return;
  let state;
  try {
    const lanes = ++polls % 2 ? SPAN_S : 0;  // reading the lanes costs the engine a little: every other time
    const response = await fetch("state?seconds=" + lanes, {headers: headers()});
    if (response.status === 401) return show("status", "needs an API key", "gone");
    state = await response.json();
  } catch { return show("status", "no connection", "gone"); }
  const now = performance.now() / 1000;
  const loading = state.loaded < 1 ? ` ${Math.round(100 * state.loaded)}%` : "";
  show("status", state.status + loading, state.status);
  $("model").textContent = [state.model, state.device, state.depth && `depth ${state.depth}`].filter(Boolean).join(" · ");
  $("running").textContent = state.running;
  $("waiting").textContent = state.waiting;
  $("kv").textContent = (100 * state.kv_use).toFixed(1) + "%";
  $("kvbar").style.width = 100 * state.kv_use + "%";
  if (last) {
    rates.push(Math.max(0, (state.generated_tokens - last.state.generated_tokens) / (now - last.now)));
    if (rates.length > KEPT) rates.shift();
    const recent = rates.slice(-4);
    $("rate").textContent = Math.round(recent.reduce((sum, rate) => sum + rate, 0) / recent.length);
    const elapsed = state.engine_time_s - last.state.engine_time_s, worked = state.busy_s - last.state.busy_s;
    const serving = elapsed > 0 && worked >= 0 && state.running > 0 && last.state.running > 0;
    $("idle").textContent = serving ? (100 * Math.max(0, 1 - worked / elapsed)).toFixed(1) + "%" : "–";
  }
  last = {state, now};
  drawSpeed();
  showReplicas(state, now, polls % 2 === 1);
  if (polls % 2) drawLanes(state.timeline, state.timeline_s || SPAN_S);
  showTotals(state);
}

function show(id, text, status) {
  $(id).textContent = text;
  $(id).dataset.status = status;
}

function showTotals(state) {
  const rows = [["prompt tokens", state.prompt_tokens], ["generated tokens", state.generated_tokens],
                ["wasted tokens", state.wasted_tokens], ["engine restarts", state.restarts]];
  const idle = Object.entries(state.idle_s).filter(([, seconds]) => seconds >= .05).sort((a, b) => b[1] - a[1]);
  for (const [cause, seconds] of idle) rows.push(["device idle, " + cause, seconds.toFixed(1) + " s"]);
  $("totals").replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("tr");
    for (const text of [name, typeof value === "number" ? value.toLocaleString("en") : value]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  }));
}

function surface(id) {
  const canvas = $(id), scale = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  return {pen, width: canvas.clientWidth, height: canvas.clientHeight};
}

const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function drawSpeed() {
  const {pen, width, height} = surface("speed");
  const top = Math.max(1, ...rates), step = width / (KEPT - 1), left = width - step * (rates.length - 1);
  if (rates.length > 1) {
    pen.beginPath();
    rates.forEach((rate, i) => pen.lineTo(left + i * step, height - 4 - (height - 20) * rate / top));
    pen.strokeStyle = color("accent");
    pen.lineWidth = 1.5;
    pen.stroke();
    pen.lineTo(width, height);
    pen.lineTo(left, height);
    pen.globalAlpha = .15;
    pen.fillStyle = color("accent");
    pen.fill();
    pen.globalAlpha = 1;
  }
  pen.fillStyle = color("faint");
  pen.fillText("peak " + Math.round(top), 8, 14);
}

function drawLanes(timeline, seconds) {
  $("span").textContent = +seconds.toFixed(1) === 1 ? "second" : +seconds.toFixed(seconds < 1 ? 2 : 1) + " seconds";
  if (!$("only").hidden) drawLanesOn("lanes", timeline, seconds);
}

function drawLanesOn(id, timeline, seconds) {
  const names = Object.keys(timeline), label = 46;
  const {pen, width, height} = surface(id), tall = height / Math.max(4, names.length);
  names.forEach((name, row) => {
    const y = row * tall;
    pen.fillStyle = color("faint");
    pen.fillText(name, 8, y + tall / 2 + 4);
    pen.fillStyle = color("track");
    pen.fillRect(label, y + 6, width - label - 8, tall - 12);
    pen.fillStyle = color(name) || color("accent");
    for (const [start, end, what] of timeline[name]) {
      pen.globalAlpha = what === "collect" ? .25 : 1;  // there the host waits for the device
      const x = t => label + (width - label - 8) * (1 - t / seconds);
      const from = Math.max(label, x(start)), to = Math.min(width - 8, x(end));
      if (to >= label) pen.fillRect(from, y + 6, Math.max(.6, to - from), tall - 12);
    }
    pen.globalAlpha = 1;
  });
}

setInterval(refresh, EVERY_MS);
refresh();
