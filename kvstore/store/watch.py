"""Page events for watchers: a snapshot of which pages are where, then every change; after a gap, a new snapshot.

What is there is read piece by piece while it changes. Changes are read from the moment on when that began, so whoever
puts them on top of it has what is there, whichever of both a page was in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.events.ring import EVENT_PAGES, Change, PageEvent, chains
from kvstore.hashing import HASH_BYTES
from kvstore.store.state import StoreState

_TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Start:
    """Forget everything: what is there now follows."""

    missed: int
    """Events that were lost before this, since the reader was too slow; 0 at the first start."""


@dataclass(frozen=True, slots=True)
class Complete:
    """What was there at the start has been told. Changes follow."""


Told = Start | Complete | Sequence[PageEvent]
"""A piece of the stream. It may be empty: nothing happened for a moment."""


def follow(state: StoreState, visible: Callable[[bytes], bool]) -> Iterator[Told]:
    """What is in the arena and on disk, and every change of it and, where this node brings it about, of Redis.

    What is in Redis at the start is not told: only a walk over all of Redis could. ``visible`` says which namespaces,
    by fingerprint, are told of.
    """
    reader = state.events.reader()
    missed = 0
    try:
        while True:
            yield Start(missed)
            for piece in contents(state):
                yield [event for event in piece if visible(event.fingerprint)]
            yield Complete()
            while True:
                events, missed = reader.read(EVENT_PAGES, _TICK_SECONDS)
                if missed:
                    break
                yield [event for event in events if visible(event.fingerprint)]
            reader.restart()
    finally:
        reader.close()


def contents(state: StoreState) -> Iterator[list[PageEvent]]:
    """What is in the arena and on disk now, in pieces."""
    slots = state.slots
    for first in range(0, len(slots), EVENT_PAGES):
        with state.lock:
            here = [slot for slot in range(first, min(first + EVENT_PAGES, len(slots))) if slots.is_resident(slot)]
            pages = [(slots.key(slot), slots.parent(slot)) for slot in here]
        yield chains("arena", pages)
        time.sleep(0)  # whoever waits for the lock goes first
    for tier in state.lower_tiers.own:
        for known in state.namespaces.known():
            keys = tier.keys(known.fingerprint)
            for at in range(0, len(keys), EVENT_PAGES):
                hashes = tuple(key[-HASH_BYTES:] for key in keys[at : at + EVENT_PAGES])
                yield [PageEvent(Change.STORED, tier.name, known.fingerprint, hashes)]
