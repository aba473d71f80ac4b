"""The console's page in a real browser: what it shows of a real node, whatever becomes of that, and on any screen."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import chromium
import numpy as np
import pytest
from node_process import NodeProcess
from ports import free_port

import kvstore
from kvstore.node.node import Node
from kvstore.status import Status, TierHealth, TierState

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium is installed; make console-browser does")

PAGE = 5000
SECONDS = 60.0
EVIL = "<img src=x onerror=window.hit=1>"
LONG = "a-model-with-a-name-without-any-break-" * 5
FOUND = {"looked_up": 0.0, "found_arena": 0.0, "found_disk": 0.0, "found_redis": 0.0}
CONTRASTS = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const bright = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const [r, g, b, a = 1] = channels(getComputedStyle(each).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || element.disabled || !element.checkVisibility() || element.matches("noscript, script")) continue;
    const pair = [bright(channels(getComputedStyle(element).color)), bright(ground(element))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) poor.push([element.outerHTML.slice(0, 90), ratio.toFixed(2)]);
  }
  return poor;
})()"""


@pytest.fixture
def browser() -> Iterator[chromium.Chromium]:
    with chromium.Chromium() as browser:
        yield browser


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Node:
    return start_node(metrics="0")


@pytest.fixture
def process(node_process: Callable[..., NodeProcess]) -> NodeProcess:
    """A node that is found at the same address again."""
    return node_process(metrics=str(free_port()))


@pytest.fixture
def client(node: Node) -> Iterator[kvstore.Client]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=SECONDS) as client:
        yield client


def layout(model: str) -> kvstore.Layout:
    return kvstore.Layout(model=model, block_size=16, page_bytes=PAGE)


def use(pages: Any, count: int = 4) -> None:
    """Store pages, load them and as many that are nowhere."""
    hashes = kvstore.hash_blocks(list(range(32 * count)), 16)
    pages.store(hashes[:count], np.ones((count, PAGE), np.uint8))
    assert pages.prepare_load(hashes).complete() == count


def show(browser: chromium.Chromium, node: Node | NodeProcess, fragment: str = "", **screen: Any) -> None:
    """Open the console and wait for the first answer."""
    port = node.metrics_port if isinstance(node, Node) else int(node.options["metrics"])
    browser.open(f"http://127.0.0.1:{port}/console{fragment}", **screen)
    browser.until("document.querySelector('#state')?.textContent", lambda text: text == "live")


def text(browser: chromium.Chromium, selector: str = "body") -> str:
    found: str = browser.run(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def of_all(browser: chromium.Chromium, selector: str, what: str = "each.textContent") -> list[Any]:
    """What a script says of ``each`` element."""
    told: list[Any] = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(each => {what})")
    return told


def listed(browser: chromium.Chromium) -> list[str]:
    return of_all(browser, "#namespaces tbody button")


def add(node: Node, *samples: dict[str, float], step: float = 5.0) -> None:
    """Samples in the place of those that the node has taken, the last one taken now."""
    console = node._web._console
    console._sampler.stop()
    console._history._count = 0
    for place, values in enumerate(samples, 1 - len(samples)):
        console._history.add(time.time() + place * step, values)


class TestItself:
    def test_it_shows_the_node_and_nothing_runs_or_loads_that_is_not_its_own(self, node, client, browser):
        with kvstore.connect(f"unix://{node.config.socket}", name=f"{EVIL}\x1b[2J") as hostile:
            evil = hostile.namespace(layout(EVIL))
            use(evil, 2)
            use(client.namespace(layout("m")))
            logging.getLogger("kvstore.x").error("broken %s", EVIL)
            found = {"arena": 30.0, "disk": 10.0, "redis": 0.0, "missed": 60.0, "loaded_bytes": 5e6}
            add(node, *({name: value * step for name, value in found.items()} for step in range(1, 5)), step=1.0)
            show(browser, node, f"#namespace={evil.fingerprint.hex()}")
            assert browser.run("document.querySelectorAll('canvas').length") == 7
            shown = text(browser)
        assert shown.count(evil.layout.name) >= 3 and f"broken {EVIL}" in shown
        assert f"{EVIL}\\x1b[2J" in text(browser, "#engines")
        assert "2 clients share the arena, 0 bulk connections" in shown
        tiers = browser.run("[...document.querySelectorAll('.tier progress')].map(each => each.value)")
        assert tiers[0] == 6 * 8192
        names = ["arena", "disk", "redis", "missed"]
        shares = browser.run(f"{names}.map(name => shares(samples, name, {names}).at(-1))")
        assert shares == pytest.approx([30, 10, 0, 60])
        assert browser.run("megabytes(samples, 'loaded_bytes').at(-1)") == pytest.approx(5, rel=0.01)
        # The policy holds also for what somebody got into the page.
        browser.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(EVIL)})")
        browser.run(
            "document.head.appendChild(Object.assign(document.createElement('script'), {text: 'window.hit=2'}))"
        )
        assert browser.run("fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'refused')") == "refused"
        assert browser.run("window.hit") is None
        asked = [
            event["params"]["request"]["url"]
            for event in browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        own = [url for url in asked if url.startswith(f"http://127.0.0.1:{node.metrics_port}/")]
        assert {url.rpartition("/")[2].partition("?")[0] for url in own} >= {
            *("console", "console.js", "figures.js", "uplot.js", "data")
        }

    def test_control_characters_are_shown_as_escapes(self, node, client, browser):
        client.namespace(layout("a\x1b[31m\u202eb"))
        show(browser, node)
        assert "a\\u001b[31m\\u202eb" in text(browser, "#namespaces")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_every_text_can_be_read(self, node, client, browser, scheme):
        use(client.namespace(layout("m")))
        logging.getLogger("kvstore.x").warning("some warning")
        logging.getLogger("kvstore.x").error("some error")
        status = node._web._console._status
        states = [TierHealth(TierState.DEGRADED, time.time() - 60, "why"), TierHealth(TierState.DOWN, 1.0, "why")]

        def troubled() -> Status:
            told = status()
            tiers = [dataclasses.replace(tier, health=health) for tier, health in zip(told.tiers, states, strict=True)]
            return dataclasses.replace(told, tiers=tuple(tiers))

        node._web._console._status = troubled
        show(browser, node, f"#sort=name&namespace={client.namespace(layout('m')).fingerprint.hex()}", scheme=scheme)
        assert browser.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(246, 247, 249)" if scheme == "light" else "rgb(18, 22, 28)"
        )
        assert browser.run(CONTRASTS) == []
        browser.open(f"http://127.0.0.1:{node.metrics_port}/console/help", scheme=scheme)
        browser.until("document.querySelectorAll('dt').length > 5")
        assert browser.run(CONTRASTS) == []

    def test_nothing_fails_in_it(self, node, client, browser):
        use(client.namespace(layout("m")))
        show(browser, node)
        for fragment in ("#range=3600&sort=hits&order=asc", "#range=7&sort=colour&from=-1&filter=m", "#namespace=12"):
            browser.run(f"location.hash = {fragment!r}")
            browser.run("refresh()")
        errors = [
            each["params"] for each in browser.events if each["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]
        assert [each for each in errors if "favicon" not in json.dumps(each)] == []

    def test_the_ways_on_from_it(self, node, browser):
        show(browser, node)
        links = browser.run("[...document.querySelectorAll('nav a')].map(each => [each.textContent, each.href])")
        base = f"http://127.0.0.1:{node.metrics_port}"
        assert links == [["Help", f"{base}/console/help"], ["Metrics", f"{base}/metrics"]]
        for _, url in links:
            assert browser.run(f"fetch({url!r}).then(answer => answer.status)") == 200
        browser.click("nav a")
        browser.until("location.pathname", lambda path: path == "/console/help")
        browser.until("document.querySelector('h1')?.textContent", lambda text: text == "What the console shows")
        back = browser.run("[...document.querySelectorAll('a')].map(each => each.href)")
        assert {f"{base}/console", f"{base}/metrics", f"{base}/console/data"} == set(back)


class TestWhetherItIsLive:
    """Node processes are stopped and killed beside an open page, which is never loaded again."""

    def greyed(self, browser: chromium.Chromium) -> bool:
        grey: list[str] = browser.run(
            "[...document.querySelectorAll('.headline, .tier, figure, #namespaces')].map("
            "each => each.closest('main > *')).map(each => getComputedStyle(each).filter)"
        )
        assert len(set(grey)) == 1 and len(grey) > 8
        return "grayscale" in grey[0]

    def test_a_hung_node(self, process, browser):
        show(browser, process)
        browser.run("window.mark = 'the same page'")
        assert not self.greyed(browser)
        process.pause()
        browser.until("document.querySelector('#state').innerText", lambda told: told.startswith("not answering since"))
        first = text(browser, ".state")
        assert self.greyed(browser)
        browser.until("document.querySelector('.state').innerText", lambda told: told != first)  # it goes on counting
        assert re.fullmatch(r"not answering since \d\d:\d\d:\d\d \(\d+ s\)", text(browser, ".state"))
        process.resume()
        browser.until("document.querySelector('.state').innerText.trim()", lambda told: told == "live")
        assert not self.greyed(browser) and browser.run("window.mark") == "the same page"
        assert browser.run("document.querySelector('#notice').hidden")

    def test_a_killed_node_that_is_started_again(self, process, browser):
        with kvstore.connect(process.url) as client:
            use(client.namespace(layout("m")))
            show(browser, process)
            browser.run("window.mark = 'the same page'")
            pid, sampled = process.pid, browser.until("samples.time.at(-1)")
            assert "4 pages" in text(browser, ".tier.arena")
            process.kill()
            browser.until("document.querySelector('#state').innerText", lambda told: told.startswith("gone since"))
            assert self.greyed(browser) and "4 pages" in text(browser, ".tier.arena")
            process.start()
            browser.until("document.querySelector('.state').innerText.trim()", lambda told: told == "live")
            assert not self.greyed(browser) and browser.run("window.mark") == "the same page"
            notice = text(browser, "#notice")
            assert notice.startswith("The node was restarted at ")
            assert f"pid {pid} was followed by pid {process.pid}" in notice
            browser.until(f"samples.time.length > 0 && samples.time[0] > {sampled}")  # of the new one alone
            assert f"pid {process.pid}" in text(browser, "#node")

    def test_an_answer_that_is_old_is_not_live_whatever_happened(self, node, browser):
        """The computer slept, say: no request of this page has failed."""
        show(browser, node)
        told = browser.run("clearTimeout(next), answered -= 20000, tick(), document.querySelector('#state').innerText")
        assert told.startswith("not answering since")
        browser.until("document.querySelector('.state').innerText.trim()", lambda told: told == "live")

    def test_why_there_is_no_answer(self, node, browser):
        show(browser, node)
        assert browser.run("[failure(0, true), failure(0, false)]") == ["not answering", "gone"]
        assert browser.run("failure(503, false)") == "answers 503"
        assert browser.run("failure(401, false)") == "answers 401: a token that sees all tenants is needed"


class TestHeadline:
    def test_hits_of_lookups_over_the_chosen_time(self, node, browser):
        """An hour in which the first half found nothing, and the last ten minutes found all."""
        samples = []
        for step in range(7):  # ten minutes each
            values = dict(FOUND, looked_up=1000.0 * step)
            values["found_arena"] = 600.0 * max(0, step - 5)
            values["found_disk"] = 400.0 * max(0, step - 5)
            samples.append(values)
        add(node, *samples, step=599.0)
        show(browser, node)
        assert text(browser, "#ratio") == "100.0 %"
        assert text(browser, "#looked") == "1,000 of 1,000 pages that were looked up in the last 10 min were found."
        assert text(browser, "#found") == "arena 60.0 %, disk 40.0 %"
        browser.click("#ranges button:last-child")
        assert text(browser, "#ratio") == "16.7 %"
        assert "1,000 of 6,000 pages" in text(browser, "#looked") and "60 min" in text(browser, "#looked")
        assert browser.run("location.hash") == "#range=3600"
        assert browser.run("document.querySelector('#ranges [aria-pressed=true]').textContent") == "1 h"
        browser.call("Page.reload")
        browser.until("document.querySelector('#ratio')?.textContent", lambda ratio: ratio == "16.7 %")

    def test_nobody_looked_anything_up(self, node, browser):
        add(node, FOUND | {"looked_up": 7.0}, FOUND | {"looked_up": 7.0}, step=60.0)
        show(browser, node)
        assert (text(browser, "#ratio"), text(browser, "#found")) == ("–", "")
        assert text(browser, "#looked") == "Nobody looked anything up in the last 60 s."

    @pytest.mark.parametrize("missing", list(FOUND))
    def test_what_is_not_counted_is_no_hundred_percent(self, node, browser, missing):
        counted = {name: value for name, value in (FOUND | {"looked_up": 5.0}).items() if name != missing}
        add(node, counted, counted)
        show(browser, node)
        assert text(browser, "#ratio") == "–"
        assert text(browser, "#looked") == "This node does not count lookups."
        assert browser.run("hitRatio({arena: 5, missed: 0})") == "–"

    def test_before_there_are_two_samples(self, node, browser):
        add(node, FOUND)
        show(browser, node)
        assert text(browser, "#looked") == "The first figures come in a few seconds."

    def test_a_ratio_of_nothing_found_is_zero(self, node, browser):
        add(node, FOUND, FOUND | {"looked_up": 50.0})
        show(browser, node)
        assert text(browser, "#ratio") == "0.0 %"


class TestLatencies:
    def test_calls_and_lower_tiers_of_the_chosen_time(self, node, client, browser):
        console = node._web._console
        console._sampler.stop()
        use(client.namespace(layout("m")))
        node.store.flush()
        console._history._count = 0
        console._history.add(time.time() - 3000, dict.fromkeys(console._history.columns[1:], 0.0))
        console._history.add(time.time() - 1200, console._sample())
        with kvstore.connect(f"kv://127.0.0.1:{node.port}") as afar:
            pages = afar.namespace(layout("m"))
            for _ in range(3):
                pages.lookup([bytes(32)])
        console._history.add(time.time(), console._sample())
        show(browser, node, "#range=3600")

        def rows() -> dict[str, list[str]]:
            cells = of_all(browser, "#latencies tbody tr", "[...each.cells].map(each => each.textContent)")
            return {name: rest for name, *rest in cells}

        told = rows()
        assert told["lookup"][0] == "3" and {"store", "disk write"} <= set(told)
        assert all(each.endswith((" µs", " ms", " s")) for _, *figures in told.values() for each in figures)
        browser.click("#ranges button")
        browser.until("document.querySelectorAll('#latencies tbody tr').length", lambda count: count < len(told))
        assert rows()["lookup"][0] == "3"
        assert "that makes no call" in text(browser, ".summary")

    def test_how_they_are_written(self, node, browser):
        show(browser, node)
        assert browser.run("[0.00025, 0.0032, 0.32, 1.25].map(latency)") == ["250 µs", "3.2 ms", "320 ms", "1.3 s"]


class TestTiers:
    def test_what_is_down_says_since_when_and_why(self, node, browser):
        console = node._web._console
        status, since = console._status, time.time() - 125

        def troubled() -> Status:
            told = status()
            arena, disk = told.tiers
            health = TierHealth(TierState.DOWN, since, "writes fail: No space left on device")
            well = TierHealth(TierState.OK, since)
            return dataclasses.replace(
                told, tiers=(dataclasses.replace(arena, health=well), dataclasses.replace(disk, health=health))
            )

        console._status = troubled
        show(browser, node)
        badges = browser.run("[...document.querySelectorAll('.badge')].map(each => [each.textContent, each.className])")
        assert badges == [["ok", "badge ok"], ["down", "badge down"]]
        reason = text(browser, ".tier.disk .reason")
        assert reason.startswith(
            f"down since {time.strftime('%H:%M:%S', time.localtime(since))} (2 min): writes fail: No"
        )
        assert browser.run("document.querySelector('.tier.arena .reason')") is None

    def test_what_is_asked_of_object_storage_and_what_it_costs(self, node, browser):
        console = node._web._console
        status = console._status

        def paid() -> Status:
            told = status()
            arena, disk = told.tiers
            asked = {"get": 200_000, "put": 3000}
            objects = dataclasses.replace(disk, name="objects", requests=asked, requests_dollars=0.25)
            return dataclasses.replace(told, tiers=(arena, objects))

        console._status = paid
        show(browser, node)
        assert "requests: 200,000 get, 3,000 put; about 0.25 USD" in text(browser, ".tier.objects")
        assert "requests" not in text(browser, ".tier.arena")


class TestNamespaces:
    @pytest.fixture
    def many(self, client: kvstore.Client) -> list[kvstore.Namespace]:
        spaces = [client.namespace(layout(f"model-{number:03}")) for number in range(130)]
        use(spaces[77], 4)
        use(spaces[99], 2)
        return spaces

    def test_a_hundred_are_searched_and_sorted(self, node, many, browser):
        show(browser, node)
        names = listed(browser)
        assert len(names) == 25 and names[0].startswith("model-077") and names[1].startswith("model-099")
        assert text(browser, "#known") == "1 to 25 of 130"
        browser.click("#filter")
        browser.type("-09")
        browser.until("document.querySelector('#known').innerText", lambda known: known.startswith("1 to 10 of 10"))
        assert text(browser, "#known") == "1 to 10 of 10 that the filter finds, of 130"
        browser.click("#namespaces thead [data-key=name]")
        browser.until("document.querySelector('#namespaces th').getAttribute('aria-sort')", "ascending".__eq__)
        browser.until("document.querySelector('#namespaces tbody').innerText.startsWith('model-090')")
        assert [name[:9] for name in listed(browser)] == [f"model-09{digit}" for digit in range(10)]
        browser.click("#namespaces thead [data-key=name]")
        browser.until("document.querySelector('#namespaces tbody').innerText.startsWith('model-099')")
        assert browser.run("location.hash") == "#sort=name&filter=-09"
        assert browser.run("[...document.querySelectorAll('#namespaces th')].map(each => each.ariaSort)") == [
            "descending",
            *["none"] * 7,
        ]

    def test_all_of_them_are_reached(self, node, many, browser):
        show(browser, node, "#sort=name&order=asc")
        found = listed(browser)
        while not browser.run("document.querySelector('#next').disabled"):
            browser.click("#next")
            browser.until(f"!document.querySelector('#namespaces tbody').innerText.includes({found[-1]!r})")
            found += listed(browser)
        assert [name[:9] for name in found] == [f"model-{number:03}" for number in range(130)]
        browser.click("#previous")
        browser.until("document.querySelector('#known').innerText", lambda known: known == "101 to 125 of 130")

    def test_a_click_opens_one_and_back_closes_it(self, node, many, browser):
        show(browser, node)
        browser.click("#namespaces tbody button")
        browser.until("document.querySelector('#details').innerText", lambda facts: "model-077" in facts)
        assert browser.run("document.activeElement.id") == "namespace-title"
        facts = dict(of_all(browser, "#details dt", "[each.innerText, each.nextSibling.innerText]"))
        fingerprint = many[77].fingerprint.hex()
        assert facts["fingerprint"] == fingerprint and facts["block_size"] == "16"
        assert facts["pages in the arena"] == "4 of 4.9 KiB, 0 pinned" and facts["arena"] == "32.0 KiB"
        assert facts["loaded"] == "4 pages, 4 missed"
        use(many[77], 4)
        browser.run("refresh()")
        browser.until("document.querySelector('#watched').innerText", lambda told: "pages loaded\t4" in told)
        assert browser.run("location.hash") == f"#namespace={fingerprint}"
        browser.call("Page.reload")
        browser.until("document.querySelector('#details')?.innerText", lambda facts: "model-077" in (facts or ""))
        show(browser, node)
        browser.click("#namespaces tbody button")
        browser.until("!document.querySelector('#namespace').hidden")
        browser.run("void window.history.back()")
        browser.until("document.querySelector('#namespace').hidden")

    def test_one_that_is_dropped_says_so(self, node, client, many, browser):
        show(browser, node, f"#namespace={many[5].fingerprint.hex()}")
        browser.until("document.querySelector('#details').innerText", lambda facts: "model-005" in facts)
        many[5].clear()
        browser.run("refresh()")
        browser.until("document.querySelector('#namespace-title').innerText", lambda told: "not any more" in told)

    def test_by_the_keyboard_alone(self, node, many, browser):
        show(browser, node)
        reached = []
        for _ in range(60):
            browser.press("Tab")
            reached.append(browser.run("document.activeElement.textContent || document.activeElement.id"))
            if reached[-1] == "arena":
                break
        assert [each for each in reached if each in ("5 min", "filter", "name", "arena")] == [
            *("5 min", "filter", "name", "arena")
        ]
        browser.press("Enter")
        browser.until("document.querySelector('#namespaces [aria-sort=descending]')?.innerText", "arena".__eq__)
        browser.press("Enter")
        browser.until("document.querySelector('#namespaces [aria-sort=ascending]')?.innerText", "arena".__eq__)
        assert browser.run("document.activeElement.textContent") == "arena"
        browser.until("document.querySelector('#namespaces tbody').innerText", lambda rows: "model-077" not in rows)
        browser.run("document.querySelector('#namespaces tbody button').focus()")
        held = browser.run("document.activeElement.textContent")
        browser.run("refresh()")
        browser.until("document.querySelector('#state').innerText", "live".__eq__)
        assert browser.run("document.activeElement.textContent") == held

    def test_what_a_screen_reader_needs(self, node, many, browser):
        show(browser, node, f"#namespace={many[0].fingerprint.hex()}")
        assert set(of_all(browser, "article:not(#namespace) th", "each.scope")) == {"col"}
        named = "table, main > section:not(.tables), progress, [role=group]"
        assert all(of_all(browser, named, "each.ariaLabel || each.getAttribute('aria-labelledby')"))
        assert all(of_all(browser, "input", "each.labels.length"))
        assert set(of_all(browser, "button", "each.ariaLabel || each.textContent")).isdisjoint({"", "‹", "›"})
        assert browser.run("document.querySelector('#state').getAttribute('role')") == "status"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_screen(node, client, browser, width, scheme):
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", name="n" * 128) as named:
        for number in range(130):
            client.namespace(layout(f"{number}-{LONG if number % 10 == 0 else 'short'}"))
        wide = client.namespace(layout(f"0-{LONG}"))
        use(wide)
        use(named.namespace(layout(f"0-{LONG}")))
        logging.getLogger("kvstore.x").error("x" * 400)
        add(node, dict(FOUND), FOUND | {"looked_up": 9e9, "found_arena": 8e9, "found_disk": 1e9})
        show(browser, node, f"#namespace={wide.fingerprint.hex()}", width=width, height=844, scheme=scheme)
        assert "0-a-model" in text(browser, "#details") and "nnn" in text(browser, "#engines")
        assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        inside = "[...document.querySelectorAll('article, figure, .tier, .tier *, header *')]"
        assert browser.run(f"{inside}.filter(each => each.scrollWidth > innerWidth).map(each => each.id)") == []
        browser.open(f"http://127.0.0.1:{node.metrics_port}/console/help", width=width, height=844, scheme=scheme)
        browser.until("document.querySelectorAll('dt').length > 5")
        assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
