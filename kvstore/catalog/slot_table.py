"""The slot table: what is known of every slot in use, in columns, so that a million pages are not a million objects.

A slot is a number, and the number is its place in each column. It is another slot's as soon as this one is free; who
keeps a slot in mind without a hold on it keeps its *stamp*, which tells the one page in it from the next.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvstore.arena.format import frames_for
from kvstore.catalog.slot_state import (
    TRANSITIONS,
    Event,
    Slot,
    SlotState,
)
from kvstore.hashing import HASH_BYTES

_NO_HASH = bytes(HASH_BYTES)
_RESIDENT = int(SlotState.RESIDENT)
_LEAST_ROWS = 64
"""The columns grow by so many slots, or by a sixteenth."""


class SlotTable:
    """The columns. The store's lock guards all of them."""

    def __init__(self) -> None:
        self.frame = array("I")
        """Where the slot lies in the arena: its first frame."""
        self.frames = array("I")
        """How many it takes."""
        self.length = array("I")
        """Bytes of the page; of a slot whose page is unknown, of the slot."""
        self.namespace = array("H")
        self.owner = array("H")
        """The client that may write into it; 0: the node's own threads."""
        self.state = array("B")
        """A :class:`SlotState`; ``FREE``: nothing else counts."""
        self.holds = array("I")
        self.used = array("Q")
        """When it was used last, on the catalog's clock."""
        self.dirty = array("B")
        """Whether no lower tier has the page, where there is one. 0 or 1, as in the next two."""
        self.pinned = array("B")
        self.at_risk = array("B")
        """Whether it must not leave before a lower tier has it: it is written for, or dirty in, a durable namespace."""
        self.key_hash = array("I")
        """A hash of its key that differs from process to process, so that nobody chooses keys which collide."""
        self.rank = array("I")
        """Its number in its order of eviction, where it may leave; see :mod:`kvstore.catalog.eviction_orders`."""
        self.apart = array("B")
        """Whether that order is its namespace's own. 0 or 1."""
        self.block_hashes = bytearray()
        """The second half of each key, ``HASH_BYTES`` each; the first is the fingerprint of its namespace."""
        self._parents = bytearray()
        """The same of the page before it in its chain."""
        self._serial = array("I")
        self._fingerprints: dict[int, bytes] = {}
        self._columns: tuple[array[int], ...] = (
            *(self.frame, self.frames, self.length, self.namespace, self.owner, self.state, self.holds, self.used),
            *(self.dirty, self.pinned, self.at_risk, self.key_hash, self.rank, self.apart),
            self._serial,
        )
        self._free = array("I")

    def __len__(self) -> int:
        """Places in each column. Which of them are in use is said by ``state``."""
        return len(self.state)

    def add(
        self, frame: int, key: bytes, namespace: int, length: int, owner: int, state: SlotState, parent: bytes = b""
    ) -> Slot:
        """A slot is in use from now on, neither dirty nor pinned nor held.

        Args:
            frame: its first one.
            key: of the page, 64 bytes; empty where it is unknown.
            namespace: its number; every page of it has the same fingerprint.
            length: bytes of the page, or of the slot.
            owner: who may write into it.
            state: where it stands.
            parent: key of the page before it in its chain, in the same namespace; empty where nobody says.
        """
        return self.add_all([frame], [key], namespace, length, owner, state, [parent])[0]

    def add_all(
        self,
        frames: Sequence[int],
        keys: Sequence[bytes],
        namespace: int,
        length: int,
        owner: int,
        state: SlotState,
        parents: Sequence[bytes],
    ) -> list[Slot]:
        """:meth:`add` for many slots of one namespace and size."""
        free, count, first = self._free, frames_for(length), keys[0]
        if first:
            self._fingerprints.setdefault(namespace, first[:-HASH_BYTES])
        frame_of, frames_of, length_of, namespace_of = self.frame, self.frames, self.length, self.namespace
        owner_of, state_of, key_hash, hashes, before = (
            *(self.owner, self.state, self.key_hash),
            *(self.block_hashes, self._parents),
        )
        slots: list[Slot] = []
        for frame, key, parent in zip(frames, keys, parents, strict=True):
            if not free:
                self._grow()
            slot = free.pop()
            slots.append(slot)
            frame_of[slot] = frame
            frames_of[slot] = count
            length_of[slot] = length
            namespace_of[slot] = namespace
            owner_of[slot] = owner
            state_of[slot] = state
            key_hash[slot] = hash_of(key)
            place = slot * HASH_BYTES
            hashes[place : place + HASH_BYTES] = key[-HASH_BYTES:] or _NO_HASH
            before[place : place + HASH_BYTES] = parent[-HASH_BYTES:] or _NO_HASH
        return slots

    def name(self, slots: Sequence[Slot], keys: Sequence[bytes], parents: Sequence[bytes]) -> None:
        """Say which pages of one namespace are in slots that were added without keys."""
        key_hash, hashes, before = self.key_hash, self.block_hashes, self._parents
        unnamed = hash_of(b"")
        self._fingerprints.setdefault(self.namespace[slots[0]], keys[0][:-HASH_BYTES])
        for slot, key, parent in zip(slots, keys, parents, strict=True):
            assert key_hash[slot] == unnamed, f"slot {slot} has its page"
            key_hash[slot] = hash(key) & 0xFFFFFFFF
            place = slot * HASH_BYTES
            hashes[place : place + HASH_BYTES] = key[-HASH_BYTES:]
            before[place : place + HASH_BYTES] = parent[-HASH_BYTES:] or _NO_HASH

    def remove_all(self, slots: Sequence[Slot]) -> None:
        """The slots are free, and their numbers are the next ones'. None is held, dirty, pinned or at risk."""
        serial = self._serial
        for slot in slots:
            serial[slot] = (serial[slot] + 1) & 0xFFFFFFFF
        self._free.extend(slots)

    def forget_namespace(self, namespace: int) -> None:
        """It has no slots any more."""
        self._fingerprints.pop(namespace, None)

    def apply(self, slot: Slot, event: Event) -> None:
        """Follow the table of states.

        Raises:
            AssertionError: the event can't happen in this state.
        """
        self.apply_all((slot,), event)

    def apply_all(self, slots: Sequence[Slot], event: Event) -> None:
        """:meth:`apply` for many slots; where it can't happen to one, it happens to none."""
        assert len(set(slots)) == len(slots), f"one of the slots {slots} is named twice"
        state_of = self.state
        after: dict[int, int] = {}
        for slot in slots:
            state = state_of[slot]
            if state not in after:
                found = TRANSITIONS.get((state, event))
                assert found is not None, (
                    f"slot {slot}: {event.value!r} can't happen to a {SlotState(state).name.lower()} slot"
                )
                after[state] = int(found)
        for slot in slots:
            state_of[slot] = after[state_of[slot]]

    def key(self, slot: Slot) -> bytes:
        """64 bytes: fingerprint and block hash."""
        return self.fingerprint(self.namespace[slot]) + self.block_hash(slot)

    def keys(self, slots: Sequence[Slot]) -> list[bytes]:
        """The key of each."""
        namespace, hashes, fingerprints = self.namespace, self.block_hashes, self._fingerprints
        return [
            fingerprints.get(namespace[slot], _NO_HASH) + hashes[slot * HASH_BYTES : (slot + 1) * HASH_BYTES]
            for slot in slots
        ]

    def fingerprint(self, namespace: int) -> bytes:
        """What all keys of a namespace begin with; zeros where none of its pages was ever named."""
        return self._fingerprints.get(namespace, _NO_HASH)

    def block_hash(self, slot: Slot) -> bytes:
        """The second half of its key."""
        return bytes(self.block_hashes[slot * HASH_BYTES : (slot + 1) * HASH_BYTES])

    def hashes_of(self, slots: Sequence[Slot]) -> list[bytes]:
        """:meth:`block_hash` of each."""
        hashes = self.block_hashes
        return [bytes(hashes[slot * HASH_BYTES : (slot + 1) * HASH_BYTES]) for slot in slots]

    def is_behind(self, slot: Slot, other: Slot) -> bool:
        """Whether ``other``, of the same namespace, is the page before this one in its chain."""
        here, there = slot * HASH_BYTES, other * HASH_BYTES
        return self._parents[here : here + HASH_BYTES] == self.block_hashes[there : there + HASH_BYTES]

    def parents(self, slots: Sequence[Slot]) -> list[bytes]:
        """:meth:`parent` of each."""
        namespace, parents, fingerprints = self.namespace, self._parents, self._fingerprints
        before = [bytes(parents[slot * HASH_BYTES : (slot + 1) * HASH_BYTES]) for slot in slots]
        return [
            fingerprints.get(namespace[slot], _NO_HASH) + parent if parent != _NO_HASH else b""
            for slot, parent in zip(slots, before, strict=True)
        ]

    def parent(self, slot: Slot) -> bytes:
        """The key of the page before it in its chain; empty where nobody says."""
        parent = self._parents[slot * HASH_BYTES : (slot + 1) * HASH_BYTES]
        return self.fingerprint(self.namespace[slot]) + parent if parent != _NO_HASH else b""

    def is_resident(self, slot: Slot) -> bool:
        """Whether it holds a page that is findable."""
        return self.state[slot] == _RESIDENT

    def may_leave(self, slot: Slot) -> bool:
        """Whether eviction may propose it."""
        return self.state[slot] == _RESIDENT and not self.pinned[slot] and not self.at_risk[slot]

    def stamp(self, slot: Slot) -> int:
        """What tells this slot with the page in it from all others, also of later: 64 bits."""
        return self._serial[slot] << 32 | slot

    def find_stamp(self, stamp: int) -> Slot | None:
        """The slot that had this stamp; None if it was free since."""
        slot = stamp & 0xFFFFFFFF
        return slot if self._serial[slot] == stamp >> 32 else None

    def stamps_of(self, first: Slot, most: int, namespace: int | None = None, *, dirty: bool = False) -> list[int]:
        """The stamps of findable pages in so many slots from ``first`` on: of one namespace alone, or dirty ones alone.
        Takes some 5 ns a slot, and 0.1 µs a page."""
        part = slice(first, first + most)
        wanted = np.array(self.state[part]) == _RESIDENT
        if namespace is not None:
            wanted &= np.array(self.namespace[part]) == namespace
        if dirty:
            wanted &= np.array(self.dirty[part]) == 1
        places = np.flatnonzero(wanted)
        serials = np.array(self._serial[part], np.int64)[places]  # a stamp has 64 bits, the highest of which is a sign
        stamps: list[int] = (serials << 32 | (places + first)).view(np.uint64).tolist()
        return stamps

    def serials(self) -> array[int]:
        """A copy of the upper halves of all stamps."""
        return self._serial[:]

    def check_integrity(self) -> None:
        """Recount what is free.

        Raises:
            AssertionError: something does not add up.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a number is free twice"
        for slot, state in enumerate(self.state):
            assert (slot in free) == (state == SlotState.FREE), f"slot {slot} is free and in use"
        for slot in free:
            left = self.holds[slot] + self.dirty[slot] + self.pinned[slot] + self.at_risk[slot]
            assert not left, f"slot {slot} is free, and held, dirty, pinned or at risk"

    def _grow(self) -> None:
        first = len(self.state)
        more = max(_LEAST_ROWS, first // 16)
        for column in self._columns:
            column.frombytes(bytes(more * column.itemsize))
        for hashes in (self.block_hashes, self._parents):
            hashes.extend(bytes(more * HASH_BYTES))
        self._free.extend(range(first + more - 1, first - 1, -1))


def hash_of(key: bytes) -> int:
    """32 bits of Python's own hash of bytes, which is keyed anew in each process."""
    return hash(key) & 0xFFFFFFFF
