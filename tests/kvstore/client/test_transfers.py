"""One call that takes several batches is still one prefix, and one truth."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvstore
from kvstore.client.paths.shm.path import ShmPath
from kvstore.errors import DeadlineError, NotAttachedError, UnavailableError, UnknownNamespaceError
from kvstore.store.results import Published
from kvstore.wire.messages import split_hashes

PAGE_BYTES = 64 << 10


@pytest.fixture
def small(make_place):
    """An arena of 64 pages without a disk tier: batches of 16."""
    return make_place(arena=4 << 20, disk_limit=0)


@pytest.fixture
def pages(small, layout):
    return small.connect().namespace(layout.__class__(model="b", block_size=16, page_bytes=PAGE_BYTES))


def test_what_left_again_for_the_same_call_is_not_called_stored(pages, hashes, payload):
    asked = hashes(150)
    data = payload(150, page_bytes=PAGE_BYTES)
    result = pages.store(asked, data)
    present = pages.lookup(asked).present
    assert result.stored == sum(present)
    assert (result.present, result.stored + result.refused) == (0, 150)
    assert present[-16:] == (True,) * 16, "the newest pages are kept"
    into = np.zeros((16, PAGE_BYTES), np.uint8)
    assert pages.load(asked[-16:], into) == 16
    assert np.array_equal(into, data[-16:])
    again = pages.store(asked, data)
    assert again.stored + again.present + again.refused == 150
    assert again.stored + again.present == sum(pages.lookup(asked).present)


def test_a_long_prefix_leaves_from_its_tail(pages, hashes, payload):
    assert pages.batch_pages < 20
    whole, foreign = hashes(40), hashes(44, name=7)
    pages.store(whole, payload(40, page_bytes=PAGE_BYTES))
    pages.store(foreign, payload(44, seed=1, page_bytes=PAGE_BYTES))
    left = pages.lookup(whole)
    assert 0 < left.prefix == sum(left.present) < 40, "what is left is the head"


def test_a_long_prefix_that_was_loaded_leaves_from_its_tail(pages, hashes, payload):
    whole, foreign = hashes(40), hashes(44, name=7)
    for start in (32, 16, 0):  # the head is the oldest
        pages.store(whole[start : start + 16], payload(min(16, 40 - start), page_bytes=PAGE_BYTES))
    pages.evict(whole[32:])
    pages.store(whole[32:], payload(8, page_bytes=PAGE_BYTES))
    assert pages.load(whole, np.empty((40, PAGE_BYTES), np.uint8)) == 40
    pages.store(foreign, payload(44, seed=1, page_bytes=PAGE_BYTES))
    left = pages.lookup(whole)
    assert 0 < left.prefix == sum(left.present) < 40


def test_all_calls_of_one_store_share_its_deadline(pages, hashes, payload, monkeypatch):
    control = pages._handle.session.control
    given = []

    def recording(call):
        def recorded(*arguments):
            given.append((call.__name__, arguments[-1]))
            return call(*arguments)

        return recorded

    for name in ("touch", "lookup"):
        monkeypatch.setattr(control, name, recording(getattr(control, name)))
    pages.store(hashes(150), payload(150, page_bytes=PAGE_BYTES))
    assert [name for name, _ in given] == ["touch", "lookup"]
    assert given[0][1] >= given[1][1], "the lookup has what the touch has left of the time"


class TestBatchesUnderWay:
    """One batch is copied while the one before it is published."""

    @pytest.fixture
    def near(self, start_node):
        node = start_node(arena=16 << 20, disk_limit=0)
        with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
            yield node, client

    def test_a_prefix_of_many_batches_is_stored_head_first(self, near, hashes, payload, monkeypatch):
        node, client = near
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE_BYTES))
        published: list[bytes] = []
        publish = node.store._state.residency.publish

        def note(slots, *rest):
            published.extend(map(node.store._state.slots.block_hash, slots))
            return publish(slots, *rest)

        monkeypatch.setattr(node.store._state.residency, "publish", note)
        count = 3 * pages.batch_pages + 1
        assert pages.store(hashes(count), payload(count, page_bytes=PAGE_BYTES)) == kvstore.StoreResult(stored=count)
        assert published == hashes(count), "a page comes behind the page before it"
        into = np.zeros((count, PAGE_BYTES), np.uint8)
        assert pages.load(hashes(count), into) == count
        assert np.array_equal(into.reshape(-1), payload(count, page_bytes=PAGE_BYTES).reshape(-1))

    def test_that_all_are_here_is_seen_without_a_call_and_told_later(
        self, near, hashes, payload, monkeypatch, eventually
    ):
        node, client = near
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE_BYTES))
        count = 2 * pages.batch_pages
        told: list[list[bytes]] = []
        note_use = node.store.note_use

        def note(fingerprint, named, **how):
            told.append(list(named))
            return note_use(fingerprint, named, **how)

        monkeypatch.setattr(node.store, "note_use", note)
        for name in ("touch", "lookup"):
            monkeypatch.delattr(type(client._session.control), name)
        assert pages.store(hashes(count), payload(count, page_bytes=PAGE_BYTES)) == kvstore.StoreResult(stored=count)
        eventually(lambda: told == [hashes(count)])

    def test_more_pages_than_a_call_takes_along_are_told_by_a_call(self, near, hashes, monkeypatch):
        _, client = near
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=4096))
        told: list[int] = []
        touch = client._session.control.touch

        def note(fingerprint, named, timeout):
            told.append(len(named))
            return touch(fingerprint, named, timeout)

        monkeypatch.setattr(client._session.control, "touch", note)
        for count, name in ((1024, 0), (1025, 1)):
            assert pages.batch_pages < count
            data = np.zeros((count, 4096), np.uint8)
            assert pages.store(hashes(count, name), data) == kvstore.StoreResult(stored=count)
        assert told == [1025]

    def test_a_batch_that_the_node_forgot_is_stored_anew(self, near, hashes, payload, monkeypatch):
        """As if the node had come back, or the namespace been cleared, behind the copies of the first two batches."""
        node, client = near
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE_BYTES))
        count = 2 * pages.batch_pages
        left = [NotAttachedError("it came back"), UnknownNamespaceError("it was cleared")]
        result_of = ShmPath._result_of

        def forget(self, connection, reservation, deadline):
            result = result_of(self, connection, reservation, deadline)
            if not left:
                return result
            node.store.evict(pages.fingerprint, split_hashes(reservation.transfer.hashes))
            raise left.pop()

        monkeypatch.setattr(ShmPath, "_result_of", forget)
        assert pages.store(hashes(count), payload(count, page_bytes=PAGE_BYTES)) == kvstore.StoreResult(stored=count)
        assert pages.lookup(hashes(count)).prefix == count

    @pytest.mark.parametrize("lost", [0, 1, 2])
    def test_what_is_not_confirmed_is_refused(self, near, hashes, payload, monkeypatch, lost):
        _, client = near
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE_BYTES))
        batch = pages.batch_pages
        result_of = ShmPath._result_of
        finished = []

        def lose(self, *arguments):
            finished.append(None)
            result = result_of(self, *arguments)
            if len(finished) == lost + 1:
                raise UnavailableError("gone")
            return result

        monkeypatch.setattr(ShmPath, "_result_of", lose)
        result = pages.store(hashes(3 * batch), payload(3 * batch, page_bytes=PAGE_BYTES))
        assert (result.stored + result.present + result.refused, result.refused >= batch) == (3 * batch, True)
        assert pages.lookup(hashes(3 * batch)).present.count(True) >= result.stored

    def test_a_publication_that_hangs_is_waited_for_until_the_deadline(self, start_node, hashes, payload, monkeypatch):
        node = start_node(arena=16 << 20, disk_limit=0)
        goes_on = threading.Event()

        def hang(*arguments, **options):
            goes_on.wait(60.0)
            return Published(0, 0, 0)

        with kvstore.connect(f"unix://{node.config.socket}") as client:
            pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE_BYTES))
            count = 2 * pages.batch_pages
            monkeypatch.setattr(node.store, "complete_ahead", hang)
            monkeypatch.setattr(node.store, "complete_store", hang)
            client.timeout = 1.0
            with pytest.raises(DeadlineError):
                pages.store(hashes(count), payload(count, page_bytes=PAGE_BYTES))
            assert not goes_on.is_set()
            goes_on.set()
