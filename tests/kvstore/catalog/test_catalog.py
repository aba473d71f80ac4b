"""The catalog: states of slots, which page leaves for which, and what is counted."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from kvstore.arena.format import FRAME_BYTES
from kvstore.catalog.catalog import Catalog
from kvstore.catalog.evictor import Evicted
from kvstore.catalog.policies import ExpectedReuse, LeastRecentlyUsed
from kvstore.catalog.slabs import Slabs
from kvstore.catalog.slot_state import Event, Slot, SlotState
from kvstore.catalog.slot_table import SlotTable

ALLOWED = {
    ("FREE", "RESERVE"): "RESERVED",
    ("RESERVED", "PUBLISH"): "RESIDENT",
    ("RESERVED", "ABORT"): "FREE",
    ("RESERVED", "LAPSE"): "LAPSED",
    ("LAPSED", "LET_GO"): "FREE",
    ("RESIDENT", "RETIRE_UNHELD"): "FREE",
    ("RESIDENT", "RETIRE_HELD"): "RETIRED",
    ("RETIRED", "LAST_HOLD_ENDED"): "FREE",
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, Event)))
def test_a_slot_follows_the_table(state: SlotState, event: Event) -> None:
    slots = SlotTable()
    slot = slots.add(0, b"", 1, 1, 0, state)
    after = ALLOWED.get((state.name, event.name))
    if after is not None:
        slots.apply(slot, event)
        assert slots.state[slot] == SlotState[after]
    else:
        with pytest.raises(AssertionError, match=f"{event.value!r} can't happen to a {state.name.lower()} slot"):
            slots.apply(slot, event)
        assert slots.state[slot] == state


def key(number: int) -> bytes:
    return number.to_bytes(64, "big")


def number_of(page_key: bytes) -> int:
    return int.from_bytes(page_key, "big")


class Pages:
    """A catalog over ``frames`` frames, and pages put into it by number."""

    def __init__(self, frames: int = 8) -> None:
        self.catalog = Catalog(Slabs(frames, 1), LeastRecentlyUsed)
        self.slots = self.catalog.slots
        self.numbers: dict[int, int] = {}
        """By first frame: the page that is there, or was last."""
        self.writing: list[Slot] = []
        self.held: list[Slot] = []

    def reserve(self, number: int, frames: int = 1, namespace: int = 1) -> tuple[Slot | None, Evicted]:
        """What left is given by number."""
        slot, removal = self.catalog.reserve(key(number), namespace, frames * FRAME_BYTES, 0)
        removal = self.by_number(removal)
        if slot is not None:
            self.writing.append(slot)
            self.numbers[self.slots.frame[slot]] = number
        self.check()
        return slot, removal

    def retire(self, slot: Slot) -> Evicted:
        removal = self.by_number(self.catalog.retire(slot))
        self.check()
        return removal

    def by_number(self, removal: Evicted) -> Evicted:
        return Evicted([self.numbers[frame] for frame in removal.left], overrun=removal.overrun)

    def put(self, number: int, frames: int = 1, *, dirty: bool = False, namespace: int = 1) -> Evicted:
        slot, removal = self.reserve(number, frames, namespace)
        assert slot is not None, "no room"
        self.publish(slot, dirty=dirty)
        return removal

    def publish(self, slot: Slot, *, dirty: bool = False) -> bool:
        self.writing.remove(slot)
        published = self.catalog.publish([slot], [dirty])[0]
        self.check()
        return published

    def end(self, slot: Slot, how: Callable[[Slot], None]) -> None:
        self.writing.remove(slot)
        how(slot)
        self.check()

    def find(self, number: int) -> Slot:
        slot = self.catalog.find(key(number))
        assert slot is not None, f"page {number} is not here"
        return slot

    def hold(self, number: int) -> Slot:
        slot = self.find(number)
        self.catalog.hold([slot])
        self.held.append(slot)
        self.check()
        return slot

    def release(self, slot: Slot) -> None:
        self.held.remove(slot)
        self.catalog.release([slot])
        self.check()

    def here(self) -> set[int]:
        return {number_of(self.slots.key(slot)) for slot in self.catalog.resident()}

    def dirty(self, most: int) -> list[int]:
        return [number_of(self.slots.key(slot)) for slot in self.catalog.dirty(most)]

    def check(self) -> None:
        self.catalog.check_integrity(self.held, self.writing)


def test_a_reserved_page_is_not_found_until_it_is_published() -> None:
    pages = Pages()
    slot, _ = pages.reserve(1)
    assert slot is not None
    assert pages.catalog.find(key(1)) is None
    assert pages.publish(slot)
    assert pages.catalog.find(key(1)) == slot
    assert (len(pages.catalog), pages.catalog.pages_of(1), pages.catalog.used_frames) == (1, 1, 1)


def test_of_two_writers_of_one_page_the_first_is_kept() -> None:
    pages = Pages()
    first, _ = pages.reserve(1)
    second, _ = pages.reserve(1)
    assert first is not None
    assert second is not None
    assert pages.slots.frame[first] != pages.slots.frame[second]
    assert pages.publish(second)
    assert not pages.publish(first)
    assert pages.find(1) == second
    assert pages.catalog.used_frames == 1


def test_an_aborted_slot_is_free_at_once() -> None:
    pages = Pages(frames=1)
    slot, _ = pages.reserve(1)
    assert slot is not None
    assert pages.reserve(2) == (None, Evicted())
    pages.end(slot, pages.catalog.abort)
    assert pages.reserve(2)[0] is not None


def test_a_lapsed_slot_is_nobodys_until_its_writer_lets_go() -> None:
    pages = Pages(frames=1)
    slot, _ = pages.reserve(1)
    assert slot is not None
    pages.catalog.lapse(slot)
    pages.check()
    with pytest.raises(AssertionError):
        pages.catalog.publish([slot], [False])
    with pytest.raises(AssertionError):
        pages.catalog.abort(slot)
    assert pages.reserve(2)[0] is None
    pages.end(slot, pages.catalog.let_go)
    assert pages.reserve(2)[0] is not None


def test_only_resident_pages_can_be_held() -> None:
    pages = Pages()
    slot, _ = pages.reserve(1)
    assert slot is not None
    with pytest.raises(AssertionError):
        pages.catalog.hold([slot])
    with pytest.raises(AssertionError):
        pages.catalog.release([slot])


def test_a_held_page_leaves_in_two_steps() -> None:
    """Not findable from the moment on when it is retired, but in its place until the last hold ends."""
    pages = Pages(frames=1)
    pages.put(1)
    first, second = pages.hold(1), pages.hold(1)
    removal = pages.retire(first)
    assert (removal.left, pages.slots.state[first]) == ([1], SlotState.RETIRED)
    assert pages.catalog.find(key(1)) is None
    assert pages.reserve(2)[0] is None
    with pytest.raises(AssertionError):
        pages.catalog.hold([first])
    pages.release(first)
    assert pages.reserve(2)[0] is None
    pages.release(second)
    assert pages.reserve(2)[0] is not None


def test_held_pages_do_not_leave_for_others() -> None:
    pages = Pages(frames=3)
    for number in range(3):
        pages.put(number)
    pages.hold(0)
    pages.hold(1)
    assert pages.put(3).left == [2]
    slot = pages.hold(3)
    assert pages.reserve(4) == (None, Evicted())
    pages.release(slot)
    assert pages.put(4).left == [3]


def test_the_page_used_longest_ago_leaves_and_the_tail_before_the_head() -> None:
    pages = Pages(frames=4)
    for number in range(4):
        pages.put(number)
    pages.catalog.touch([pages.find(number) for number in (0, 1, 2)])
    assert [pages.put(number).left for number in range(4, 8)] == [[3], [2], [1], [0]]


def test_a_clean_page_leaves_before_older_dirty_ones() -> None:
    pages = Pages(frames=4)
    for number in range(3):
        pages.put(number, dirty=True)
    pages.put(3)
    removal = pages.put(4, dirty=True)
    assert (removal.left, removal.overrun) == ([3], 0)
    removal = pages.put(5)
    assert (removal.left, removal.overrun) == ([0], 1)


def test_a_clean_page_far_behind_does_not_leave_in_a_dirty_ones_place() -> None:
    """Up to 31 dirty pages are passed over, not more."""
    for dirty, leaves in ((31, 100), (32, 0)):
        pages = Pages(frames=dirty + 1)
        for number in range(dirty):
            pages.put(number, dirty=True)
        pages.put(100)
        assert pages.put(200).left == [leaves], f"{dirty} dirty pages"


def test_dirty_pages_are_named_oldest_first_until_they_are_clean() -> None:
    pages = Pages()
    for number in range(4):
        pages.put(number, dirty=number != 2)
    catalog = pages.catalog
    assert pages.dirty(2) == [0, 1]
    catalog.defer(pages.find(0))
    catalog.defer(pages.find(2))
    catalog.mark_clean([pages.find(1)])
    pages.check()
    assert pages.dirty(9) == [3, 0]
    assert catalog.dirty_pages == 2
    removal = pages.retire(pages.find(3))
    assert (removal.overrun, catalog.dirty_pages) == (1, 1)


def test_a_page_size_takes_units_from_colder_ones() -> None:
    """All of the arena is small pages; large ones come, and take the place of those used longest ago."""
    pages = Pages(frames=16)
    for number in range(16):
        pages.put(number)
    pages.catalog.touch([pages.find(number) for number in range(8)])
    removal = pages.put(100, frames=4, namespace=2)
    gone = set(removal.left)
    assert len(gone) >= 4
    assert gone <= set(range(8, 16)), "pages that were used just now left"
    assert pages.catalog.pages_of(2) == 1
    assert pages.here() == set(range(16)) - gone | {100}


def test_units_in_use_are_not_taken() -> None:
    pages = Pages(frames=8)
    for number in range(8):
        pages.put(number)
    pages.hold(3)
    slot, removal = pages.reserve(100, frames=4)
    assert slot is not None
    assert 3 not in removal.left
    assert pages.reserve(101, frames=8) == (None, Evicted())
    assert 3 in pages.here()


def test_units_that_are_being_written_are_not_taken() -> None:
    pages = Pages(frames=8)
    slot, _ = pages.reserve(0)
    assert slot is not None
    lapsed, _ = pages.reserve(1)
    assert lapsed is not None
    pages.catalog.lapse(lapsed)
    for number in range(2, 8):
        pages.put(number)
    assert set(pages.put(100, frames=4).left) <= set(range(2, 8))
    assert pages.reserve(101, frames=8) == (None, Evicted())
    assert pages.publish(slot)


def test_a_hot_size_does_not_lose_its_units_to_a_cold_one() -> None:
    """A size that has pages of its own replaces these, as long as they are colder than the others'."""
    pages = Pages(frames=8)
    for number in range(4):
        pages.put(number)
    pages.put(100, frames=4)
    for number in range(101, 400):
        pages.catalog.touch([pages.find(each) for each in range(4)])
        assert pages.put(number, frames=4).left == [number - 1]
    assert pages.here() == {0, 1, 2, 3, 399}


def test_a_size_grows_at_the_expense_of_one_that_nobody_uses() -> None:
    """Page by page, the oldest of all sizes leaves: what was stored last fills the arena."""
    pages = Pages(frames=64)
    for number in range(64):
        pages.put(number)
    for number in range(1000, 1032):
        pages.put(number, frames=2)
    assert pages.here() == set(range(1000, 1032))


def test_integrity_finds_what_does_not_add_up() -> None:
    pages = Pages()
    pages.put(1)
    slot = pages.hold(1)
    with pytest.raises(AssertionError, match="1 holds, not 0"):
        pages.catalog.check_integrity()
    with pytest.raises(AssertionError, match="writer"):
        pages.catalog.check_integrity([slot], [slot])
    pages.slots.dirty[slot] = True
    with pytest.raises(AssertionError, match="dirty"):
        pages.check()


def test_pins_scattered_over_all_slabs_of_the_coldest_do_not_lock_a_size_out() -> None:
    catalog = Catalog(Slabs(64, 4), LeastRecentlyUsed)
    for number in range(256):
        slot, _ = catalog.reserve(key(number), 1, FRAME_BYTES, 0)
        assert slot is not None
        catalog.publish([slot], [False])
    for number in range(0, 160, 4):  # one in each of the forty coldest slabs
        slot = catalog.find(key(number))
        assert slot is not None
        catalog.pin(slot)
    large, removal = catalog.reserve(key(1000), 1, 4 * FRAME_BYTES, 0)
    assert large is not None
    assert len(removal.left) == 4
    catalog.check_integrity(writers=[large])


def test_the_slot_that_was_free_for_longest_is_given_out_first() -> None:
    slabs = Slabs(1, 8)
    frames = [slabs.allocate(1) for _ in range(8)]
    for frame in (frames[3], frames[6], frames[1]):
        assert frame is not None
        slabs.free_all([frame])
    assert [slabs.allocate(1) for _ in range(3)] == [frames[3], frames[6], frames[1]]


def test_an_order_goes_with_its_namespace() -> None:
    made: list[LeastRecentlyUsed] = []

    def policy() -> LeastRecentlyUsed:
        made.append(LeastRecentlyUsed())
        return made[-1]

    catalog = Catalog(Slabs(8, 1), policy)
    for namespace in range(1, 20):
        catalog.set_quota(namespace, 2)
        slot, _ = catalog.reserve(key(namespace), namespace, FRAME_BYTES, 0)
        assert slot is not None
        catalog.publish([slot], [False])
        catalog.retire(slot)
        catalog.forget_namespace(namespace)
        catalog.check_integrity()
    assert len(made) == 19
    assert not catalog._orders._orders[1], "nothing of them is left"


def test_pages_held_at_the_front_cost_one_walk_for_many_evictions() -> None:
    walked = 0

    class Counting(LeastRecentlyUsed):
        def victims(self) -> Iterator[int]:
            nonlocal walked
            for slot in super().victims():
                walked += 1
                yield slot

    catalog = Catalog(Slabs(4096, 1), Counting)
    for number in range(4096):
        slot, _ = catalog.reserve(key(number), 1, FRAME_BYTES, 0)
        assert slot is not None
        catalog.publish([slot], [False])
    for number in range(2000):
        slot = catalog.find(key(number))
        assert slot is not None
        catalog.hold([slot])
    frames = {number: catalog.slots.frame[catalog.find(key(number)) or 0] for number in range(2000, 4096)}
    for number in range(4096, 4096 + 160):
        slot, removal = catalog.reserve(key(number), 1, FRAME_BYTES, 0)
        assert slot is not None
        assert removal.left == [frames[number - 4096 + 2000]]
        catalog.publish([slot], [False])
    assert walked < 160 * 200


@pytest.mark.parametrize("then", ["reserve", "touch", "use"])
def test_a_prefix_that_is_to_be_touched_later_is_before_anything_else_happens_to_the_order(then: str) -> None:
    pages = Pages(frames=4)
    for number in range(4):
        pages.put(number)
    pages.catalog.touch_later([key(0), key(9), key(1)])
    if then != "reserve":
        getattr(pages.catalog, then)([pages.find(2)])
    left = [pages.put(number).left for number in range(10, 14)]
    assert left == ([[2], [3], [1], [0]] if then == "reserve" else [[3], [1], [0], [2]])


def test_pages_of_several_namespaces_leave_at_once() -> None:
    """As a slab of another size is made of theirs."""
    pages = Pages(frames=16)
    for number in range(16):
        pages.put(number, dirty=number % 3 == 0, namespace=1 + number % 2)
    removal = pages.put(100, frames=8, namespace=3)
    assert sorted(removal.left) == list(range(8))
    assert removal.overrun == 3
    assert [pages.catalog.pages_of(namespace) for namespace in (1, 2, 3)] == [4, 4, 1]
    assert pages.dirty(16) == [12, 9, 15]


def test_of_pages_published_at_once_those_that_are_here_are_free_again() -> None:
    pages = Pages()
    pages.put(1)
    slots = [pages.reserve(number)[0] for number in (1, 2, 3, 2)]
    assert None not in slots
    pages.writing.clear()
    catalog, coming = pages.catalog, [slot for slot in slots if slot is not None]
    assert catalog.publish(coming, [True, True, False, True]) == [False, True, True, False]
    pages.check()
    assert pages.here() == {1, 2, 3}
    assert (pages.dirty(8), catalog.used_frames, catalog.pages_of(1)) == ([2], 3, 3)
    catalog.mark_clean([*coming[1:3], coming[1]])
    pages.check()
    assert pages.dirty(8) == []


def test_a_page_that_says_it_comes_behind_its_own_tail_holds_no_other_page() -> None:
    """Whoever stores so contradicts himself: no page waits for it."""
    catalog = Catalog(Slabs(8, 1), ExpectedReuse)
    other, _ = catalog.reserve(key(9), 1, FRAME_BYTES, 0)
    assert other is not None
    catalog.publish([other], [False])
    slots: list[Slot] = []
    catalog.reserve_all([key(1), key(2)], 1, FRAME_BYTES, 0, [key(2), key(1)], slots, Evicted())
    catalog.publish(slots, [False, False])
    catalog.touch(slots)
    catalog.check_integrity()
    assert next(iter(catalog._orders.slots())) == other, "it was used longest ago, and nothing is behind it"


@pytest.mark.parametrize("dirty", [[True], [True, False, False]])
def test_publishing_says_of_each_page_whether_it_is_dirty(dirty: list[bool]) -> None:
    pages = Pages()
    slots = [slot for slot in (pages.reserve(1)[0], pages.reserve(2)[0]) if slot is not None]
    with pytest.raises(AssertionError, match="2 slots"):
        pages.catalog.publish(slots, dirty)
    pages.check()
