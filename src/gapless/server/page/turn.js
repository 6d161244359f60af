// One turn of the conversation on the page: reasoning (folded), text, tool calls, and a note below.

function element(kind, className, ...children) {
  const made = document.createElement(kind);
  made.className = className;
  made.append(...children);
  return made;
}

function addTurn(role, text) {
  $("hint")?.remove();
  const body = document.createElement("span"), note = document.createElement("small");
  body.textContent = text;
  const turn = element("div", "turn " + role, body, note);
  $("talk").append(turn);
  $("talk").scrollTop = $("talk").scrollHeight;
  return {turn, body, note, thoughts: null, cards: []};
}

// Adds the delta of a chunk to what is shown, and to the message that it becomes.
function addDelta(shown, message, delta) {
  const follow = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 40;
  if (delta.reasoning_content) {
    shown.thoughts ??= addThoughts(shown);
    shown.thoughts.append(delta.reasoning_content);
  }
  if (delta.content) {
    message.content += delta.content;
    shown.body.textContent = message.content;
  }
  for (const part of delta.tool_calls ?? []) {
    const call = (message.tool_calls ??= [])[part.index] ??= {id: "", type: "function", function: {name: "", arguments: ""}};
    call.id ||= part.id ?? "";
    call.function.name ||= part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    showCall(shown.cards[part.index] ??= addCall(shown), call);
  }
  if (follow) $("talk").scrollTop = $("talk").scrollHeight;
}

function addThoughts(shown) {
  const text = element("div", "thoughts"), fold = element("details", "reasoning", element("summary", "", "Reasoning"), text);
  shown.turn.insertBefore(fold, shown.body);
  return text;
}

function addCall(shown) {
  const card = {box: element("div", "call"), name: element("b", ""), given: element("code", "")};
  card.box.append(card.name, card.given);
  shown.turn.insertBefore(card.box, shown.note);
  return card;
}

function showCall(card, call) {
  card.name.textContent = call.function.name;
  card.given.textContent = call.function.arguments;
}

// Fields for the results of the calls; `send` gets them as messages once the user has filled them in.
function addResults(shown, calls, send) {
  const fields = calls.map((call, index) => {
    const field = element("textarea", "result");
    field.rows = 1;
    field.placeholder = `Result of ${call.function.name}`;
    field.setAttribute("aria-label", field.placeholder);
    shown.cards[index].given.textContent = pretty(call.function.arguments);
    shown.cards[index].box.append(field);
    return field;
  });
  const button = element("button", "primary send_results", calls.length > 1 ? "Send results" : "Send result");
  button.type = "button";
  button.addEventListener("click", () => {
    button.remove();
    for (const field of fields) field.replaceWith(element("output", "", field.value));
    send(calls.map((call, index) => ({role: "tool", tool_call_id: call.id, content: fields[index].value})));
  });
  fields.forEach((field, index) => field.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (index + 1 < fields.length) fields[index + 1].focus();
    else button.click();
  }));
  shown.turn.insertBefore(button, shown.note);
  fields[0].focus();
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
