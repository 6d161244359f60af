"""The web page in a real browser: a chat that streams and can be stopped, and the state beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser import CHROMIUM, Page, browser
from servers import Server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, faulty: Server) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page
        assert page.problems == []


LANES_ARE_DRAWN = """(() => {
    const canvas = document.getElementById("lanes"), pen = canvas.getContext("2d");
    const row = pen.getImageData(60, canvas.height * 5 / 8, canvas.width - 70, 1).data, seen = new Set();
    for (let i = 0; i < row.length; i += 4) seen.add(row.slice(i, i + 3).join());
    return seen.has("31,133,119");  // the colour of the gpu lane
})()"""
ENDLESS = """
    const fetched = window.fetch, more = {ignore_eos: true};
    const extended = options => ({...options, body: JSON.stringify({...JSON.parse(options.body), ...more})});
    window.fetch = (url, options) => fetched(url, options.body ? extended(options) : options);
"""
STUB = """(answers => {
    const fetched = window.fetch;
    window.asked = [];
    window.fetch = (url, options) => {
        if (!options.body) return fetched(url, options);
        window.asked.push(JSON.parse(options.body));
        const chunk = ([delta, reason]) => ({choices: [{delta, finish_reason: reason ?? null}]});
        const events = [...answers.shift().map(chunk), {choices: [], usage: {completion_tokens: 9}}];
        const lines = events.map(event => "data: " + JSON.stringify(event) + "\\n\\n");
        return Promise.resolve(new Response(lines.join("") + "data: [DONE]\\n\\n"));
    };
})"""


def stub(page: Page, *answers: list[Any]) -> None:
    """Have the page's questions answered by these lists of deltas, each with a finish reason where it has one."""
    page.run(f"{STUB}({json.dumps(answers)})")


def put(page: Page, id: str, value: str) -> None:
    """Fill in a field, as a user does."""
    field = f"document.getElementById('{id}')"
    page.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input'))")


def call(index: int, arguments: str, id: str | None = None, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": function} | ({"id": id, "type": "function"} if id else {})]}


def ask(page: Page, text: str, max_tokens: int) -> None:
    page.run(f"document.getElementById('max_tokens').value = {max_tokens}; document.getElementById('question').focus()")
    page.type(text)
    page.press("Enter", 13)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_chat_streams(page: Page, faulty: Server, dark: bool) -> None:
    page.open(faulty.url, dark=dark)
    page.wait("document.getElementById('status').textContent === 'ready'")
    assert "tiny" in page.run("document.getElementById('model').textContent")
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 24, 28)") is dark
    ask(page, "Hello", 5)
    page.wait("document.querySelector('.assistant small')?.textContent.includes('tokens')")
    assert page.run("document.querySelector('.user span').textContent") == "Hello"
    assert page.run("document.getElementById('question').value") == ""
    ask(page, "More", 5)
    page.wait("document.querySelectorAll('.assistant').length === 2 && !document.querySelector('[aria-busy]')")
    page.run("document.getElementById('clear').click()")
    assert page.run("document.querySelectorAll('.turn').length") == 0


def test_stop_ends_the_answer_and_the_request(page: Page, faulty: Server) -> None:
    """The endless question is asked past the page's own limits, so that it is sure to be running when stopped."""
    page.open(faulty.url)
    page.run(ENDLESS)
    aborted = faulty.metric('gapless_requests_total{outcome="abort"}')
    ask(page, "Hello", 900)
    page.wait("document.querySelector('.assistant span')?.textContent.length > 3")
    page.wait("Number(document.getElementById('running').textContent) === 1")
    page.wait(LANES_ARE_DRAWN)
    page.run("document.getElementById('stop').click()")
    page.wait("document.querySelector('.assistant small').textContent === 'stopped'")
    page.wait("Number(document.getElementById('running').textContent) === 0")
    assert faulty.metric('gapless_requests_total{outcome="abort"}') == aborted + 1
    assert page.run("Number(document.getElementById('rate').textContent)") >= 0


def test_an_error_is_shown(page: Page, faulty: Server) -> None:
    page.open(faulty.url)
    ask(page, "Hello", 5000)
    page.wait("document.querySelector('.error small')?.textContent.includes('context length')")
    page.problems.clear()  # the browser itself reports the status 400
    page.run("document.getElementById('clear').click()")


def test_it_fits_a_narrow_window(page: Page, faulty: Server) -> None:
    page.open(faulty.url, width=400, height=700)
    assert page.run("document.documentElement.scrollWidth") <= 400
    page.open(f"{faulty.url}/docs")
    page.wait("document.body.textContent.includes('/v1/chat/completions')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_json_by_schema_is_asked_for_once_the_schema_is_right(page: Page, faulty: Server, dark: bool) -> None:
    page.open(faulty.url, dark=dark)
    stub(page, [[{"content": '{"name": "Ada", "age": 36}'}], [{}, "stop"]], [[{"content": '{"name":'}], [{}, "length"]])
    put(page, "format", "json_schema")
    fault = "document.getElementById('schema_fault').textContent"
    for schema, words in [
        ("{", "not JSON"),
        ("[]", "schema must be an object"),
        ('{"type": "text"}', 'schema.type: "text" is none of object'),
        ('{"properties": {"a": {"items": {"enum": []}}}}', "schema.properties.a.items.enum must be a list"),
        ('{"anyOf": [{}, 1]}', "schema.anyOf[1] must be an object"),
        ('{"required": [1]}', "schema.required must be a list of names"),
    ]:
        put(page, "schema", schema)
        assert words in page.run(fault)
        ask(page, "Who?", 50)
        assert page.run("document.activeElement.id") == "schema"
        assert page.run("document.getElementById('question').value") == "Who?"
        put(page, "question", "")
    assert page.run("asked.length") == 0
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    put(page, "schema", json.dumps(schema))
    assert page.run(fault) == ""
    ask(page, "Who?", 50)
    page.wait("document.querySelector('.assistant small').textContent.endsWith(', JSON')")
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert page.run("asked[0].response_format") == wanted
    ask(page, "Who?", 5)
    page.wait("document.querySelectorAll('.assistant small')[1]?.textContent.includes('not complete JSON')")


def test_the_server_obeys_the_schema(page: Page, faulty: Server) -> None:
    page.open(faulty.url)
    put(page, "format", "json_schema")
    put(page, "schema", '{"enum": ["north", "south"]}')
    ask(page, "Where?", 50)
    page.wait("document.querySelector('.assistant small')?.textContent.endsWith(', JSON')")
    assert page.run("document.querySelector('.assistant span').textContent") in ('"north"', '"south"')


def test_a_tool_call_is_shown_and_its_result_goes_back(page: Page, faulty: Server) -> None:
    page.open(faulty.url)
    first = [
        [{"reasoning_content": "I need "}],
        [{"reasoning_content": "two."}],
        [call(0, "", "c1", "get_weather")],
        [call(0, '{"city": ')],
        [call(0, '"Paris"}')],
        [call(1, "{}", "c2", "get_time")],
        [{}, "tool_calls"],
    ]
    stub(page, first, [[{"content": "Sunny at noon."}], [{}, "stop"]])
    page.run("document.getElementById('use_tools').click()")
    fault = "document.getElementById('tools_fault').textContent"
    for tools, words in [
        ("{}", "tools must be a list"),
        ('[{"name": "no spaces"}]', "tools[0] needs a name"),
        ('[{"name": "a"}, {"function": {"name": "a"}}]', "two tools named a"),
        ('[{"name": "a", "parameters": {"type": "x"}}]', "tools[0].parameters.type"),
    ]:
        put(page, "tools", tools)
        assert words in page.run(fault)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    bare, whole = {"name": "get_weather", "parameters": parameters}, {"name": "get_time"}
    put(page, "tools", json.dumps([bare, {"type": "function", "function": whole}]))
    assert page.run(fault) == ""
    ask(page, "Weather?", 50)
    page.wait("document.querySelectorAll('textarea.result').length === 2")
    assert page.run("asked[0].tools") == [{"type": "function", "function": tool} for tool in (bare, whole)]
    assert page.run("asked[0].tool_choice") == "auto"
    assert page.run("document.querySelector('.thoughts').textContent") == "I need two."
    assert page.run("document.querySelector('.reasoning').open") is False
    assert page.run("[...document.querySelectorAll('.call b')].map(b => b.textContent)") == ["get_weather", "get_time"]
    assert json.loads(page.run("document.querySelector('.call code').textContent")) == {"city": "Paris"}

    ask(page, "Never mind", 50)  # goes nowhere: the calls wait for their results
    assert page.run("asked.length") == 1
    assert page.run("document.activeElement.className") == "result"
    page.type("sunny")
    page.press("Enter", 13)
    page.type("noon")
    page.press("Enter", 13)
    page.wait("document.querySelectorAll('.assistant span')[1]?.textContent === 'Sunny at noon.'")
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
        {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
    ]
    assert page.run("asked[1].messages") == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    assert page.run("document.querySelectorAll('textarea.result, .send_results').length") == 0


def test_the_server_takes_tools_and_their_results(page: Page, faulty: Server) -> None:
    """The tiny model calls nothing, so the first answer is a stub's; what is sent after it goes to the server."""
    page.open(faulty.url)
    page.run("window.first = window.fetch")
    stub(page, [[call(0, '{"city": "Oslo"}', "c1", "get_weather")], [{}, "tool_calls"]])
    page.run("document.getElementById('use_tools').click()")
    put(page, "tools", '[{"name": "get_weather"}]')  # the engine of this server does not survive four braces
    ask(page, "Weather?", 5)
    page.wait("document.querySelectorAll('textarea.result').length === 1")
    page.run("window.fetch = window.first; document.querySelector('textarea.result').value = 'rain'")
    page.run("document.querySelector('.send_results').click()")
    note = page.wait("document.querySelectorAll('.assistant small')[1]?.textContent")
    assert re.match(r"[1-5] tokens, first after", note)


def test_half_a_call_is_no_part_of_the_conversation(page: Page, faulty: Server) -> None:
    page.open(faulty.url)
    stub(page, [[call(0, '{"a', "c1", "f")], [{}, "length"]], [[{"content": "yes"}], [{}, "stop"]])
    ask(page, "First", 5)
    page.wait("document.querySelector('.assistant small').textContent.includes('if they were cut')")
    ask(page, "Second", 5)
    page.wait("document.querySelectorAll('.assistant span')[1]?.textContent === 'yes'")
    assert page.run("asked[1].messages") == [{"role": "user", "content": "Second"}]


def test_the_fields_fit_a_narrow_window(page: Page, faulty: Server) -> None:
    page.open(faulty.url, width=400, height=700)
    put(page, "format", "json_schema")
    page.run("document.getElementById('use_tools').click()")
    put(page, "tools", "[" + "x" * 500)
    assert page.run("document.documentElement.scrollWidth") <= 400


REPLICAS = """
    const read = window.fetch, time = {engine_time_s: 1, busy_s: 1, timeline: {}, timeline_s: 2, idle_s: {}};
    const count = {running: 1, unfinished: 3, kv_use: .5, generated_tokens: 9, prompt_tokens: 8, cached_tokens: 2};
    window.named = name => ({name, status: "ready", ...time, ...count});
    window.replicas = [named("1"), named("2")];
    window.fetch = async (url, options) => {
        const response = await read(url, options);
        return String(url).startsWith("state") ? Response.json({...await response.json(), replicas}) : response;
    };
"""
CARDS = "[...document.querySelectorAll('.replica')].map(card => card.getBoundingClientRect())"


def test_replicas_stand_side_by_side(page: Page, faulty: Server) -> None:
    page.open(faulty.url + "/")
    page.run(f"(() => {{ {REPLICAS} }})()")
    page.wait("document.querySelectorAll('.replica').length === 2")
    first, second = page.run(f"{CARDS}.map(box => [box.left, box.top, box.right])")
    assert first[1] == second[1]
    assert first[2] < second[0]
    assert page.run("document.querySelector('.load').textContent") == "1 of 3 run · 0 tokens/s · 25% cached"
    assert page.run("document.getElementById('only').hidden")
    page.run("window.replicas = [named('2'), named('3')]")
    page.wait("document.getElementById('replica-1') === null && document.getElementById('replica-3') !== null")
    page.run("window.replicas = []")
    page.wait("document.querySelectorAll('.replica').length === 0 && !document.getElementById('only').hidden")
