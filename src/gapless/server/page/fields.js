// What is asked for besides the message: the form of the answer, and tools. Checked here, before anything is sent.

const TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"];
const TOOL_NAME = /^[A-Za-z0-9_.-]{1,64}$/;
const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);

// What is wrong with a JSON schema, as a text with its place; null if nothing is.
function schemaFault(schema, place = "schema") {
  if (schema === true || schema === false) return null;
  if (!isObject(schema)) return `${place} must be an object`;
  const types = [schema.type ?? []].flat(), unknown = types.find(type => !TYPES.includes(type));
  if (unknown !== undefined) return `${place}.type: ${JSON.stringify(unknown)} is none of ${TYPES.join(", ")}`;
  if (schema.enum !== undefined && !(Array.isArray(schema.enum) && schema.enum.length)) return `${place}.enum must be a list with values`;
  const required = schema.required ?? [];
  if (!Array.isArray(required) || required.some(name => typeof name !== "string")) return `${place}.required must be a list of names`;
  for (const name of ["properties", "$defs", "definitions"]) {
    if (schema[name] === undefined) continue;
    if (!isObject(schema[name])) return `${place}.${name} must be an object`;
    for (const [key, part] of Object.entries(schema[name])) {
      const fault = schemaFault(part, `${place}.${name}.${key}`);
      if (fault) return fault;
    }
  }
  for (const name of ["anyOf", "oneOf", "allOf", "prefixItems"]) {
    if (schema[name] === undefined) continue;
    if (!Array.isArray(schema[name]) || !schema[name].length) return `${place}.${name} must be a list of schemas`;
    for (const [index, part] of schema[name].entries()) {
      const fault = schemaFault(part, `${place}.${name}[${index}]`);
      if (fault) return fault;
    }
  }
  for (const name of ["items", "additionalProperties"]) {
    const fault = schema[name] === undefined ? null : schemaFault(schema[name], `${place}.${name}`);
    if (fault) return fault;
  }
  return null;
}

// Tools as the API has them, from a list of them or of bare functions. Throws an Error that says what is wrong.
function readTools(text) {
  const found = JSON.parse(text), names = new Set();
  if (!Array.isArray(found)) throw new Error("tools must be a list");
  return found.map((tool, index) => {
    const function_ = isObject(tool) ? tool.function ?? tool : null, place = `tools[${index}]`;
    if (!isObject(function_) || !TOOL_NAME.test(function_.name ?? "")) throw new Error(`${place} needs a name of letters, digits, _, . and -`);
    if (names.has(function_.name)) throw new Error(`${place}: there are two tools named ${function_.name}`);
    names.add(function_.name);
    const fault = function_.parameters === undefined ? null : schemaFault(function_.parameters, `${place}.parameters`);
    if (fault) throw new Error(fault);
    const {type, ...rest} = function_;
    return {type: "function", function: rest};
  });
}

function readFormat() {
  const kind = $("format").value;
  if (kind !== "json_schema") return kind === "json_object" ? {response_format: {type: kind}} : {};
  const schema = JSON.parse($("schema").value), fault = schemaFault(schema);
  if (fault) throw new Error(fault);
  return {response_format: {type: kind, json_schema: {name: "answer", schema, strict: true}}};
}

function readToolFields() {
  const tools = $("use_tools").checked && $("tools").value.trim() ? readTools($("tools").value) : [];
  return tools.length ? {tools, tool_choice: $("tool_choice").value} : {};
}

// The parts of a request that these fields stand for; null while one of them is wrong, and that field says why.
function wanted() {
  const format = told("schema", readFormat), tools = told("tools", readToolFields);
  return format && tools ? {...format, ...tools} : null;
}

function told(id, read) {
  let found = null, fault = "";
  try { found = read(); } catch (error) { fault = error instanceof SyntaxError ? "not JSON: " + error.message : error.message; }
  $(id).setAttribute("aria-invalid", String(Boolean(fault)));
  $(id + "_fault").textContent = fault;
  return found;
}

function showFields() {
  $("schema_field").hidden = $("format").value !== "json_schema";
  $("tools_field").hidden = !$("use_tools").checked;
  wanted();
}

for (const id of ["format", "schema", "tools", "tool_choice", "use_tools"]) $(id).addEventListener("input", showFields);
