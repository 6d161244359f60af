// The chat: the messages so far, requests, and what is done when an answer ends.

let talk = [];  // a new list for each conversation
let stopper = null;

function headers() {
  const key = $("key").value.trim();
  return {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {})};
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function ask(question, more) {
  talk.push({role: "user", content: question});
  addTurn("user", question);
  answer(more, 1);
}

// Answers the last messages; `count` of them are new, and are forgotten when there is no answer.
async function answer(more, count) {
  const shown = addTurn("assistant", ""), message = {role: "assistant", content: ""}, mine = talk;
  const times = {began: performance.now(), first: null};
  shown.turn.setAttribute("aria-busy", "true");
  stopper = new AbortController();
  busy(true);
  let usage = null, reason = null, problem = null;
  try {
    for await (const chunk of readEvents(await send(more))) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0], delta = choice?.delta ?? {};
      reason = choice?.finish_reason ?? reason;
      if (delta.content || delta.reasoning_content || delta.tool_calls) times.first ??= performance.now();
      addDelta(shown, message, delta);
    }
  } catch (error) {
    problem = error.name === "AbortError" ? "stopped" : error.message;
    if (error.name !== "AbortError") shown.turn.classList.add("error");
  }
  shown.turn.removeAttribute("aria-busy");
  const broken = message.tool_calls?.some(call => !isJson(call.function.arguments || "{}"));
  if (broken && !problem) problem = "the arguments of a tool call are not JSON; raise max tokens if they were cut";
  shown.note.textContent = summary(problem, usage, reason, times) + judged(problem, more, message);
  $("talk").scrollTop = $("talk").scrollHeight;
  busy(false);
  if (mine === talk) keep(shown, message, problem, more, count);
}

async function send(more) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), signal: stopper.signal,
    body: JSON.stringify({
      messages: talk, stream: true, stream_options: {include_usage: true},
      temperature: Number($("temperature").value), max_tokens: Math.max(1, Math.round(Number($("max_tokens").value))), ...more,
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response;
}

// A whole answer becomes part of the conversation. Half a tool call cannot, because nothing could be its result.
function keep(shown, message, problem, more, count) {
  if (problem) delete message.tool_calls;
  if (problem && !message.content) { talk.splice(-count); return; }
  talk.push(message);
  if (message.tool_calls) addResults(shown, message.tool_calls, results => {
    talk.push(...results);
    answer(more, results.length + 1);
  });
}

function summary(problem, usage, reason, {began, first}) {
  if (problem) return problem;
  const count = usage?.completion_tokens ?? 0, seconds = (performance.now() - (first ?? began)) / 1000;
  const parts = [`${count} tokens`, `first after ${((first ?? began) - began).toFixed(0)} ms`];
  if (count > 1) parts.push(`${((count - 1) / Math.max(seconds, 1e-3)).toFixed(1)} tokens/s`);
  if (reason === "length") parts.push("cut at max tokens");
  return parts.join(", ");
}

// Whether an answer that should be JSON is, as an addition to its note.
function judged(problem, more, message) {
  if (problem || !more.response_format || message.tool_calls) return "";
  return isJson(message.content) ? ", JSON" : ", not complete JSON";
}

function isJson(text) {
  try { JSON.parse(text); return true; } catch { return false; }
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (!on) { stopper = null; $("question").focus(); }
}

function fit() {
  $("question").style.height = "auto";
  $("question").style.height = $("question").scrollHeight + 2 + "px";
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("question").value.trim(), more = wanted(), open = document.querySelector("textarea.result");
  if (!question || stopper) return;
  if (!more) { document.querySelector("[aria-invalid=true]").focus(); return; }
  if (open) { open.focus(); return; }  // a call must have its result before the conversation goes on
  $("question").value = "";
  fit();
  ask(question, more);
});
$("question").addEventListener("input", fit);
$("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
$("stop").addEventListener("click", () => stopper?.abort());
$("clear").addEventListener("click", () => {
  stopper?.abort();
  talk = [];
  $("talk").replaceChildren();
});
