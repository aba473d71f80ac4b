"""Which new pages go into one chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.redis.format.chunk import MOST_POSITION, pages_per_chunk
from kvstore.tiers.redis.format.planning import NewPage, plan_chunks, positions


def key(namespace: int, number: int) -> bytes:
    return bytes([namespace]) * 32 + number.to_bytes(32, "big")


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.sampled_from([400_000, 700_000])), max_size=40))
def test_chunks_are_runs_that_go_over_no_boundary(found: list[tuple[int, int, int]]) -> None:
    pages = [NewPage(key(namespace, position), length, position) for namespace, position, length in found]
    cuts = plan_chunks(pages)
    assert [at for cut in cuts for at in cut] == list(range(len(pages)))
    for cut in cuts:
        first = pages[cut[0]]
        most = pages_per_chunk(first.length)
        for step, at in enumerate(cut):
            assert pages[at].position == first.position + step
            assert pages[at].position // most == first.position // most
            assert (pages[at].length, pages[at].key[:32]) == (first.length, first.key[:32])


@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 60))
def test_everybody_cuts_a_chain_at_the_same_places(start: int, length: int, other: int) -> None:
    def ends(first: int) -> set[int]:
        pages = [NewPage(key(1, n), 200_000, n) for n in range(first, 121)]
        return {cut.stop + first for cut in plan_chunks(pages)}

    low, high = sorted((start, other))
    assert {end for end in ends(low) if end > high} == ends(high)


def test_positions() -> None:
    keys = [key(1, n) for n in range(6)]
    assert positions(keys[:3], [b""] * 3, {}) == [0, 1, 2]
    assert positions(keys[3:], [keys[2], keys[3], keys[4]], {keys[2]: 17}) == [18, 19, 20]
    assert positions(keys[3:], [keys[2], b"", b""], {}) == [0, 1, 2]
    assert positions([keys[0], key(2, 0), keys[1]], [b"", b"", b""], {}) == [0, 0, 0]
    assert positions([keys[5], keys[1]], [b"", keys[5]], {}) == [0, 1]
    assert positions(keys[:2], [keys[5], keys[0]], {keys[5]: 2**32 - 1}) == [0, 1], "beyond all that has a place"
    assert positions(keys[:2], [keys[5], keys[0]], {keys[5]: MOST_POSITION - 2}) == [MOST_POSITION - 1, 0]
