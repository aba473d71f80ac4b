"""What the native core says to be nowhere, beside Python, on one arena and one summary: the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.arena.arena import Arena
from kvstore.arena.format import FRAME_BYTES, IN_OWN_TIER, IN_SHARED_TIER, SOMEWHERE, UNPLACED
from kvstore.arena.summary import FULL
from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.shm.mapped_arena import CAN_READ, MappedArena
from kvstore.core import choice
from kvstore.layout import Layout
from kvstore.page_codes import UNTOLD, PageTier

pytestmark = [
    pytest.mark.skipif(choice.native() is None, reason=choice.CHOSEN.reason or "native"),
    pytest.mark.skipif(not CAN_READ, reason="this processor does not keep the order of stores"),
]
NUMBER = 5
FRAMES = 64
PYTHON = choice.Choice(None, "a test says so")
LAYOUT = Layout(model="a", block_size=16, page_bytes=4096)
NUMBERS = range(150)
BUCKETS = 128


def hash_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(32)


HASHES = [hash_of(number) for number in NUMBERS]
numbers = st.lists(st.sampled_from(NUMBERS), unique=True, max_size=60)


def both_ways(mapped: MappedArena, namespace: OpenedNamespace, hashes: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    native = mapped.find(namespace, hashes)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "CHOSEN", PYTHON)
        assert mapped.find(namespace, hashes) == native
    return native


@given(
    in_arena=st.lists(st.sampled_from(NUMBERS), unique=True, max_size=FRAMES),
    below=numbers,
    withdrawn=numbers,
    asked=st.lists(st.sampled_from(NUMBERS), max_size=150),
    elsewhere=st.sampled_from(
        [0, SOMEWHERE, IN_OWN_TIER, IN_OWN_TIER, IN_OWN_TIER | IN_SHARED_TIER, IN_OWN_TIER | UNPLACED]
    ),
    rubbish=st.lists(st.tuples(st.integers(0, BUCKETS * 8 - 1), st.sampled_from([0, 1, FULL - 1, FULL])), max_size=3),
    state=st.sampled_from(["complete", "complete", "not named", "another edition"]),
)
@settings(max_examples=80, deadline=None)
def test_both_say_the_same(
    in_arena: list[int],
    below: list[int],
    withdrawn: list[int],
    asked: list[int],
    elsewhere: int,
    rubbish: list[tuple[int, int]],
    state: str,
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        arena = Arena(Path(folder, "arena"), FRAMES * FRAME_BYTES)
        arena.open_for_readers(own_tiers=True, shared_tier=False)
        arena._elsewhere[0] = elsewhere
        file = arena.summaries.make(BUCKETS)
        key = LAYOUT.fingerprint
        file.writer.insert([key + HASHES[number] for number in below])
        file.writer.remove([key + HASHES[number] for number in withdrawn if number in below])
        for place, value in rubbish:
            file.writer._places[place] = value
        if state != "not named":
            arena.summaries.name(file)
        frames = range(len(in_arena))
        arena.begin_changes(frames, 0)
        arena.publish(
            frames, [HASHES[number] for number in in_arena], NUMBER, LAYOUT.page_bytes, [None] * len(in_arena)
        )
        mapped = MappedArena(arena.directory)
        namespace = OpenedNamespace(LAYOUT, key, 100, "", NUMBER, arena.edition)
        if state == "another edition":
            arena.new_edition()
        said = both_ways(mapped, namespace, b"".join(HASHES[number] for number in asked), patch)
        certain = state == "complete" and elsewhere == IN_OWN_TIER
        for number, tier in zip(asked, said, strict=True):
            if number in in_arena:
                assert tier == PageTier.ARENA
            elif not elsewhere:
                assert tier == PageTier.ABSENT
            elif not certain or (number in below and number not in withdrawn and not rubbish):
                assert tier == UNTOLD
            elif not rubbish:
                assert tier == PageTier.ABSENT
        del mapped
        arena.close()


@pytest.mark.parametrize(
    ("summary", "buckets", "said"),
    [
        (bytearray(4096 + 31), 1, "the summary ends before"),
        (bytearray(100), 1, "the summary ends before"),
        (bytearray(8192), 0, "a summary has 1 to"),
        (bytearray(8192), 1 << 32, "a summary has 1 to"),
        (bytearray(8192), 1 << 60, "a summary has 1 to"),
    ],
)
def test_a_summary_that_is_too_short_is_an_error_in_words(summary: bytearray, buckets: int, said: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder:
        arena = Arena(Path(folder, "arena"), FRAMES * FRAME_BYTES)
        mapped = MappedArena(arena.directory)
        core = choice.native()
        assert core is not None
        with pytest.raises(ValueError, match=said):
            core.where(mapped._headers, mapped._geometry, 1, 4096, 1, bytes(32), summary, buckets, 1, 1)
        del mapped
        arena.close()
