"""The proxy's console: its data, and its page in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from openai_instance import OpenAIInstance
from proxy_process import CHAT, ProxyProcess
from redis_servers import wait_until

FIRST, SIMILAR = "How do I reset my password?", "How can I reset my password?"
needs_browser = pytest.mark.skipif(
    chromium.PROGRAM is None, reason="no chromium is installed; make console-browser does"
)


def ask(proxy: ProxyProcess, text: str, key: str = "k", **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    connection = proxy.open("POST", CHAT, body, Authorization=f"Bearer {key}")
    try:
        assert connection.getresponse().read()
    finally:
        connection.close()


def data(proxy: ProxyProcess) -> dict[str, Any]:
    status, body = proxy.ask("GET", "/console/data")
    assert status == 200
    told: dict[str, Any] = json.loads(body)
    return told


@pytest.fixture
def front(
    instance: Callable[..., OpenAIInstance], proxy: Callable[..., ProxyProcess], tmp_path: Path
) -> Callable[..., ProxyProcess]:
    prefill, decode = instance("p"), instance("d", "finished")

    def start(**flags: object) -> ProxyProcess:
        given = {"responses": tmp_path / "r.sqlite", "responses_plain": True, "responses_deadline": 30_000}
        return proxy([prefill], [decode], **given | flags)

    return start


@pytest.fixture
def browser() -> Iterator[chromium.Chromium]:
    with chromium.Chromium() as browser:
        yield browser


def used(proxy: ProxyProcess) -> None:
    """An equal hit, a similar one, a refused one and an unknown field."""
    ask(proxy, FIRST)
    wait_until(lambda: data(proxy)["responses"]["kept"] == {"stored": 1})
    for text, fields in ((FIRST, {}), (SIMILAR, {}), ("Don't I reset my password?", {}), (FIRST, {"x": 1})):
        ask(proxy, text, **fields)
    wait_until(lambda: data(proxy)["responses"]["kept"] == {"stored": 2})


def test_it_tells_what_was_told_refused_and_saved(front):
    proxy = front(responses_similar=2, responses_compare="short", responses_shadow=0.000001)
    assert data(proxy)["responses"]["similar"]["why"] == ""
    used(proxy)
    told = data(proxy)
    assert [each["role"] for each in told["instances"]] == ["prefill", "decode"]
    responses = told["responses"]
    assert responses["lookups"] == {"hit": 1, "miss": 3}
    assert responses["passed_by"] == {"unknown_field": 1}
    assert responses["saved_tokens"] == 22
    assert responses["saved_seconds"] > 0
    similar = responses["similar"]
    assert (similar["open"], similar["bound"], similar["hits"]) == (True, 0.02, 1)
    assert similar["refusals"] == {"negations": 1}
    assert (similar["lower"], similar["upper"]) == (0.0, 1.0)


def test_it_says_why_similar_prompts_are_shut(front):
    """The instance answers by the prompt's bytes, so that what a similar one is told is always wrong."""
    proxy = front(responses_similar=2, responses_compare="short", responses_shadow=100)
    for number in (1, 2, 3):
        assert data(proxy)["responses"]["similar"]["open"]
        ask(proxy, FIRST, f"k{number}")
        wait_until(lambda: data(proxy)["responses"]["kept"] == {"stored": number})  # noqa: B023 - at once
        ask(proxy, SIMILAR, f"k{number}")
        wait_until(lambda: data(proxy)["responses"]["similar"]["shadows"]["wrong"] == number)  # noqa: B023 - at once
    similar = data(proxy)["responses"]["similar"]
    assert not similar["open"]
    assert similar["why"].startswith("of the answers that were told to them, at least ")
    assert "and the bound is 2 %" in similar["why"]
    assert similar["lower"] > 0.02
    without = front(responses_similar=2)
    assert data(without)["responses"]["similar"]["open"] is False
    assert "--responses-compare" in data(without)["responses"]["similar"]["why"]


def test_without_what_it_shows_it_says_so(front, proxy, instance):
    assert data(front())["responses"]["similar"] is None
    plain = proxy([instance("q")], [instance("e")])
    assert data(plain)["responses"] is None
    assert plain.ask("GET", "/console/secret.html")[0] == 404
    for path in ("/console", "/console/console.css", "/console/figures.js", "/console/responses.js"):
        connection = plain.open("GET", path)
        response = connection.getresponse()
        assert (response.status, len(response.read()) > 100) == (200, True), path
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        connection.close()


@needs_browser
def test_the_page_shows_it_and_runs_nothing_that_is_not_its_own(front, browser):
    proxy = front(responses_similar=2, responses_compare="short", responses_shadow=0.000001)
    used(proxy)
    page = f"http://127.0.0.1:{proxy.port}/console"
    browser.open(page)
    browser.until("document.querySelector('#state')?.textContent", lambda text: text == "live")
    shown = browser.run("document.body.innerText")
    for words in (
        "50.0 %",
        "of 4 requests that may be told one; 1 may not",
        "22 tokens",
        "open",
        "1 hit; 0 of them computed as well, of which 0 were wrong",
        "The bound is 2.00 %.",
        "told what an equal one was told\t1",
        "told what a similar one was told\t1",
        "computed, and not kept: unknown field\t1",
        "negations\t1",
        "kept\t2",
        "in service",
    ):
        assert words in shown, words
    assert not [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
    asked = {
        event["params"]["request"]["url"].removeprefix(page)
        for event in browser.events
        if event["method"] == "Network.requestWillBeSent" and "favicon" not in event["params"]["request"]["url"]
    }
    assert asked == {"", *(f"/{name}" for name in ("console.css", "figures.js", "responses.js", "data"))}
    browser.run("document.head.appendChild(Object.assign(document.createElement('script'), {text: 'window.hit=2'}))")
    assert browser.run("window.hit") is None
    browser.open(page, width=360, height=640, scheme="dark")
    browser.until("document.querySelector('#state')?.textContent", lambda text: text == "live")
    assert browser.run("document.documentElement.scrollWidth <= 360")
    proxy.kill()
    browser.until("document.querySelector('#state').textContent", lambda text: text.startswith("gone since "))


@needs_browser
def test_the_page_of_a_proxy_that_keeps_nothing_or_tells_nothing_similar(front, proxy, instance, browser):
    for each, words in (
        (proxy([instance("q")], [instance("e")]), "the proxy has no --responses."),
        (front(), "the proxy has no --responses-similar."),
        (front(responses_similar=2), "nothing compares answers (--responses-compare)"),
    ):
        browser.open(f"http://127.0.0.1:{each.port}/console")
        browser.until("document.querySelector('#state')?.textContent", lambda text: text == "live")
        assert words in browser.run("document.body.innerText")
