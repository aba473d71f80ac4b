"""Nodes that share a bucket: what one stored, another one finds when the first one's disk and arena are gone."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from s3_server import URL, S3Server

import kvstore
from kvstore import Client, Layout, Namespace
from kvstore.arena.epochs import CAN_READ
from kvstore.node.node import Node
from kvstore.page_codes import UNTOLD, PageTier
from kvstore.store import archive
from kvstore.tiers.objects import tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import CacheStub

PAGE = 96 << 10
LAYOUT = Layout(model="fleet", block_size=16, page_bytes=PAGE)
PROMPT = [hashlib.sha256(b"page %d" % number).digest() for number in range(24)]


def page(block_hash: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(hashlib.shake_256(block_hash).digest(PAGE), np.uint8)


def load(namespace: Namespace, hashes: list[bytes]) -> int:
    """How many leading pages could be loaded; their bytes are checked."""
    into = [np.zeros(PAGE, np.uint8) for _ in hashes]
    loaded = namespace.load(hashes, into)
    for block_hash, got in zip(hashes[:loaded], into, strict=False):
        assert np.array_equal(got, page(block_hash))
    return loaded


def store(namespace: Namespace, hashes: list[bytes]) -> int:
    return namespace.store(hashes, [page(block_hash) for block_hash in hashes]).stored


def eventually(so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60.0
    while not so():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture
def open_node(
    tmp_path: Path, shm_folder: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Client]]:
    """An embedded node over the bucket: the whole store with its threads, in this process."""
    monkeypatch.setattr(tier, "INTERVAL", 0.1)
    monkeypatch.setattr(archive, "LONGEST_WAIT", 0.1)
    clients: list[Client] = []

    def start(name: str, **options: Any) -> Client:
        settings = {"arena": "8MiB", "disk_limit": "32MiB", "objects": URL, "objects_limit": "64MiB"}
        settings |= {"arena_dir": str(shm_folder / name), "objects_deadline": "20"} | options
        client = kvstore.connect(f"embedded://{tmp_path / name}?{urllib.parse.urlencode(settings)}", timeout=60.0)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()


def counters(client: Client, tier: str) -> dict[str, int]:
    return dict(client.status().tier(tier).counters)


def test_all_that_one_stored_another_one_has_when_its_host_is_gone(
    open_node: Callable[..., Client], tmp_path: Path
) -> None:
    first = open_node("first", objects_admit="all")
    assert store(first.namespace(LAYOUT), PROMPT) == len(PROMPT)
    first.flush()
    assert counters(first, "arena")["archived"] == len(PROMPT)
    first.close()
    shutil.rmtree(tmp_path / "first")
    second = open_node("second")
    theirs = second.namespace(LAYOUT)
    found = theirs.lookup(PROMPT)
    assert set(found.tiers) == {"objects"}
    assert load(theirs, PROMPT) == len(PROMPT)
    status = second.status()
    assert set(theirs.lookup(PROMPT).tiers) == {"arena"}
    assert status.tier("objects").counters["hit"] == len(PROMPT)
    assert status.lookups.objects == len(PROMPT)
    assert status.namespaces[0].counters["objects"] == len(PROMPT)


def test_a_page_goes_there_once_it_is_used_again(open_node: Callable[..., Client]) -> None:
    first, second = open_node("first"), open_node("second")
    mine, theirs = first.namespace(LAYOUT), second.namespace(LAYOUT)
    assert store(mine, PROMPT) == len(PROMPT)
    first.flush()
    assert counters(first, "objects")["stored"] == 0
    assert load(mine, PROMPT[:8]) == 8
    eventually(lambda: theirs.lookup(PROMPT).prefix == 8, "used pages come to the other node")
    assert load(theirs, PROMPT) == 8
    assert counters(first, "objects")["stored"] == 8


def test_pages_of_several_namespaces_share_a_pack_and_a_full_one_is_written_at_once(
    open_node: Callable[..., Client], server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of the arena is enough for one here, 32 MiB at most."""
    monkeypatch.setattr(archive, "LONGEST_WAIT", 3600.0)
    node = open_node("first", objects_admit="all")
    mine, theirs = (
        node.namespace(Layout(model="fleet", block_size=16, page_bytes=PAGE, tenant=tenant))
        for tenant in ("search", "chat")
    )
    assert store(mine, PROMPT[:4]) == store(theirs, PROMPT[:4]) == 4
    node.flush()
    assert len(server.names("fleet/packs/")) == 1
    assert counters(node, "objects")["stored"] == 8
    assert store(mine, PROMPT[4:]) == 20
    eventually(lambda: counters(node, "objects")["stored"] > 8, "there are enough of them")


def test_a_page_that_left_the_arena_comes_back_from_there(open_node: Callable[..., Client]) -> None:
    node = open_node("first", disk_limit="0", objects_admit="all")
    mine = node.namespace(LAYOUT)
    many = [hashlib.sha256(b"many %d" % number).digest() for number in range(160)]
    for at in range(0, len(many), 16):
        store(mine, many[at : at + 16])
        node.flush()
    assert "objects" in mine.lookup(many).tiers
    assert load(mine, many[:16]) == 16


def test_what_came_from_there_goes_to_the_own_disk(open_node: Callable[..., Client]) -> None:
    first = open_node("first", objects_admit="all")
    store(first.namespace(LAYOUT), PROMPT)
    first.flush()
    second = open_node("second")
    assert load(second.namespace(LAYOUT), PROMPT) == len(PROMPT)
    second.flush()
    assert counters(second, "disk")["stored"] == len(PROMPT)


def test_clearing_a_namespace_reaches_all_nodes(open_node: Callable[..., Client], server: S3Server) -> None:
    first = open_node("first", objects_admit="all")
    mine = first.namespace(LAYOUT)
    store(mine, PROMPT)
    first.flush()
    second = open_node("second")
    theirs = second.namespace(LAYOUT)
    assert theirs.lookup(PROMPT).prefix == len(PROMPT)
    assert mine.clear() == len(PROMPT)
    eventually(lambda: theirs.lookup(PROMPT).prefix == 0, "it is gone at the other node as well")
    eventually(lambda: not server.names("fleet/packs/"), "and its packs are deleted")
    first.close()
    third = open_node("third")
    assert third.namespace(LAYOUT).lookup(PROMPT).prefix == 0


def test_a_namespace_that_another_node_cleared_can_be_cleared_by_who_did_not_write_it(
    open_node: Callable[..., Client],
) -> None:
    first = open_node("first", objects_admit="all")
    store(first.namespace(LAYOUT), PROMPT)
    first.flush()
    second = open_node("second")
    assert second.namespace(LAYOUT).clear() == len(PROMPT)
    mine = first.namespace(LAYOUT)
    eventually(lambda: not any(first.status().tier("objects").pages for _ in range(1)), "its writer hears of it, too")
    assert mine.lookup(PROMPT).prefix == len(PROMPT), "what is in its own arena and on its disk stays its own"


def test_tenants_do_not_see_each_others_pages(open_node: Callable[..., Client]) -> None:
    first = open_node("first", objects_admit="all")
    mine = Layout(model="fleet", block_size=16, page_bytes=PAGE, tenant="search")
    theirs = Layout(model="fleet", block_size=16, page_bytes=PAGE, tenant="chat")
    store(first.namespace(mine), PROMPT)
    first.flush()
    second = open_node("second")
    assert second.namespace(theirs).lookup(PROMPT).prefix == 0
    assert second.namespace(mine).lookup(PROMPT).prefix == len(PROMPT)


def test_a_bucket_that_is_away_costs_nothing_but_its_pages(open_node: Callable[..., Client], server: S3Server) -> None:
    server.faults.status = 503
    node = open_node("first", objects_admit="all", objects_deadline="1")
    mine = node.namespace(LAYOUT)
    assert store(mine, PROMPT) == len(PROMPT)
    assert load(mine, PROMPT) == len(PROMPT)
    eventually(lambda: counters(node, "arena")["unarchived"] >= len(PROMPT), "what could not be written is counted")
    eventually(lambda: bool(node.status().tier("objects").health.shown(0.0)), "and the tier says so")
    assert "AKTEST" not in node.status().tier("objects").health.reason
    server.faults.status = 0
    done = threading.Event()

    def heals() -> bool:
        load(mine, PROMPT)
        return node.status().tier("objects").counters["stored"] == len(PROMPT) or done.is_set()

    eventually(heals, "used pages are offered again once it is back")


def test_older_clients_are_told_of_the_tier_that_they_know(
    open_node: Callable[..., Client], start_node: Callable[..., Node]
) -> None:
    """They know the numbers up to Redis, and say of no newer one that they know it: nothing new may come to them."""
    first = open_node("first", objects_admit="all")
    store(first.namespace(LAYOUT), PROMPT)
    first.flush()
    node = start_node(objects=URL, objects_limit=64 << 20, objects_deadline=20.0)
    hashes = b"".join(PROMPT)
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=60.0) as client:
        namespace = client.namespace(LAYOUT)
        assert set(namespace.lookup(PROMPT).tiers) == {"objects"}
        with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:

            def ask(newest_tier: int) -> set[int]:
                query = pb.PageList(fingerprint=LAYOUT.fingerprint, hashes=hashes, newest_tier=newest_tier)
                [tiers] = CacheStub(channel).Lookup(pb.LookupRequest(queries=[query]), timeout=50).tiers
                return set(tiers)

            assert ask(PageTier.OBJECTS) == ask(99) == {PageTier.OBJECTS}
            assert ask(0) == ask(PageTier.REDIS) == {PageTier.REDIS}
        assert load(namespace, PROMPT) == len(PROMPT)


@pytest.mark.skipif(not CAN_READ, reason="on this processor nothing is read without a call")
def test_a_miss_is_told_without_a_call(open_node: Callable[..., Client], start_node: Callable[..., Node]) -> None:
    """The node's summary has what it knows of object storage, and follows it."""
    node = start_node(objects=URL, objects_limit=64 << 20, objects_deadline=20.0, arena=4 << 20, disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        namespace = client.namespace(LAYOUT)
        handle, path = namespace._handle.now(time.monotonic() + 60.0)
        hashes = b"".join(PROMPT)

        def told() -> set[int]:
            return set(path.find(handle, hashes) or b"")

        eventually(lambda: told() == {PageTier.ABSENT}, "there is a summary, and nothing in it")
        first = open_node("first", objects_admit="all")
        store(first.namespace(LAYOUT), PROMPT)
        first.flush()
        eventually(lambda: told() == {UNTOLD}, "what another node wrote may be here once this one knows")
        assert namespace.lookup(PROMPT).prefix == len(PROMPT)
        assert first.namespace(LAYOUT).clear() == len(PROMPT)
        eventually(lambda: told() == {PageTier.ABSENT}, "what it removed is nowhere again")
