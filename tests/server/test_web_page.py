"""The web page in a real browser: a chat that streams and can be stopped, and the state beside it."""

from __future__ import annotations

from collections.abc import Iterator

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
