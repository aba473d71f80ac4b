"""Lookups and loads of pages that are nowhere, beside a disk: no call. Of the others: one, over the arena's socket."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.arena.epochs import CAN_READ
from kvstore.arena.format import SOMEWHERE
from kvstore.client.paths.control import RemoteControl
from kvstore.client.paths.shm import mapped_arena as mapped
from kvstore.client.paths.shm.path import ShmPath
from kvstore.core import choice
from kvstore.errors import UnavailableError
from kvstore.node.node import Node

pytestmark = pytest.mark.skipif(not CAN_READ, reason="on this processor nothing is read without a call")
PATIENCE = 60.0
LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=64 << 10)


def prompt(number: int, pages: int = 40) -> list[bytes]:
    return kvstore.hash_blocks([number] * (16 * pages), block_size=16)


def payload(pages: int = 40) -> Any:
    return np.ones((pages, LAYOUT.page_bytes), np.uint8)


def wait_for_summary(node: Node) -> int:
    """Returns what the superblock says of it."""
    end = time.monotonic() + PATIENCE
    while not (word := node.store.arena.summaries._word[0]):
        assert time.monotonic() < end, "no summary comes"
        time.sleep(0.005)
    return word


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Node:
    """With an arena of 4 MiB, which holds one prompt and a half."""
    started = start_node(arena=4 << 20)
    wait_for_summary(started)
    return started


@pytest.fixture
def client(node: Node) -> Iterator[kvstore.Client]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as connected:
        yield connected


@pytest.fixture
def pages(client: kvstore.Client) -> kvstore.Namespace:
    """With four prompts, of which the first ones are on disk alone."""
    namespace = client.namespace(LAYOUT)
    for number in range(4):
        namespace.store(prompt(number), payload())
        client.flush()
    return namespace


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """By which way how many pages were asked for."""
    ways: list[tuple[str, int]] = []
    nearby, call = ShmPath.ask_where, RemoteControl.lookup

    def ask_where(path: ShmPath, queries: Any, deadline: float) -> Any:
        told = nearby(path, queries, deadline)
        if told is not None:
            ways.append(("socket", sum(map(len, told))))
        return told

    def lookup(control: RemoteControl, queries: Any, timeout: float) -> Any:
        ways.append(("gRPC", sum(len(hashes) for _, hashes in queries)))
        return call(control, queries, timeout)

    monkeypatch.setattr(ShmPath, "ask_where", ask_where)
    monkeypatch.setattr(RemoteControl, "lookup", lookup)
    return ways


def test_a_new_prompt_makes_no_call(pages: kvstore.Namespace, asked: list[tuple[str, int]]) -> None:
    assert pages.lookup(prompt(77, 512)).tiers == (None,) * 512
    assert pages.lookup(prompt(78, 5)).tiers == (None,) * 5
    assert not asked


def test_what_may_be_below_is_asked_by_one_exchange_over_the_arenas_socket(
    pages: kvstore.Namespace, asked: list[tuple[str, int]]
) -> None:
    known, new = prompt(0), prompt(77)
    assert pages.lookup(known[:20] + new).tiers == ("disk",) * 20 + (None,) * 40
    assert pages.lookup(prompt(3)).tiers == ("arena",) * 40
    assert asked == [("socket", 20)]


def test_a_lookup_in_two_namespaces_asks_once(
    client: kvstore.Client, pages: kvstore.Namespace, asked: list[tuple[str, int]]
) -> None:
    other = client.namespace(kvstore.Layout(model="other", block_size=16, page_bytes=4096))
    here, there = client.lookup([(pages, prompt(0)), (other, prompt(0))])
    assert here.tiers == ("disk",) * 40
    assert there.tiers == (None,) * 40, "the same hashes, of another namespace"
    assert asked == [("socket", 40)]


def test_the_scheduler_learns_at_once_that_a_prompt_is_new(client: kvstore.Client, pages: kvstore.Namespace) -> None:
    [told] = client.lookup_here([(pages, prompt(77))]) or [None]
    assert told is not None
    assert told.tiers == (None,) * 40
    assert client.lookup_here([(pages, prompt(0))]) is None, "only a call can tell"


def test_lookups_and_loads_that_made_no_call_are_counted(
    node: Node, client: kvstore.Client, pages: kvstore.Namespace
) -> None:
    before = node.store.statistics().counters
    pages.lookup(prompt(77))
    into = payload()
    assert pages.load(prompt(78), into) == 0
    end = time.monotonic() + PATIENCE
    while node.store.statistics().counters["asked"] == before["asked"] and time.monotonic() < end:
        time.sleep(0.01)  # the node is told a moment later
    after = node.store.statistics().counters
    assert after["asked"] - before["asked"] == after["missed"] - before["missed"] == 40, "the load"
    lookups = client.status().lookups
    assert lookups.asked == 80, "the lookup, and the load of what was not looked up"
    assert lookups.found == 0


def test_a_load_that_begins_in_the_arena_and_ends_nowhere_makes_no_call(
    pages: kvstore.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmPath, "load", None)
    into = payload(80)
    assert pages.load(prompt(3) + prompt(77), into) == 40


def test_a_page_that_leaves_while_it_is_copied_is_not_taken_for_nowhere(
    node: Node, pages: kvstore.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on disk; the page behind it is nowhere."""
    hashes = prompt(3)[:1]
    slots = node.store._state.catalog.find_all([pages.fingerprint + hashes[0]]).tolist()

    def copy(target: Any, source: Any) -> None:
        target[...] = source
        if slots:
            with node.store._state.lock:
                node.store._state.residency.drop(slots.pop())

    monkeypatch.setattr(mapped, "copy_bytes", copy)
    into = np.zeros((2, LAYOUT.page_bytes), np.uint8)
    assert pages.load(hashes + prompt(77)[:1], into) == 1
    assert (into[0] == 1).all()


def test_another_file_is_mapped_when_the_disks_limit_changes(
    node: Node, pages: kvstore.Namespace, asked: list[tuple[str, int]]
) -> None:
    first = node.store.arena.summaries._word[0]
    node.store.lower_tiers.own[0].set_limit(256 << 20)
    end = time.monotonic() + PATIENCE
    while (second := wait_for_summary(node)) == first:
        assert time.monotonic() < end, "no other summary comes"
        assert pages.lookup(prompt(0)).tiers == ("disk",) * 40
    asked.clear()
    assert pages.lookup(prompt(77)).tiers == (None,) * 40
    assert pages.lookup(prompt(0)).tiers == ("disk",) * 40
    assert asked == [("socket", 40)]
    assert second != first
    assert len(list(node.store.arena.directory.glob("summary-*"))) == 1


@pytest.mark.parametrize("what", ["gone", "of another version", "another's", "not complete"])
def test_a_summary_that_cant_be_used_is_asked_for(
    what: str, node: Node, pages: kvstore.Namespace, asked: list[tuple[str, int]]
) -> None:
    arena = node.store.arena
    word = arena.summaries._word
    [path] = arena.directory.glob("summary-*")
    if what == "gone":
        path.unlink()
        word[0] += 256  # and so it is looked for anew
    elif what == "of another version":
        word[0] += 1
    elif what == "another's":
        path.rename(path.with_name(f"summary-{(word[0] >> 8) + 1:014x}"))
        word[0] += 256
    else:
        word[0] = 0
    assert pages.lookup(prompt(77)).tiers == (None,) * 40
    assert asked == [("socket", 40)]


def test_an_older_node_is_asked_through_grpc(
    node: Node, pages: kvstore.Namespace, asked: list[tuple[str, int]]
) -> None:
    """It says no more than that a page may be in some lower tier, and knows no lookups over the arena's socket."""
    node.store.arena._elsewhere[0] = SOMEWHERE
    assert pages.lookup(prompt(77)).tiers == (None,) * 40
    assert asked == [("gRPC", 40)]


def test_a_page_without_a_place_in_the_index_is_asked_for(
    node: Node, pages: kvstore.Namespace, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "CHOSEN", choice.Choice(None, "a test says so"))
    monkeypatch.setattr("kvstore.arena.index.IndexWriter._put", lambda *_: False)
    monkeypatch.setattr("kvstore.arena.index.IndexWriter._has_room", lambda *_: False)
    assert pages.store(prompt(50, 1), payload(1)).stored == 1
    assert pages.lookup(prompt(50, 1)).tiers == ("arena",)
    assert asked == [("socket", 1)]


def test_no_is_true_while_the_disk_rests(
    node: Node, pages: kvstore.Namespace, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = node.store.lower_tiers.own[0]
    reading = tier._device.reading  # type: ignore[attr-defined]
    for _ in range(4):
        reading.failed(OSError(5, "broken"))
    assert reading.resting
    assert pages.lookup(prompt(0)).tiers == (None,) * 40
    assert asked == [("socket", 40)], "the summary has it still: the disk may come back"
    reading.succeeded()
    assert pages.lookup(prompt(0)).tiers == ("disk",) * 40


def test_only_the_nodes_user_reads_the_file_and_it_goes_with_the_node(node: Node) -> None:
    folder: Path = node.store.arena.directory
    [path] = folder.glob("summary-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 >= path.stat().st_size, "allocated in full"
    node.stop()
    assert not list(folder.glob("summary-*"))


def test_a_restarted_node_makes_another_one(
    start_node: Callable[..., Node], node: Node, pages: kvstore.Namespace, asked: list[tuple[str, int]]
) -> None:
    before = node.store.arena.summaries._word[0]
    node.stop()
    again = start_node(arena=4 << 20)
    assert wait_for_summary(again) != before
    end = time.monotonic() + PATIENCE
    while True:
        try:
            assert pages.lookup(prompt(0)).prefix == 40
            break
        except UnavailableError:
            assert time.monotonic() < end, "it is not found again"
            time.sleep(0.05)
    asked.clear()
    assert pages.lookup(prompt(77)).tiers == (None,) * 40
    assert not asked
