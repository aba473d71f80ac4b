"""Which prefix several groups agree on, beside a search that knows no shortcut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.longest_hit import longest_hit


def full(_: int) -> int:
    return 0


def window(size: int):
    return lambda computed: max(0, computed - size + 1)


def chunked(size: int):
    return lambda computed: computed - computed % size


HERE, GONE = True, False


@pytest.mark.parametrize(
    ("presence", "local", "limit", "hit"),
    [
        ([HERE] * 4, 0, 16, 16),
        ([HERE] * 4, 0, 15, 12),
        ([HERE] * 2 + [GONE, HERE], 0, 16, 8),
        ([GONE] + [HERE] * 3, 0, 16, 0),
        ([GONE] + [HERE] * 3, 4, 16, 16),  # the engine has the first one
        ([HERE] * 2, 0, 16, 8),  # of the others nothing is known
        ([], 0, 16, 0),
        ([HERE] * 4, 16, 15, 16),
    ],
)
def test_full_attention_needs_every_page_behind_the_engines_own(presence, local, limit, hit) -> None:
    assert longest_hit([presence], [4], [full], local, limit) == hit


def test_a_window_needs_the_pages_before_the_hits_end_alone() -> None:
    presence = [GONE, GONE, HERE, HERE]
    assert longest_hit([presence], [4], [window(8)], 0, 16) == 16  # tokens 9 to 15
    assert longest_hit([presence], [4], [window(10)], 0, 16) == 0  # tokens 7 to 15
    assert longest_hit([[HERE] * 2 + [GONE, HERE]], [4], [window(8)], 0, 16) == 8


def test_at_the_start_of_a_chunk_of_attention_no_page_is_needed() -> None:
    assert longest_hit([[HERE] * 4, [GONE, GONE, GONE, HERE]], [4, 4], [full, chunked(8)], 0, 15) == 8
    assert longest_hit([[GONE] * 7], [4], [chunked(12)], 0, 28) == 24
    assert longest_hit([[GONE] * 7], [4], [chunked(6)], 0, 28) == 24
    assert longest_hit([[GONE] * 5 + [HERE] + [GONE]], [4], [chunked(16)], 0, 28) == 16
    assert longest_hit([[GONE] * 4], [4], [chunked(32)], 0, 16) == 0


def test_groups_agree_on_a_length_that_suits_all_of_them() -> None:
    attention = [HERE] * 5 + [GONE]
    assert longest_hit([attention, [GONE, HERE, GONE]], [4, 8], [full, window(5)], 0, 24) == 16
    assert longest_hit([attention, [HERE, GONE, HERE]], [4, 8], [full, window(5)], 0, 24) == 8


@pytest.mark.parametrize("here", [[], [GONE] * 8192, [HERE] + [GONE] * 8191, [HERE, GONE] * 4096])
@pytest.mark.parametrize("reaches", [[None], [None, 4096], [4096, None], [4096], [1000, 4096]])
def test_a_long_prompt_that_misses_takes_few_rounds(here, reaches) -> None:
    rounds = 0

    def counted(reach: int | None):
        def skipped(computed: int) -> int:
            nonlocal rounds
            rounds += 1
            return max(0, computed - reach + 1) if reach else 0

        return skipped

    hit = longest_hit([here] * len(reaches), [16] * len(reaches), list(map(counted, reaches)), 0, 8192 * 16)
    assert hit == (16 if HERE in here else 0)
    assert rounds < 200


def test_nor_does_one_whose_group_needs_little() -> None:
    rounds = 0

    def skipped(computed: int) -> int:
        nonlocal rounds
        rounds += 1
        return max(0, computed - 30)

    assert longest_hit([[GONE] * 8192], [16], [skipped], 0, 8192 * 16) == 0
    assert rounds < 10


@given(st.data())
def test_as_a_search_without_shortcuts(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3))
    kinds = st.one_of(
        st.just(full), st.builds(window, st.sampled_from([1, 3, 5, 9])), st.builds(chunked, st.sampled_from([3, 8, 12]))
    )
    skipped = [data.draw(kinds) for _ in sizes]
    presence = [data.draw(st.lists(st.booleans(), max_size=12)) for _ in sizes]
    local = 12 * data.draw(st.integers(0, 1))
    limit = data.draw(st.integers(0, 48))

    def is_hit(tokens: int) -> bool:
        for size, num_skipped, here in zip(sizes, skipped, presence, strict=True):
            blocks = {token // size for token in range(max(local, num_skipped(tokens)), tokens)}
            if tokens % size or not all(block < len(here) and here[block] for block in blocks):
                return False
        return all(tokens // size <= len(here) for size, here in zip(sizes, presence, strict=True))

    best = max((tokens for tokens in range(local + 1, limit + 1) if is_hit(tokens)), default=local)
    assert longest_hit(presence, sizes, skipped, local, limit) == best
