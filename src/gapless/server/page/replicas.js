// Replicas side by side: a card for each, with its load, its speed and its lanes.

const before = new Map();  // the last reading of each replica that has a card

function showReplicas(state, now, hasLanes) {
  const many = state.replicas.length > 0, seen = new Set(state.replicas.map(one => one.name));
  document.body.classList.toggle("many", many);
  $("replicas").hidden = !many;
  $("only").hidden = many;
  for (const name of before.keys()) {
    if (seen.has(name)) continue;
    $("replica-" + name)?.remove();
    before.delete(name);
  }
  for (const one of state.replicas) {
    const card = $("replica-" + one.name) ?? addCard(one.name), past = before.get(one.name);
    fillCard(card, one, past && past.now < now ? past : null, now);
    if (hasLanes) drawLanesOn("lanes-" + one.name, one.timeline, one.timeline_s || SPAN_S);
    before.set(one.name, {one, now});
  }
}

function addCard(name) {
  const card = document.createElement("section"), lanes = document.createElement("canvas");
  card.id = "replica-" + name;
  card.className = "replica";
  for (const [tag, part] of [["b", "title"], ["span", "status"], ["p", "load"], ["div", "bar"], ["p", "idle"]]) {
    const element = document.createElement(tag);
    element.className = part;
    if (part === "bar") element.append(document.createElement("i"));
    card.append(element);
  }
  lanes.id = "lanes-" + name;
  card.append(lanes);
  $("replicas").append(card);
  return card;
}

function fillCard(card, one, past, now) {
  const part = name => card.querySelector("." + name);
  part("title").textContent = "Replica " + one.name;
  part("status").textContent = one.status;
  part("status").dataset.status = one.status;
  const tokens = past ? Math.max(0, (one.generated_tokens - past.one.generated_tokens) / (now - past.now)) : 0;
  const hits = one.prompt_tokens ? 100 * one.cached_tokens / one.prompt_tokens : 0;
  part("load").textContent =
    `${one.running} of ${one.unfinished} run · ${Math.round(tokens)} tokens/s · ${hits.toFixed(0)}% cached`;
  part("bar").title = "KV cache in use";
  part("bar").firstChild.style.width = 100 * one.kv_use + "%";
  part("idle").textContent = idleText(one, past);
}

function idleText(one, past) {
  const elapsed = past ? one.engine_time_s - past.one.engine_time_s : 0, busy = past ? one.busy_s - past.one.busy_s : 0;
  if (!(elapsed > 0) || busy < 0 || !one.running) return "no work";
  const causes = Object.entries(one.idle_s).map(([cause, seconds]) => [cause, seconds - (past.one.idle_s[cause] ?? 0)]);
  const [cause, seconds] = causes.sort((a, b) => b[1] - a[1])[0] ?? ["", 0];
  return `device idle ${(100 * Math.max(0, 1 - busy / elapsed)).toFixed(1)}%` + (seconds > 0 ? `, most: ${cause}` : "");
}
