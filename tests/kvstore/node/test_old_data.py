"""What a node of an earlier commit wrote is opened by today's: arena, disk tier and Redis, page for page.

``tests/fixtures/old_data`` has the bytes, how they were made, and what nodes of that commit found in them themselves.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess
from old_data.stored import LAYOUTS, hashes, payload
from redis_servers import RedisServer

import kvstore

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "old_data" / "data.tar.xz"
TIMEOUT = 30.0
SETS = ("terminated", "killed")
MODES = ("all", "arena", "disk", "redis")
"""Which parts of a data set a node is given. Without the arena's it has an empty arena, without the disk's an empty
disk; with the arena's alone it has no disk tier."""
NO_WRITES = {"disk-write-limit": "4KiB"}
"""Less than the shortest write takes: what is dirty stays so."""
TIERS = {"a": "arena", "d": "disk", "r": "redis", "-": None}
Eventually = Callable[..., None]


class OldData:
    """The unpacked archive, and nodes of today over copies of what is in it."""

    def __init__(self, unpacked: Path, folder: Path, shm: Path) -> None:
        self.unpacked, self.folder, self.shm = unpacked, folder, shm
        self.expected: dict[str, dict[str, Any]] = json.loads((unpacked / "expected.json").read_text())
        self._running: list[NodeProcess | RedisServer] = []

    def start(self, name: str, mode: str, **options: str) -> NodeProcess:
        """A node over a data set, or a part of it."""
        source = self.unpacked / name
        if mode in ("all", "arena"):
            shutil.copytree(source / "arena", self.shm / "arena")
        if mode in ("all", "disk"):
            shutil.copytree(source / "disk", self.folder / "disk")
        if mode in ("all", "redis"):
            (self.folder / "redis").mkdir()
            shutil.copy(source / "dump.rdb", self.folder / "redis")
            redis = RedisServer(self.folder / "redis")
            self._running.append(redis)
            options["redis"] = redis.url
        if mode == "arena":
            options["disk-limit"] = "0"
        return self.start_again(**options)

    def start_again(self, **options: str) -> NodeProcess:
        """A node over what is there by now, of the sizes that the old one had: an arena of another one is dropped."""
        node = NodeProcess(self.folder, self.shm, **({"arena": "512KiB", "disk-limit": "4MiB"} | options))
        self._running.append(node)
        node.start()
        return node

    def close(self) -> None:
        for each in reversed(self._running):
            if isinstance(each, RedisServer):
                each.close()
            elif each.process is not None:
                each.kill()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old_data")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(unpacked: Path, short_folder: Path, shm_folder: Path) -> Iterator[OldData]:
    data = OldData(unpacked, short_folder, shm_folder)
    yield data
    data.close()


def connect(node: NodeProcess) -> kvstore.Client:
    return kvstore.connect(node.url, timeout=TIMEOUT)


def numbers(tiers: str, *wanted: str) -> list[int]:
    """The pages of a namespace that are in some of the tiers."""
    return [number for number, tier in enumerate(tiers) if tier in wanted]


def counted(client: kvstore.Client, counters: dict[str, int]) -> dict[str, Any]:
    """What a node says that it has, in the archive's words; of the arena's counters those that the old node had."""
    status = client.status()
    return {
        "counters": {name: status.tiers[0].counters[name] for name in counters},
        "tiers": {each.name: [each.used_bytes, each.pages] for each in status.tiers},
        "namespaces": {
            each.fingerprint.hex(): {
                "layout": json.loads(each.layout),
                "durability": each.durability,
                "arena_pages": each.arena_pages,
                "pinned_pages": each.pinned_pages,
                "used_bytes": dict(each.used_bytes),
            }
            for each in status.namespaces
        },
    }


def becomes(read: Callable[[], object], expected: object, eventually: Eventually) -> None:
    """Wait until what is read is as expected; fail with the difference when it does not get there."""
    with suppress(AssertionError):
        eventually(lambda: read() == expected)
    assert read() == expected


def load(client: kvstore.Client, space: str, number: int, eventually: Eventually) -> None:
    """Load a page that must be there. It is asked for again where it did not come: Redis may be late, which is a miss,
    and an arena that is full of what goes to disk just now has no slot for it."""
    pages = client.namespace(LAYOUTS[space])
    into = bytearray(LAYOUTS[space].page_bytes)
    eventually(lambda: pages.load([hashes(space)[number]], [into]), f"page {number} of {space} is loaded")
    assert into == payload(space, number), f"page {number} of {space}"


def register(folder: Path) -> dict[str, dict[str, Any]]:
    """A folder's register of namespaces, by layout, without how long each was not used."""
    entries = json.loads((folder / "namespaces.json").read_text())["namespaces"]
    return {json.dumps(each.pop("layout"), sort_keys=True): each for each in entries if each.pop("idle") >= 0}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETS)
def test_pages_are_in_the_same_tiers_and_the_books_are_the_same(
    old: OldData, name: str, mode: str, eventually: Eventually
) -> None:
    node = old.start(name, mode, **NO_WRITES)
    expected = old.expected[name][mode]
    found = expected.pop("pages")
    with connect(node) as client:
        # In the end: a dead client's slots are kept for a while, and Redis is asked now and then what it has.
        becomes(lambda: counted(client, expected["counters"]), expected, eventually)
        for space, tiers in found.items():
            pages = client.namespace(LAYOUTS[space])
            told = tuple(TIERS[tier] for tier in tiers)
            becomes(lambda pages=pages, space=space: pages.lookup(hashes(space)).tiers, told, eventually)
            pinned = expected["namespaces"].get(pages.fingerprint.hex(), {"pinned_pages": 0})["pinned_pages"]
            assert pages.unpin(hashes(space)) == pinned


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETS)
def test_every_page_has_its_bytes(old: OldData, name: str, mode: str, eventually: Eventually) -> None:
    node = old.start(name, mode)
    with connect(node) as client:
        for space, tiers in old.expected[name][mode]["pages"].items():
            for number in numbers(tiers, "a", "d", "r"):
                load(client, space, number, eventually)
            absent = [hashes(space)[number] for number in numbers(tiers, "-")]
            assert not any(client.namespace(LAYOUTS[space]).lookup(absent).present)
        assert all(tier.counters.get("corrupt", 0) == 0 for tier in client.status().tiers)


def test_what_only_the_killed_node_s_arena_had_goes_to_disk(old: OldData, eventually: Eventually) -> None:
    node = old.start("killed", "all")
    with connect(node) as client:
        client.flush()
        assert client.status().tiers[0].counters["dirty"] == 0
    node.kill()
    shutil.rmtree(node.arena_folder)
    again = old.start_again()
    arena, disk = (old.expected["killed"][mode]["pages"] for mode in ("arena", "disk"))
    with connect(again) as client:
        for space, tiers in arena.items():
            dirty = sorted(set(numbers(tiers, "a")) - set(numbers(disk[space], "d")))
            assert dirty or space == "wide"
            for number in dirty:
                load(client, space, number, eventually)


@pytest.mark.parametrize("name", SETS)
def test_registers_of_namespaces_are_written_as_they_were(old: OldData, name: str) -> None:
    """Number, durability, and since when there is each."""
    source = old.unpacked / name
    node = old.start(name, "all")
    assert register(node.arena_folder) == register(source / "arena")
    assert register(node.disk) == register(source / "disk")


@pytest.mark.parametrize("name", SETS)
def test_pages_that_were_published_first_leave_first(old: OldData, name: str) -> None:
    node = old.start(name, "arena")
    was = numbers(old.expected[name]["arena"]["pages"]["small"], "a")
    with connect(node) as client:
        pages = client.namespace(LAYOUTS["small"])
        for number in range(16):  # as many as the two batches that were stored first and are here
            assert pages.store([bytes([number]) * 32], [bytes(LAYOUTS["small"].page_bytes)]).stored == 1
        present = pages.lookup(hashes("small")).present
    assert [number for number, here in enumerate(present) if here] == was[16:]
