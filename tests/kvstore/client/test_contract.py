"""The public API, the same over every URL: what it answers, and what it refuses."""

from __future__ import annotations

import array
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blocking_aio import LoopThread

import kvstore
from kvstore.client.paths.shm import mapped_arena as mapped
from kvstore.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    LimitExceededError,
    UnavailableError,
)
from kvstore.layout import MAX_NAME_BYTES

MOST_LOOKUP_PAGES = 131_072


@pytest.fixture(autouse=True)
def client_kind(request, monkeypatch):
    if getattr(request, "param", "blocking") == "blocking":
        yield
        return
    thread = LoopThread()
    monkeypatch.setattr(kvstore, "connect", thread.connect)
    yield
    thread.stop()


both_kinds = pytest.mark.parametrize("client_kind", ["blocking", "asyncio"], indirect=True)
"""The asyncio client keeps the same contract."""


@both_kinds
class TestStoreLookupLoad:
    def test_what_was_stored_is_found_and_loaded(self, pages, hashes, payload):
        keys, data = hashes(10), payload(10)
        assert pages.lookup(keys).prefix == 0
        assert pages.store(keys, data) == kvstore.StoreResult(stored=10)
        found = pages.lookup(keys)
        assert (found.prefix, found.present, found.tiers) == (10, (True,) * 10, ("arena",) * 10)
        into = np.zeros_like(data)
        assert pages.load(keys, into) == 10
        assert np.array_equal(into, data)

    def test_counts_add_up_and_the_first_copy_is_kept(self, pages, hashes, payload):
        keys = hashes(10)
        assert pages.store(keys[:4], payload(4, seed=1)) == kvstore.StoreResult(stored=4)
        assert pages.store(keys, payload(10, seed=2)) == kvstore.StoreResult(stored=6, present=4)
        assert pages.store(keys, payload(10, seed=3)) == kvstore.StoreResult(present=10)
        into = np.zeros((10, 5000), np.uint8)
        assert pages.load(keys, into) == 10
        assert np.array_equal(into, np.vstack([payload(4, seed=1), payload(10, seed=2)[4:]]))

    def test_only_the_leading_pages_are_a_prefix(self, pages, hashes, payload):
        keys, data = hashes(6), payload(6)
        pages.store(keys[:2] + keys[3:], np.vstack([data[:2], data[3:]]))
        found = pages.lookup(keys)
        assert found.prefix == 2
        assert found.present == (True, True, False, True, True, True)
        assert found.tiers[2] is None
        into = np.zeros_like(data)
        assert pages.load(keys, into) == 2
        assert np.array_equal(into[:2], data[:2])
        assert pages.lookup(keys[2:]).prefix == 0
        assert pages.load(keys[2:], into[2:]) == 0
        assert pages.load(keys[3:], into[3:]) == 3
        assert np.array_equal(into[3:], data[3:])

    def test_more_pages_than_one_batch_takes(self, pages, hashes, payload):
        count = 2 * pages.batch_pages + 3
        keys, data = hashes(count), payload(count)
        assert pages.store(keys, data).stored == count
        into = np.zeros_like(data)
        assert pages.load(keys, into) == count
        assert np.array_equal(into, data)
        pages.evict(keys[pages.batch_pages : pages.batch_pages + 1])
        assert pages.load(keys, into) == pages.batch_pages

    def test_pages_of_several_messages_each(self, client, hashes, payload):
        size = (2 << 20) + 4097
        pages = client.namespace(kvstore.Layout(model="wide", block_size=16, page_bytes=size))
        keys, data = hashes(2), payload(2, page_bytes=size)
        assert pages.store(keys, data).stored == 2
        into = np.zeros_like(data)
        assert pages.load(keys, into) == 2
        assert np.array_equal(into, data)

    def test_the_same_hash_twice_in_one_call(self, pages, hashes, payload):
        keys, data = hashes(2), payload(2)
        result = pages.store([keys[0], keys[1], keys[0]], np.vstack([data, data[:1]]))
        assert result == kvstore.StoreResult(stored=2, present=1)
        into = np.zeros((3, 5000), np.uint8)
        assert pages.load([keys[0], keys[0], keys[1]], into) == 3
        assert np.array_equal(into, np.vstack([data[:1], data]))

    def test_nothing_at_all(self, client, pages):
        assert pages.lookup([]) == kvstore.Lookup(prefix=0, present=(), tiers=())
        assert pages.store([], b"") == pages.store([], []) == kvstore.StoreResult()
        assert pages.load([], bytearray()) == pages.load([], []) == 0
        assert client.lookup([]) == []
        with pages.prepare_store([]) as storing:
            assert storing.complete() == kvstore.StoreResult()
        with pages.prepare_load([]) as loading:
            assert loading.complete() == 0
        assert pages.touch([]) == pages.evict([]) == 0

    def test_a_store_beyond_the_room_says_so(self, make_place, layout, hashes, payload):
        place = make_place(arena=1 << 20, disk_limit=0)
        pages = place.connect().namespace(layout)
        keys, data = hashes(400), payload(400)  # 8 KiB each with padding: three times the arena
        result = pages.store(keys, data)
        assert result.stored + result.present + result.refused == 400
        found = pages.lookup(keys)
        assert place.used_bytes() <= 1 << 20
        assert sum(found.present) <= 128
        assert sum(found.present) == place.counter("stored") - place.counter("evicted")
        into = np.zeros_like(data)
        for place_of_page in np.flatnonzero(found.present):
            assert pages.load([keys[place_of_page]], into[place_of_page]) == 1
            assert np.array_equal(into[place_of_page], data[place_of_page])

    def test_a_page_of_half_of_the_arena(self, client, hashes, payload):
        pages = client.namespace(kvstore.Layout(model="huge", block_size=16, page_bytes=8 << 20))
        data = payload(1, page_bytes=8 << 20)
        assert pages.store(hashes(1), data) == kvstore.StoreResult(stored=1)
        into = np.zeros_like(data)
        assert pages.load(hashes(1), into) == 1
        assert np.array_equal(into, data)

    def test_pages_pushed_out_of_the_arena_come_back_from_disk(self, make_place, layout, hashes, payload):
        place = make_place(arena=1 << 20)
        client = place.connect()
        pages = client.namespace(layout)
        first, data = hashes(20), payload(20)
        pages.store(first, data)
        assert client.flush() in range(21)
        for other in range(1, 8):
            pages.store(hashes(20, name=other * 1000), payload(20, seed=other))
            client.flush()
        assert "disk" in pages.lookup(first).tiers
        into = np.zeros_like(data)
        assert pages.load(first, into) == 20
        assert np.array_equal(into, data)
        moved = pages.statistics()
        assert moved.loaded["disk"] + moved.loaded.get("arena", 0) == 20
        assert (moved.stored, moved.present, moved.refused) == (160, 0, 0)


BAD_BUFFERS = {
    "too short": (lambda: bytearray(14_999), ["14999", "15000"]),
    "too long": (lambda: bytearray(15_001), ["15001", "15000"]),
    "too few": (lambda: [bytearray(5000)] * 2, ["2 pages", "3 hashes"]),
    "too many": (lambda: [bytearray(5000)] * 4, ["4 pages", "3 hashes"]),
    "one too short": (lambda: [bytearray(5000), bytearray(4999), bytearray(5000)], ["page 1", "4999", "5000"]),
    "one too long": (lambda: [bytearray(5000), bytearray(5000), bytearray(5001)], ["page 2", "5001", "5000"]),
    "strided": (lambda: np.zeros(30_000, np.uint8)[::2], ["contiguous"]),
    "transposed": (lambda: np.zeros((5000, 3), np.uint8).T, ["contiguous"]),
    "one strided": (lambda: [bytearray(5000)] * 2 + [np.zeros(10_000, np.uint8)[::2]], ["page 2", "contiguous"]),
    "no buffer": (lambda: 15_000, ["int"]),
    "text": (lambda: "x" * 15_000, ["str"]),
    "nothing": (lambda: None, ["NoneType"]),
    "a list of numbers": (lambda: [1, 2, 3], ["page 0", "int"]),
}


class TestBuffers:
    @pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32, np.float64, np.complex64, ">i4"])
    def test_arrays_of_any_type_and_shape(self, pages, hashes, payload, dtype):
        data = payload(4).view(dtype).reshape(2, 2, -1)
        assert pages.store(hashes(4), data).stored == 4
        into = np.zeros_like(data)
        assert pages.load(hashes(4), into) == 4
        assert into.tobytes() == data.tobytes()

    @pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "mmap", "array", "numpy"])
    def test_anything_with_the_buffer_protocol(self, pages, hashes, payload, kind):
        data = payload(3)

        def make(content: np.ndarray):
            if kind == "mmap":
                region = mmap.mmap(-1, content.nbytes)
                region[:] = content.tobytes()
                return region
            return {
                "bytes": bytes,
                "bytearray": bytearray,
                "memoryview": lambda raw: memoryview(bytearray(raw)),
                "array": lambda raw: array.array("h", raw),
                "numpy": lambda raw: np.frombuffer(raw, np.float32).copy(),
            }[kind](content.tobytes())

        assert pages.store(hashes(3), make(data)).stored == 3
        assert pages.store(hashes(3, name=500), [make(page) for page in data]).stored == 3
        if kind == "bytes":
            return
        whole, each = make(np.zeros_like(data)), tuple(make(np.zeros(5000, np.uint8)) for _ in range(3))
        assert pages.load(hashes(3, name=500), whole) == 3
        assert pages.load(hashes(3), each) == 3
        assert bytes(memoryview(whole)) == data.tobytes()
        assert b"".join(bytes(memoryview(page)) for page in each) == data.tobytes()

    def test_a_sequence_may_mix_kinds(self, pages, hashes, payload):
        data = payload(3)
        assert pages.store(hashes(3), (data[0].tobytes(), data[1], bytearray(data[2]))).stored == 3
        into = [bytearray(5000), np.zeros((50, 100), np.uint8), memoryview(bytearray(5000))]
        assert pages.load(hashes(3), into) == 3
        assert b"".join(bytes(page) for page in into) == data.tobytes()

    @pytest.mark.parametrize("bad", BAD_BUFFERS)
    @pytest.mark.parametrize("method", ["store", "load"])
    def test_buffers_that_cannot_be_right_change_nothing(self, place, pages, hashes, payload, method, bad):
        make, words = BAD_BUFFERS[bad]
        pages.store(hashes(3)[:1], payload(1, seed=9))
        before = place.snapshot()
        with pytest.raises(InvalidRequestError) as caught:
            getattr(pages, method)(hashes(3), make())
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert place.snapshot() == before

    def test_a_read_only_buffer_is_not_loaded_into(self, place, pages, hashes, payload):
        pages.store(hashes(3), payload(3))
        frozen = np.zeros((3, 5000), np.uint8)
        frozen.flags.writeable = False
        before = place.snapshot()
        for into in (bytes(15_000), frozen, [bytearray(5000), bytes(5000), bytearray(5000)]):
            with pytest.raises(InvalidRequestError, match="can't be written"):
                pages.load(hashes(3), into)
        assert not frozen.any()
        assert place.snapshot() == before
        assert pages.store(hashes(3, name=7), frozen).stored == 3, "to store from it is fine"


class TestRefusals:
    @pytest.mark.parametrize("bad", [b"", b"x" * 31, b"x" * 33, "x" * 32, bytearray(32), 7, None])
    @pytest.mark.parametrize("method", ["lookup", "store", "load", "prepare_store", "prepare_load", "touch", "evict"])
    def test_a_hash_of_a_wrong_length(self, place, pages, hashes, payload, method, bad):
        pages.store(hashes(1), payload(1))
        before = place.snapshot()
        arguments = {"store": [payload(2)], "load": [np.zeros((2, 5000), np.uint8)]}.get(method, [])
        with pytest.raises(InvalidRequestError, match="hash 1 must be 32 bytes long") as caught:
            getattr(pages, method)([hashes(1)[0], bad], *arguments)
        if isinstance(bad, bytes):
            assert f"got {len(bad)} bytes" in str(caught.value)
        assert place.snapshot() == before

    def test_a_batch_of_too_many(self, place, pages, hashes):
        limit = pages.batch_pages
        before = place.snapshot()
        for prepare in (pages.prepare_store, pages.prepare_load):
            with pytest.raises(LimitExceededError, match=rf"{limit + 1} pages .* limit is {limit}"):
                prepare(hashes(limit + 1))
        assert place.snapshot() == before

    def test_a_lookup_of_the_most_pages_and_of_one_more(self, client, pages, hashes, payload):
        pages.store(hashes(3), payload(3))
        most = hashes(3) + [b"?" * 32] * (MOST_LOOKUP_PAGES - 3)
        found = pages.lookup(most)
        assert (found.prefix, sum(found.present), len(found.present)) == (3, 3, MOST_LOOKUP_PAGES)
        assert pages.touch(most) == 3
        for call in (pages.lookup, pages.touch, pages.evict, lambda more: client.lookup([(pages, more), (pages, [])])):
            with pytest.raises(LimitExceededError, match=r"131073 .* limit is 131072"):
                call([*most, b"!" * 32])
        assert pages.lookup(hashes(3)).prefix == 3

    @pytest.mark.parametrize("page_bytes", [(8 << 20) + 1, 17 << 20])
    def test_a_page_too_large_for_the_arena(self, client, page_bytes):
        with pytest.raises(LimitExceededError, match=rf"page_bytes is {page_bytes} .*8 MiB"):
            client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=page_bytes))

    def test_a_layout_that_disagrees_with_an_earlier_one(self, place, client, pages, layout, hashes, payload):
        pages.store(hashes(3), payload(3))
        before = place.snapshot()
        with pytest.raises(LayoutMismatchError, match=r"'tiny · block 16 · group 0' .* 5000, not 5001"):
            client.namespace(kvstore.Layout(model="tiny", block_size=16, page_bytes=5001))
        assert place.snapshot() == before
        again = place.connect().namespace(layout)
        assert again.fingerprint == pages.fingerprint
        assert again.lookup(hashes(3)).prefix == 3

    def test_the_longest_names_are_named_in_full(self, client):
        name = "ü" * (MAX_NAME_BYTES // 2)
        names = {"model": name, "revision": name, "dtype": name, "format": name, "tenant": name}
        client.namespace(kvstore.Layout(**names, block_size=16, page_bytes=100))
        with pytest.raises(LayoutMismatchError, match=r"page_bytes 100, not 200"):
            client.namespace(kvstore.Layout(**names, block_size=16, page_bytes=200))

    def test_another_model_is_another_namespace(self, client, pages, hashes, payload):
        pages.store(hashes(3), payload(3))
        other = client.namespace(kvstore.Layout(model="other", block_size=16, page_bytes=5000))
        assert other.lookup(hashes(3)).prefix == 0


@both_kinds
class TestSeveralNamespaces:
    def test_one_lookup_over_several(self, client, pages, hashes, payload):
        groups = [client.namespace(kvstore.Layout(model="g", group=n, block_size=16, page_bytes=64)) for n in range(3)]
        for count, group in enumerate(groups):
            group.store(hashes(count), payload(count, page_bytes=64))
        pages.store(hashes(5), payload(5))
        queries = [(groups[2], hashes(4)), (pages, hashes(6)), (groups[0], hashes(1)), (groups[1], []), (pages, [])]
        found = client.lookup(queries)
        assert [each.prefix for each in found] == [2, 5, 0, 0, 0]
        assert [len(each.present) for each in found] == [4, 6, 1, 0, 0]
        with pytest.raises(InvalidRequestError, match="32 bytes"):
            client.lookup([(pages, hashes(2)), (groups[1], [b"short"])])

    def test_clearing_one_leaves_the_others(self, client, pages, layout, hashes, payload):
        other = client.namespace(kvstore.Layout(model="other", block_size=16, page_bytes=100))
        other.store(hashes(4), payload(4, page_bytes=100))
        pages.store(hashes(3), payload(3))
        assert pages.clear() == 3
        assert [each.prefix for each in client.lookup([(pages, hashes(3)), (other, hashes(4))])] == [0, 4]
        assert pages.clear() == 0, "it is opened again by itself"
        client.namespace(kvstore.Layout(model="tiny", block_size=16, page_bytes=64)).clear()
        assert pages.store(hashes(3), payload(3)).stored == 3
        assert pages.lookup(hashes(3)).prefix == 3

    def test_every_call_opens_a_forgotten_namespace_again(self, place, pages, hashes, payload):
        other = place.connect()
        into = np.zeros((2, 5000), np.uint8)
        calls = {
            "lookup": lambda: pages.lookup(hashes(2)).prefix,
            "load": lambda: pages.load(hashes(2), into),
            "prepare_load": lambda: pages.prepare_load(hashes(2)).complete(),
            "touch": lambda: pages.touch(hashes(2)),
            "evict": lambda: pages.evict(hashes(2)),
            "clear": pages.clear,
            "prepare_store": lambda: pages.prepare_store(hashes(2)).abort() or 0,
            "store": lambda: pages.store(hashes(2), payload(2)).present,
        }
        for name, call in calls.items():
            other.namespace(pages.layout).clear()
            assert call() == 0, name

    @pytest.mark.parametrize("method", ["store", "load"])
    def test_a_namespace_cleared_behind_the_last_batch_of_a_call(self, place, pages, hashes, payload, method):
        count = pages.batch_pages + 1
        keys, data = hashes(count), payload(count)
        into = np.zeros_like(data)
        if method == "load":
            pages.store(keys, data)
        other = place.connect().namespace(pages.layout)
        path = pages._handle.current[1]
        mapped_load = method == "load" and place.url.startswith("unix:") and mapped.CAN_READ
        hooked = "begin_store" if method == "store" else "load_here" if mapped_load else method
        at_once = mapped_load or (method == "load" and path.load_pages(pages._handle.current[0]) >= count)
        original, calls = getattr(path, hooked), []

        def then_cleared(*arguments: object) -> object:
            answer = original(*arguments)
            calls.append(1)
            if len(calls) == 2 - at_once:
                other.clear()
            return answer

        setattr(path, hooked, then_cleared)
        if method == "load":
            assert pages.load(keys, into) == count
            assert np.array_equal(into, data)
        else:
            result = pages.store(keys, data)
            assert result.stored + result.present + result.refused == count
        assert pages.lookup(keys).prefix == 0


@both_kinds
class TestPending:
    def test_written_in_place_and_published_together(self, place, pages, hashes, payload):
        keys, data = hashes(4), payload(4)
        pages.store(keys[1:2], data[1:2])
        with pages.prepare_store(keys) as storing:
            assert [page is None for page in storing.pages] == [False, True, False, False]
            for page, content in zip(storing.pages, data, strict=True):
                if page is not None:
                    assert (page.dtype, page.shape) == (np.uint8, (5000,))
                    page[:] = content
            assert pages.lookup(keys).present == (False, True, False, False), "nobody finds what is being written"
            assert storing.complete() == kvstore.StoreResult(stored=3, present=1)
        assert pages.lookup(keys).prefix == 4
        with pages.prepare_load([*keys, b"?" * 32]) as loading:
            assert [page.tobytes() for page in loading.pages] == [page.tobytes() for page in data]
            assert loading.tiers == ["arena"] * 4
            for page in loading.pages:
                with pytest.raises(ValueError, match="read-only"):
                    page[0] = 1
            assert loading.complete() == 4
        assert place.used_bytes() == 4 * 8192

    @pytest.mark.parametrize("way", ["abort", "leave", "raise"])
    def test_given_up_pages_are_nowhere_and_their_room_is_free(self, place, pages, hashes, way):
        storing = pages.prepare_store(hashes(4))
        assert place.used_bytes() == 4 * 8192
        if way == "abort":
            storing.abort()
            storing.abort()
        elif way == "leave":
            with storing:
                pass
        else:
            with pytest.raises(ZeroDivisionError), storing:
                raise ZeroDivisionError
        assert place.used_bytes() == 0
        assert pages.lookup(hashes(4)).prefix == 0
        with pytest.raises(RuntimeError, match="completed already"):
            storing.complete()

    def test_completed_once(self, pages, hashes):
        storing = pages.prepare_store(hashes(2))
        assert storing.complete().stored == 2
        with pytest.raises(RuntimeError, match="completed already"):
            storing.complete()
        loading = pages.prepare_load(hashes(2))
        assert loading.complete() == 2
        assert loading.complete() == 0

    def test_a_store_past_its_deadline_cannot_be_published(self, place, layout, hashes, eventually, pass_deadlines):
        client = place.connect()
        pages = client.namespace(layout)
        storing = pages.prepare_store(hashes(4))
        pass_deadlines(place.store)
        eventually(lambda: place.counter("lapsed") == 4)
        assert storing.complete() == kvstore.StoreResult(refused=4)
        assert place.connect().namespace(layout).lookup(hashes(4)).prefix == 0
        assert place.used_bytes() == 0
        assert pages.statistics().refused == 4

    def test_a_hold_past_its_deadline_counts_as_missed(
        self, place, layout, hashes, payload, eventually, pass_deadlines
    ):
        client = place.connect()
        pages = client.namespace(layout)
        pages.store(hashes(4), payload(4))
        loading = pages.prepare_load(hashes(4))
        pass_deadlines(place.store)
        eventually(lambda: not place.store._state.leases.loads)
        # Over streams the pages are this process's own copies, whole and verified.
        expected = 4 if place.url.startswith("kv:") else 0
        assert loading.complete() == expected
        assert pages.statistics().loaded.get("arena", 0) == expected

    def test_held_pages_stay_as_they_are(self, make_place, layout, hashes, payload):
        place = make_place(arena=1 << 20, disk_limit=0)
        pages = place.connect().namespace(layout)
        data = payload(8)
        pages.store(hashes(8), data)
        with pages.prepare_load(hashes(8)) as loading:
            pages.evict(hashes(8)[:4])
            for other in range(1, 10):  # far more than the arena holds
                pages.store(hashes(30, name=1000 * other), payload(30, seed=other))
            assert [page.tobytes() for page in loading.pages] == [page.tobytes() for page in data]
            assert loading.complete() == 8

    def test_the_later_of_two_writers_of_one_page_finds_it_present(self, place, layout, pages, hashes, payload):
        others = place.connect().namespace(layout)
        first, second = pages.prepare_store(hashes(2)), others.prepare_store(hashes(2))
        for storing, seed in ((first, 1), (second, 2)):
            for page, content in zip(storing.pages, payload(2, seed=seed), strict=True):
                page[:] = content
        assert second.complete() == kvstore.StoreResult(stored=2)
        assert first.complete() == kvstore.StoreResult(present=2)
        into = np.zeros((2, 5000), np.uint8)
        assert pages.load(hashes(2), into) == 2
        assert np.array_equal(into, payload(2, seed=2))
        assert place.used_bytes() == 2 * 8192, "one copy is kept"


@both_kinds
class TestKeeping:
    def test_evict_and_touch_count_what_is_here(self, place, pages, hashes, payload):
        pages.store(hashes(4), payload(4))
        assert pages.touch(hashes(6)) == 4
        assert pages.evict(hashes(6)[2:]) == 2
        assert pages.lookup(hashes(6)).present == (True, True, False, False, False, False)
        assert pages.touch(hashes(6)) == 2
        assert place.used_bytes() == 2 * 8192

    def test_flushed_pages_are_on_disk(self, place, client, pages, hashes, payload):
        pages.store(hashes(4), payload(4))
        assert client.flush() <= 4
        assert client.status().tier("disk").pages == 4
        assert client.status().tier("arena").counters["dirty"] == 0
        assert client.flush() == 0

    def test_status_tells_what_happened(self, place, client, pages, hashes, payload, eventually):
        pages.store(hashes(4), payload(4))
        pages.load(hashes(6), np.zeros((6, 5000), np.uint8))
        # Of a miss without a call the node is told a moment later.
        eventually(lambda: client.status().tier("arena").counters["asked"] == 6)
        status = client.status()
        arena = status.tier("arena")
        assert (arena.used_bytes, arena.limit_bytes, arena.pages) == (4 * 8192, 16 << 20, 4)
        counters = {name: arena.counters[name] for name in ("stored", "asked", "hit", "missed", "refused", "evicted")}
        assert counters == {"stored": 4, "asked": 6, "hit": 4, "missed": 2, "refused": 0, "evicted": 0}
        assert [(each.name, each.page_bytes, each.arena_pages) for each in status.namespaces] == [
            ("tiny · block 16 · group 0", 5000, 4)
        ]
        assert status.arena_directory == str(place.store.arena.directory)
        assert status.instance == client.status().instance
        with pytest.raises(KeyError):
            status.tier("redis")

    def test_the_arena_of_this_host_can_be_registered(self, place, client, pages, hashes, payload):
        if place.url.startswith("kv:"):
            assert client.arena is None
            assert client.arena_units is None
            return
        data = payload(1)
        pages.store(hashes(1), data)
        assert client.arena.nbytes == 16 << 20
        assert client.arena_units.shape == (64, 256 << 10)
        assert client.arena_units.ctypes.data == client.arena.ctypes.data
        with pages.prepare_load(hashes(1)) as loading:
            assert np.shares_memory(client.arena, loading.pages[0])


@both_kinds
class TestClosing:
    def test_a_closed_client_says_so(self, place, client, pages, hashes, payload):
        pages.store(hashes(2), payload(2))
        client.close()
        client.close()
        into = np.zeros((2, 5000), np.uint8)
        calls = {
            "namespace": lambda: client.namespace(pages.layout),
            "client.lookup": lambda: client.lookup([(pages, hashes(2))]),
            "flush": client.flush,
            "status": client.status,
            "lookup": lambda: pages.lookup(hashes(2)),
            "store": lambda: pages.store(hashes(2), payload(2)),
            "load": lambda: pages.load(hashes(2), into),
            "prepare_store": lambda: pages.prepare_store(hashes(2)),
            "prepare_load": lambda: pages.prepare_load(hashes(2)),
            "touch": lambda: pages.touch(hashes(2)),
            "evict": lambda: pages.evict(hashes(2)),
            "clear": pages.clear,
        }
        for name, call in calls.items():
            with pytest.raises(UnavailableError) as caught:
                call()
            assert "closed" in str(caught.value), f"{name}: {caught.value}"
        assert not into.any()

    def test_a_client_that_was_never_used_closes(self, place):
        place.connect().close()

    def test_context_managers_all_the_way(self, place, layout, hashes, payload):
        with place.connect() as client:
            pages = client.namespace(layout)
            with pages.prepare_store(hashes(1)) as storing:
                storing.pages[0][:] = payload(1)[0]
                storing.complete()
            with pages.prepare_load(hashes(1)) as loading:
                assert loading.complete() == 1
        with pytest.raises(UnavailableError):
            pages.lookup(hashes(1))

    def test_what_is_pending_at_closing_keeps_its_slots_until_it_ends(self, place, client, pages, hashes, eventually):
        storing = pages.prepare_store(hashes(2))
        mine = storing.pages
        client.close()
        assert place.used_bytes() == 2 * 8192
        for page in mine:
            page[:] = 7  # nobody else has this memory yet
        if place.url.startswith("embedded:"):
            assert storing.complete().stored == 2
            with pytest.raises(UnavailableError):
                client.status()
        else:
            with pytest.raises(UnavailableError):
                storing.complete()
            if place.url.startswith("unix:"):  # over streams the reservation lapses by itself
                eventually(lambda: place.used_bytes() == 0)


@both_kinds
class TestThreads:
    def test_many_threads_on_one_client(self, place, pages, hashes, payload):
        keys, data = hashes(64), payload(64)
        start = threading.Barrier(8)

        def work(number: int) -> int:
            start.wait(60)
            chosen = np.random.default_rng(number)
            stored = 0
            for _ in range(30):
                first = int(chosen.integers(0, 60))
                part = slice(first, first + 4)
                result = pages.store(keys[part], data[part])
                assert result.stored + result.present == 4
                stored += result.stored
                assert pages.lookup(keys[part]).prefix == 4
                into = np.zeros((4, 5000), np.uint8)
                assert pages.load(keys[part], into) == 4
                assert np.array_equal(into, data[part])
            return stored

        with ThreadPoolExecutor(8) as pool:
            stored = sum(pool.map(work, range(8)))
        assert stored == sum(pages.lookup(keys).present), "each page was stored by one of them"
        moved = pages.statistics()
        assert moved.stored == stored
        assert moved.stored + moved.present == moved.loaded["arena"] == 8 * 30 * 4
        assert place.used_bytes() == stored * 8192

    def test_threads_that_store_clear_and_evict(self, place, pages, hashes, payload):
        keys, data = hashes(16), payload(16)

        def store(number: int) -> None:
            for _ in range(40):
                result = pages.store(keys, data)
                assert result.stored + result.present + result.refused == 16

        def load(number: int) -> None:
            into = np.zeros_like(data)
            for _ in range(40):
                loaded = pages.load(keys, into)
                assert np.array_equal(into[:loaded], data[:loaded])

        def drop(number: int) -> None:
            for turn in range(20):
                pages.evict(keys[turn % 16 :])
                if turn % 5 == 0:
                    pages.clear()

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(work, 0) for work in (store, load, drop, store, load, drop)]:
                done.result()
        place.check_integrity()
        pages.clear()
        assert place.used_bytes() == 0


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 86_401])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises(InvalidRequestError, match=f"86400 seconds, got {timeout}"):
        kvstore.connect("kv://localhost:1", timeout=timeout)
