"""What the ring remembers, for whom, and how it says that something was lost."""

from __future__ import annotations

import threading

from kvstore.events.ring import EVENT_PAGES, Change, EventRing, PageEvent, chains, removals

A, B = b"a" * 32, b"b" * 32
PATIENCE = 60.0


def h(number: int) -> bytes:
    return number.to_bytes(32, "big")


def page(number: int, parent: int | None = None, namespace: bytes = A) -> tuple[bytes, bytes]:
    return namespace + h(number), b"" if parent is None else namespace + h(parent)


def test_pages_behind_each_other_are_one_event():
    pages = [page(1), page(2, 1), page(3, 2), page(7, 5), page(8, 7), page(9), page(9, None, B)]
    assert chains("arena", pages) == [
        PageEvent(Change.STORED, "arena", A, (h(1), h(2), h(3)), b""),
        PageEvent(Change.STORED, "arena", A, (h(7), h(8)), h(5)),
        PageEvent(Change.STORED, "arena", A, (h(9),), b""),
        PageEvent(Change.STORED, "arena", B, (h(9),), b""),
    ]


def test_no_event_has_more_pages_than_it_may():
    pages = [page(number, number - 1) for number in range(1, EVENT_PAGES + 2)]
    whole, rest = chains("arena", pages)
    assert len(whole.hashes) == EVENT_PAGES
    assert (rest.parent, rest.hashes) == (h(EVENT_PAGES), (h(EVENT_PAGES + 1),))
    gone = removals("disk", [key for key, _ in pages])
    assert [len(event.hashes) for event in gone] == [EVENT_PAGES, 1]


def test_nothing_is_remembered_while_nobody_reads():
    ring = EventRing()
    ring.removed("arena", [A + h(1)])
    reader = ring.reader()
    assert reader.read(10, 0.0) == ([], 0)
    ring.removed("arena", [A + h(2)])
    reader.close()
    assert not ring.wanted and not ring._events
    ring.removed("arena", [A + h(3)])
    assert not ring._events


def test_each_reader_has_all_events_in_order_and_as_many_at_once_as_it_asks_for():
    ring = EventRing()
    first, second = ring.reader(), ring.reader()
    for number in range(4):
        ring.removed("arena", [A + h(number), A + h(100 + number)])
    assert [event.hashes[0] for event in first.read(5, 0.0)[0]] == [h(0), h(1)]
    assert [event.hashes[0] for event in first.read(1, 0.0)[0]] == [h(2)], "at least one"
    assert [event.hashes[0] for event in second.read(100, 0.0)[0]] == [h(0), h(1), h(2), h(3)]
    assert [event.hashes[0] for event in first.read(100, 0.0)[0]] == [h(3)]


def test_a_slow_reader_is_told_how_much_it_missed_and_the_ring_does_not_grow():
    ring = EventRing(most_pages=8)
    slow, fast = ring.reader(), ring.reader()
    for number in range(100):
        ring.removed("arena", [A + h(number)])
        assert len(fast.read(8, 0.0)[0]) == 1
        assert len(ring._events) <= 8
    assert slow.read(8, 0.0) == ([], 92)
    slow.restart()
    assert slow.read(8, 0.0) == ([], 0)
    ring.removed("arena", [A + h(100)])
    assert slow.read(8, 0.0)[0][0].hashes == (h(100),)


def test_a_reader_that_waits_is_woken():
    ring = EventRing()
    reader = ring.reader()
    read: list[PageEvent] = []
    thread = threading.Thread(target=lambda: read.extend(reader.read(8, PATIENCE)[0]))
    thread.start()
    ring.removed("arena", [A + h(1)])
    thread.join(PATIENCE)
    assert [event.hashes for event in read] == [(h(1),)]
