"""Ends of chains by value, against a plain list."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.catalog.policies.chain_ends import ChainEnds

SLOTS = 12


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 5), st.booleans()), max_size=80))
def test_they_are_in_order_of_value_then_of_coming(steps: list[tuple[int, int, bool]]) -> None:
    """A step adds a slot, before others of its value or behind them, or takes it out if it is in."""
    ends = ChainEnds()
    ends.grow(SLOTS)
    rings: dict[int, list[int]] = {}
    for slot, value, first in steps:
        before = next((each for each, ring in rings.items() if slot in ring), None)
        assert (slot in ends) == (before is not None)
        if before is not None:
            ends.remove(slot, before)
            rings[before].remove(slot)
        else:
            ends.add(slot, value, first=first)
            ring = rings.setdefault(value, [])
            ring.insert(0 if first else len(ring), slot)
        order = [(value, each) for value in sorted(rings) for each in rings[value]]
        assert list(ends.in_order()) == order
        assert len(ends) == len(order)


def test_values_that_are_no_more_are_forgotten() -> None:
    ends = ChainEnds()
    ends.grow(2)
    for value in range(10_000):
        ends.add(0, -value)
        ends.remove(0, -value)
        list(ends.in_order())
    ends.add(1, 0)
    for value in range(1, 10_000):
        ends.add(0, value)
        ends.remove(0, value)
        next(ends.in_order())
    assert len(ends._values) <= 2


def test_values_of_pages_that_all_left_are_forgotten() -> None:
    """Also if nothing asks for the order, and nothing comes any more."""
    ends = ChainEnds()
    ends.grow(1000)
    for slot in range(1000):
        ends.add(slot, slot)
    for slot in range(999, 0, -1):
        ends.remove(slot, slot)
        assert len(ends._values) <= 2 * len(ends)
    ends.remove(0, 0)
    assert not ends._values
