"""The table from keys to slots, against a dict; and the queue of slots, against a list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.catalog.dirty_queue import DirtyQueue
from kvstore.catalog.key_table import KeyTable
from kvstore.catalog.slot_state import Event, SlotState
from kvstore.catalog.slot_table import SlotTable

KEYS = 300
"""More than the table has places in the beginning, so that it grows."""


def key(number: int) -> bytes:
    """Of three namespaces; each block hash is there in all of them."""
    return (number % 3).to_bytes(32, "big") + (number // 3).to_bytes(32, "little")


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, KEYS - 1), st.integers(1, 250), st.integers(1, 7)),
    max_size=12,
)


@settings(deadline=None)
@given(STEPS, st.sampled_from([0, 2, 6, 32]), st.booleans(), st.booleans())
def test_keys_come_and_go(steps: list[tuple[str, int, int, int]], bits: int, wrap: bool, halves: bool) -> None:
    """With few hashes, so that most of them collide, or Python's own; beginning at the end of the table, or not; the
    same for a block in all namespaces, or not.
    """
    mask, top = (1 << bits) - 1, 0xFFFFFFFF if wrap else 0

    def few(page: bytes) -> int:
        return (hash(page[-32:] if halves else page) & mask) ^ top

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "kvstore.catalog.slot_table.hash_of",
            "kvstore.catalog.key_table.hash_of",
            "kvstore.catalog.key_table.hash",
        ):
            patch.setattr(name, few, raising=False)
        slots = SlotTable()
        table = KeyTable(slots)
        there: dict[bytes, int] = {}
        for what, first, count, step in steps:
            pages = [key(number) for number in range(first, min(first + count * step, KEYS), step)]
            if what == "add":
                added = [slots.add(0, page, 1 + page[31], 1, 0, SlotState.RESIDENT) for page in pages]
                assert table.add_all(added) == [page not in there for page in pages]
                gone = [slot for page, slot in zip(pages, added, strict=True) if page in there]
                for page, slot in zip(pages, added, strict=True):
                    there.setdefault(page, slot)
            else:
                gone = [there.pop(page) for page in pages if page in there]
                table.remove_all(gone)
            for slot in gone:
                slots.state[slot] = SlotState.FREE
            slots.remove_all(gone)
        for namespace in range(3):
            wanted = [key(number) for number in range(namespace, KEYS + 30, 3)]
            assert table.find_all(wanted).tolist() == [there.get(page, -1) for page in wanted]
        mixed = [key(number) for number in range(0, KEYS + 30, 7)]
        assert table.find_all(mixed).tolist() == [there.get(page, -1) for page in mixed]
        assert [table.find(page) for page in mixed] == [there.get(page) for page in mixed]
        assert len(table) == len(there)
        assert sorted(table.all()) == sorted(there.values())
        slots.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["append", "remove", "again", "end turn"]), st.integers(0, 12))))
def test_a_queue_is_a_list_for_each_in_turns(steps: list[tuple[str, int]]) -> None:
    queue, model = DirtyQueue(), dict[int, list[int]]()
    for what, slot in steps:
        namespace = slot % 3
        mine = model.get(namespace, [])
        if what == "end turn":
            queue.end_turn(namespace)
            if mine:
                model[namespace] = model.pop(namespace)
        elif what == "append" and slot not in mine:
            queue.append(slot, namespace)
            model.setdefault(namespace, []).append(slot)
        elif what != "append" and slot in mine:
            queue.remove(slot, namespace)
            mine.remove(slot)
            if not mine:
                del model[namespace]
            if what == "again":
                queue.append(slot, namespace)
                model.setdefault(namespace, []).append(slot)
        expected = [each for some in model.values() for each in some]
        assert list(queue) == list(queue.copy()) == expected
        assert (len(queue), queue.namespaces) == (len(expected), len(model))
        assert [each in queue for each in range(14)] == [each in expected for each in range(14)]


def test_a_slot_is_told_from_the_next_one_of_its_number() -> None:
    slots = SlotTable()
    slot = slots.add(7, key(0), 1, 4097, 3, SlotState.FREE, parent=key(9))
    slots.apply(slot, Event.RESERVE)
    stamp = slots.stamp(slot)
    assert (slots.frame[slot], slots.frames[slot], slots.owner[slot]) == (7, 2, 3)
    assert slots.key(slot) == key(0)
    assert slots.parent(slot) == key(9)
    assert slots.find_stamp(stamp) == slot
    slots.apply(slot, Event.ABORT)
    slots.remove_all([slot])
    assert slots.find_stamp(stamp) is None
    assert slots.add(8, key(1), 2, 1, 0, SlotState.RESIDENT) == slot
    assert slots.find_stamp(stamp) is None
    assert slots.find_stamp(slots.stamp(slot)) == slot
    assert (slots.key(slot), slots.parent(slot)) == (key(1), b"")


def test_a_table_grows_for_all_that_come_at_once() -> None:
    slots = SlotTable()
    table = KeyTable(slots)
    keys = [number.to_bytes(64, "big") for number in range(1000)]
    added = [slots.add(0, each, 1, 1, 0, SlotState.RESIDENT) for each in keys]
    assert table.add_all(added) == [True] * 1000
    assert table.find_all(keys).tolist() == added
    table.remove_all(added[::2])
    assert sorted(table.all()) == sorted(added[1::2])
