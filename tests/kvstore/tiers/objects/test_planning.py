"""What the object tier decides without I/O."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.segments import record
from kvstore.segments.segment import Entry
from kvstore.tiers.objects import catalog, names
from kvstore.tiers.objects.budget import DayBudget
from kvstore.tiers.objects.index_object import IndexContent, decode_index, encode_index, folded, in_parts, index_bytes
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import encode_pack, pack_bytes
from kvstore.tiers.objects.planning import (
    MOST_GAP,
    MOST_RANGE,
    Extent,
    PackUse,
    adoption_delay,
    in_chains,
    order_of_leaving,
    own_share,
    pack_bytes_for,
    plan_packs,
    plan_ranges,
    to_fold,
)
from kvstore.tiers.objects.uses import Uses, decode_uses, encode_uses

LENGTHS = st.lists(st.integers(1, 3 << 20), min_size=1, max_size=40)


def an_index(pages: int = 3) -> IndexContent:
    name = PackName(bytes(16), 7)
    payload = np.arange(100, dtype=np.uint8)
    entries = [Entry(n.to_bytes(64, "big"), n, payload) for n in range(pages)]
    pack, records, _ = encode_pack(name, entries, None)
    return IndexContent([(pack, records)], [PackName(bytes(16), 8)], [(bytes(64), name)])


@given(LENGTHS)
def test_packs_hold_neighbours_and_are_no_larger_than_asked_unless_one_page_is(lengths: list[int]) -> None:
    packs = plan_packs(lengths, 4 << 20, 0)
    assert [at for pack in packs for at in pack] == list(range(len(lengths)))
    for pack in packs:
        size = pack_bytes([lengths[at] for at in pack])
        assert size <= 4 << 20 or len(pack) == 1


@given(st.lists(st.tuples(st.integers(0, 3 << 20), st.integers(1, 3 << 20)), min_size=1, max_size=40))
def test_ranges_read_each_page_once_over_small_gaps_alone(gaps: list[tuple[int, int]]) -> None:
    extents, at = [], 0
    for gap, length in gaps:
        extents.append(Extent(at + gap, length))
        at = extents[-1].end
    runs = plan_ranges(extents)
    assert [place for run in runs for place in run] == list(range(len(extents)))
    for run in runs:
        assert extents[run[-1]].end - extents[run[0]].offset <= MOST_RANGE or len(run) == 1
        assert all(extents[b].offset - extents[b - 1].end <= MOST_GAP for b in run[1:])


@given(st.lists(st.integers(0, 15), max_size=12), st.randoms(use_true_random=False))
def test_chains_are_put_together_and_nobody_is_lost(parents: list[int], dice: object) -> None:
    keys = [bytes([n]) for n in range(len(parents))]
    order = in_chains(keys, [bytes([parent]) for parent in parents])
    assert sorted(order) == list(range(len(keys)))


def test_a_head_comes_before_its_tail_and_chains_do_not_mix() -> None:
    keys = [b"a2", b"b1", b"a1", b"b2", b"a3"]
    parents = [b"a1", b"", b"", b"b1", b"a2"]
    assert [keys[at] for at in in_chains(keys, parents)] == [b"b1", b"b2", b"a1", b"a2", b"a3"]


def test_packs_leave_that_are_wanted_least() -> None:
    packs = [
        PackUse(1, 100, 90, 50, 5.0),
        PackUse(2, 100, 90, 0, 9.0),
        PackUse(3, 100, 0, 0, 9.9),
        PackUse(4, 100, 90, 0, 1.0),
    ]
    assert order_of_leaving(packs) == [3, 4, 2, 1]


@pytest.mark.parametrize(
    ("others", "writers", "share"), [(0, 1, 100), (50, 2, 100), (150, 2, 100), (180, 4, 50), (500, 4, 50)]
)
def test_a_share_of_the_limit_of_all(others: int, writers: int, share: int) -> None:
    assert own_share(100, 200, others, writers) == share
    assert own_share(100, 0, others, writers) == 100


def test_one_of_all_adopts_first_and_who_has_no_room_waits() -> None:
    dead, writers = secrets.token_bytes(16), [secrets.token_bytes(16) for _ in range(5)]
    delays = {adoption_delay(dead, me, writers, 600.0, closed=False, room=True) for me in writers}
    assert sorted(delays) == [600.0, 660.0, 720.0, 780.0, 840.0]
    assert adoption_delay(dead, writers[0], [], 600.0, closed=True, room=True) == 0.0
    assert adoption_delay(dead, writers[0], [], 600.0, closed=False, room=False) == 2400.0


def test_sixteen_index_objects_of_a_size_are_written_anew_as_one() -> None:
    assert to_fold([1000] * 15) == []
    assert to_fold([1000] * 15 + [100_000]) == []
    assert to_fold([100_000] + [1000] * 16) == list(range(1, 17))


@pytest.mark.parametrize(
    ("limit", "size"), [(16 << 20, 2 << 20), (1 << 30, 16 << 20), (2 << 30, 32 << 20), (1 << 40, 64 << 20)]
)
def test_sizes_of_packs(limit: int, size: int) -> None:
    assert pack_bytes_for(limit) == size


def test_an_index_object_says_what_it_was_told() -> None:
    content = an_index()
    data = encode_index(content)
    assert len(data) == index_bytes([3], 1, 1)
    found = decode_index(data)
    assert found is not None
    assert found.packs[0][0] == content.packs[0][0]
    assert found.packs[0][1].tobytes() == content.packs[0][1].tobytes()
    assert (found.gone, found.removed) == (content.gone, content.removed)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damage_of_any_byte_is_seen(at: int, change: int) -> None:
    for data, decode in (
        (encode_index(an_index()), decode_index),
        (encode_uses(Uses(frozenset([bytes(32)]), {PackName(bytes(16), 1): [1]})), decode_uses),
    ):
        damaged = bytearray(data)
        damaged[at % len(data)] ^= change
        assert decode(bytes(damaged)) is None
        assert decode(data[: at % len(data)]) is None


def test_records_that_lie_outside_their_pack_are_none() -> None:
    content = an_index()
    pack, records = content.packs[0]
    for field, value in (
        ("offset", pack.size),
        ("offset", 4097),
        ("offset", 0),
        ("length", 0),
        ("length", pack.size),
        ("codec", 9),
    ):
        wrong = records.copy()
        wrong[field][1] = value
        found = decode_index(encode_index(IndexContent([(pack, wrong)])))
        assert found is not None
        assert found.packs == []


def test_much_is_told_in_parts_that_are_small_enough() -> None:
    packs = [an_index(3).packs[0] for _ in range(20)]
    gone = [PackName(bytes(16), n) for n in range(50)]
    removed = [(bytes(63) + bytes([n]), PackName(bytes(16), n)) for n in range(50)]
    parts = list(in_parts(IndexContent(packs, gone, removed), 1000))
    assert len(parts) > 10
    assert all(len(encode_index(part)) <= 1000 + index_bytes([]) for part in parts)
    again = IndexContent()
    for part in parts:
        again.add(part)
    assert (again.gone, again.removed, len(again.packs)) == (gone, removed, 20)
    assert list(in_parts(IndexContent())) == [IndexContent()]


def test_folding_drops_what_is_gone() -> None:
    content = an_index()
    name = content.packs[0][0].name
    assert folded([content, content], [name], [name], []).packs[0][0].name == name
    assert len(folded([content, content], [name], [name], []).packs) == 1
    assert not folded([content], [], [], [])
    assert folded([content], [], [name], []).removed == content.removed


def test_folding_keeps_what_is_gone_since_lately() -> None:
    gone = [PackName(bytes(16), n) for n in range(3)]
    assert folded([IndexContent(gone=gone)], [], [], gone[1:]).gone == gone[1:]


def test_what_left_a_pack_is_told_of_before_the_pack_is_told_to_be_gone() -> None:
    packs = [an_index(3).packs[0] for _ in range(4)]
    parts = list(in_parts(IndexContent(packs, [PackName(bytes(16), 1)]), 100))
    assert [bool(part.packs) for part in parts] == [True] * 4 + [False]
    assert parts[-1].gone


def test_uses_are_told() -> None:
    uses = Uses(frozenset([bytes([1]) * 32]), {PackName(bytes(16), 1): [3, 5], PackName(bytes(16), 2): [9]})
    found = decode_uses(encode_uses(uses))
    assert found is not None
    assert (found.namespaces, dict(found.packs)) == (uses.namespaces, dict(uses.packs))


def test_names_are_read_back() -> None:
    writer = names.new_writer()
    pack = names.new_pack(writer)
    assert names.parse_pack(pack.path) == pack
    path = names.new_index_path(writer, 12)
    assert names.parse_index(path) == (writer, 12)
    assert names.new_index_path(writer, 12) < names.behind_index(writer, 12) < names.new_index_path(writer, 13)
    assert names.parse_heartbeat(names.heartbeat_path(writer, closed=True)) == (writer, True)
    assert names.parse_heartbeat("writers/../x") is None


def test_a_days_bytes_begin_anew_with_the_day() -> None:
    now = [86_400.0 * 100]
    budget = DayBudget(100, lambda: now[0])
    assert budget.take(60)
    assert not budget.take(60)
    assert budget.spent_since == now[0]
    now[0] += 86_400
    assert budget.spent_since == 0.0
    assert budget.take(60)


def test_a_pack_is_a_sealed_segment() -> None:
    name = PackName(bytes(16), 7)
    payloads = [np.full(n, n % 251, np.uint8) for n in (1, 4096, 5000)]
    entries = [Entry(n.to_bytes(64, "big"), n, payload) for n, payload in enumerate(payloads)]
    pack, records, body = encode_pack(name, entries, None)
    assert len(body) == pack.size == pack_bytes([1, 4096, 5000])
    header = record.decode_segment_header(bytes(body[: record.BLOCK]))
    trailer = record.decode_trailer(bytes(body[-record.BLOCK :]))
    assert header is not None
    assert trailer is not None
    assert (header.id, trailer.segment, trailer.records) == (7, 7, 3)
    for payload, offset in zip(payloads, records["offset"].tolist(), strict=True):
        assert body[offset : offset + len(payload)] == payload.tobytes()


def test_others_have_their_turn_while_many_pages_are_learnt_or_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "KEYS_AT_ONCE", 2)
    known = catalog.ObjectCatalog(1 << 30, 1000)
    held = CountedLock()
    monkeypatch.setattr(known, "_lock", held)
    first, second = an_index(3).packs[0], an_index(3).packs[0]
    packs = [(pack._replace(name=PackName(bytes(16), n)), records) for n, (pack, records) in enumerate((first, second))]
    keys = [bytes(each) for each in first[1]["key"]]
    known.learn(IndexContent(packs), lambda pack: True)
    assert held.count == 2
    assert known.remove(keys) == 3
    assert held.count == 4
    known.learn(IndexContent([], [], [(key, packs[0][0].name) for key in keys]), lambda pack: True)
    assert held.count == 6


class CountedLock:
    """Counts how often it was taken."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        pass
