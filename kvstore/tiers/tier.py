"""The contract of a lower tier: a bounded place for pages beside the arena: on disk, in Redis, in object storage."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.events.ring import EventRing
from kvstore.status import TierHealth

KEY_BYTES = 64
"""A page key is the namespace's fingerprint followed by the block hash."""

FINGERPRINT_BYTES = 32
"""A page key begins with it."""

PageBytes = npt.NDArray[np.uint8]
"""One page's payload: a contiguous one-dimensional array of bytes, mostly a view into the arena."""


CLAIM_PAUSE, LONGEST_CLAIM_PAUSE = 0.01, 0.25
"""Seconds between two looks whether a claim has ended, at first and at most."""

READER: ContextVar[Hashable] = ContextVar("reader", default=None)
"""For whom this thread reads (a client): a tier that can't read for all at once serves them in turn."""


class PageWrite(NamedTuple):
    """One page on its way into a tier."""

    key: bytes
    """64 bytes: fingerprint and block hash."""
    checksum: int
    """xxh3_64 of the payload (unsigned)."""
    payload: PageBytes
    """Held by the caller, unchanged until the call returns."""
    parent: bytes = b""
    """The key of the page before it in its chain; empty where nobody says."""


class Claim(NamedTuple):
    """Another node is sending these pages to a tier that nodes share."""

    name: bytes
    """For :meth:`ClaimedTier.ended`."""
    seconds: float
    """It ends by itself after so long, if that node is gone."""
    keys: Sequence[bytes]
    """Of the pages."""


class Offered(NamedTuple):
    """What became of pages that were offered to a tier that nodes share."""

    here: list[bool]
    """As of :meth:`Tier.write`."""
    claims: list[Claim]
    """Of pages that are not here yet: to be offered again when these have ended."""


class Peer(NamedTuple):
    """A server that a tier's pages are on."""

    name: str
    answers: bool
    """Whether it does at the moment, as far as one knows."""


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A tier's gauges now, and its counters: in a node since the arena was made, over restarts and crashes."""

    used_bytes: int = 0
    """Everything that counts against the limit, padding and headers included."""
    limit_bytes: int = 0
    pages: int = 0
    asked: int = 0
    """Pages asked of ``read``."""
    hit: int = 0
    missed: int = 0
    corrupt: int = 0
    """Of the missed ones: found, but with bytes that their checksum refuses."""
    errors: int = 0
    """Reads and writes that the system refused."""
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    late: int = 0
    """Pages that were not read, and calls that were not done, by their deadline."""
    carried: int = 0
    """Pages that were written again, since what lay around them left."""


class Tier(Protocol):
    """A bounded place for pages. All methods are safe to call from several threads at once; they block on I/O.

    In doubt every answer is a miss: but for ``flush`` and ``remove``, no method raises for a page that is damaged or
    gone, or for a failing device.
    """

    name: str

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here. A tier of this node alone answers from memory, without I/O; one that nodes share may
        block up to its own deadline."""
        ...

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages here that begin with ``prefix``, a namespace's fingerprint.

        Raises:
            ResourceError: a tier that nodes share can't be reached, or not wholly.
        """
        ...

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """Store pages, in the order given, side by side; evicts others first to stay within the limit.

        Returns:
            Which pages are here now and would be found after a crash of the process (one already here counts).
        """
        ...

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """Read pages into the arrays given, each of its page's exact length.

        Returns:
            For each page its verified xxh3_64, or None for a miss (the array may then hold anything).
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Note that pages were used in a faster tier: they count as read lately. Unknown keys are passed over.

        Called by a background thread. A tier of this node alone does no I/O for it; one that nodes share may block up
        to its own deadline.

        Returns:
            For each page, False if it is certainly not here, and may be written again. What nobody can tell is True.
        """
        ...

    def set_quota(self, prefix: bytes, limit_bytes: int) -> None:
        """Say how many bytes the pages whose keys begin with ``prefix`` may take at most, from now on.

        When a write would pass the quota, pages of that namespace leave first, those least wanted, and none of any
        other; a page that can't fit at all is refused. A quota below what is used takes effect at the next write.

        Args:
            prefix: a namespace's fingerprint, 32 bytes.
            limit_bytes: padding and headers included; 0: no limit but the tier's.
        """
        ...

    def check_limit(self, limit_bytes: int) -> None:
        """Check that ``set_limit`` would take that. No I/O, and nobody is waited for.

        Raises:
            ConfigError: less than the tier can do with while it is open.
        """
        ...

    def set_limit(self, limit_bytes: int) -> None:
        """Say how many bytes the whole tier may take, from now on. What is too much leaves at once, or as others come.

        Raises:
            ConfigError: less than the tier can do with while it is open; nothing was changed.
            ResourceError: what is too much can't leave now; the limit holds all the same for what comes.
        """
        ...

    def set_write_limit(self, limit_bytes: int) -> None:
        """Say how many bytes may be written a day, from now on; 0: any. A tier that nodes share passes it over."""
        ...

    def tell(self, events: EventRing) -> None:
        """Add to ``events`` from now on which pages come and go here, as far as this node causes it or learns of it."""
        ...

    def used_by(self, prefix: bytes) -> int:
        """Bytes of a namespace's pages that are here, padding and headers included. From memory, without I/O."""
        ...

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, also over a restart. Returns how many were here.

        Raises:
            ResourceError: a tier that nodes share can't be reached; some pages may still be there, all others are gone.
        """
        ...

    def flush(self) -> None:
        """Return when everything written so far would be found after the machine loses power.

        Raises:
            ResourceError: the device refuses; pages stay findable as long as the machine is up.
        """
        ...

    def peers(self) -> list[Peer]:
        """The servers that this tier's pages are on, where those are others. From memory, without I/O."""
        ...

    def health(self) -> TierHealth:
        """Whether the tier serves, since when, and why not, as the calls so far tell. From memory, without I/O.

        The reason is for people, and holds no password. A failure counts once a call can expect it: behind a few in a
        row, until one goes well.
        """
        ...

    def statistics(self) -> TierStatistics:
        """A frozen view of the counters."""
        ...

    def close(self) -> None:
        """Flush and release. No method may be called after it."""
        ...


class HeldKeys(Protocol):
    """Told which pages a tier holds. The tier calls it under its own lock: it takes no lock of the tier's, and does no
    I/O. Keys have 64 bytes; none is told twice before it has left."""

    def came(self, keys: Sequence[bytes]) -> None:
        """Pages are in the tier: told before any call says so."""
        ...

    def left(self, keys: Sequence[bytes]) -> None:
        """Pages that were told are in the tier no longer: told behind that."""
        ...


class KnownTier(Tier, Protocol):
    """A tier of whose pages this node knows from memory, whoever has written them: ``contains`` makes no I/O."""

    def tell_keys(self, held: HeldKeys, stop: threading.Event) -> bool:
        """Tell ``held`` which pages are here, a few at a time, and from the beginning of this call on which come and
        leave. Who was told before is told no more.

        Args:
            held: is told.
            stop: once it is set, the rest is left.

        Returns:
            Whether all have been told. False: it was stopped, somebody else is told by now, or this tier can't tell.
        """
        ...


class OwnTier(KnownTier, Protocol):
    """A tier of this node alone."""

    def fingerprints(self) -> list[bytes]:
        """The namespaces that have pages here. From memory, without I/O."""
        ...


class SharedTier(Tier, Protocol):
    """A tier that several nodes share."""

    def expire(self, prefix: bytes, seconds: float, stop: threading.Event) -> int | None:
        """Forget all pages of a namespace, unless some node has used one of them within the last ``seconds``.

        What a node has used is what it read or wrote here, or told by ``touch``.

        Args:
            prefix: the namespace's fingerprint, 32 bytes.
            seconds: on the clock of whoever keeps the pages; where that jumps ahead, from then on.
            stop: once it is set, what is still there is left for another time.

        Returns:
            How many pages were forgotten, also 0; None: the namespace is in use, and nothing was forgotten.

        Raises:
            ResourceError: nobody knows whether it is used, or some pages may still be there.
        """
        ...


class ClaimedTier(SharedTier, Protocol):
    """One in which nodes that offer the same new pages at once let one of them send each."""

    def offer(self, pages: Sequence[PageWrite], looked: Collection[bytes] = ()) -> Offered:
        """As :meth:`write`, but pages that another node is sending are not waited for.

        Args:
            pages: in the order given.
            looked: the keys of those whose claims have ended since they were offered last.
        """
        ...

    def ended(self, claims: Sequence[bytes]) -> list[bool]:
        """Which claims, by name, have ended: what they were for is here, or will not come. Blocks until the deadline of
        a read; of what nobody tells by then, False."""
        ...


class Traffic(NamedTuple):
    """What was asked of object storage since the node started, by class of request: ``get``, ``put``, ``list``,
    ``delete``."""

    requests: dict[str, int]
    seconds: dict[str, float]
    """Of all of them together."""
    errors: dict[str, int]
    """Of these, failed ones; an object that is not there is none."""
    sent_bytes: int
    received_bytes: int


class ObjectStorage(SharedTier, KnownTier, Protocol):
    """The tier that outlives all nodes. ``contains``, ``keys`` and ``touch`` answer from memory."""

    def set_prefix_limit(self, limit_bytes: int) -> None:
        """Say how many bytes all nodes together may take, as far as each knows; 0: any."""
        ...

    def traffic(self) -> Traffic:
        """What was asked of the server."""
        ...
