"""Stores and loads of any number of pages, batch by batch.

A node may be lost or come back between two batches: what was confirmed counts, the rest is said to be refused, or not
loaded.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.client.handle import Handle
from kvstore.client.paths.path import OpenedNamespace, Path
from kvstore.client.paths.results import StoreResult
from kvstore.errors import DeadlineError, KVStoreError, NotAttachedError, UnavailableError, UnknownNamespaceError
from kvstore.host.uninterrupted import uninterrupted
from kvstore.limits import (
    ABSENT,
    ARENA,
    MOST_LOOKUP_PAGES,
    TIER_NAMES,
)
from kvstore.wire.messages import join_hashes

Bytes = npt.NDArray[np.uint8]
_ARENA = TIER_NAMES[ARENA] or ""


def store(
    handle: Handle, hashes: Sequence[bytes], pages: Sequence[Bytes], parent: bytes, deadline: float
) -> StoreResult:
    """Store pages that follow each other, head of the prefix first.

    Args:
        handle: their namespace.
        hashes: 32 bytes each.
        pages: for each hash its payload.
        parent: block hash of the page before the first one, or empty.
        deadline: on the clock of ``time.monotonic``.

    Raises:
        UnavailableError: the node could not be reached at all.
        DeadlineError: it did not answer in time.
    """
    if not hashes:
        return StoreResult()

    def at_once(opened: OpenedNamespace, path: Path, left: float) -> StoreResult | None:
        return path.store(opened, hashes, pages, left, parent) if len(hashes) <= opened.batch_pages else None

    stored = handle.move(at_once, deadline)
    if stored is not None:
        return stored
    result, batches = uninterrupted(_store)(handle, hashes, pages, parent, deadline)
    return _settled(handle, hashes, result, deadline) if batches > 1 and len(hashes) <= MOST_LOOKUP_PAGES else result


def load(handle: Handle, hashes: Sequence[bytes], joined: bytes, into: Sequence[Bytes], deadline: float) -> list[str]:
    """Load the leading pages that are here.

    Args:
        handle: their namespace.
        hashes: 32 bytes each.
        joined: the same as one.
        into: for each hash where its payload goes.
        deadline: on the clock of ``time.monotonic``.

    Returns:
        The tier that each came from; its length is how many were loaded.

    Raises:
        UnavailableError: the node could not be reached at all.
        DeadlineError: it did not answer in time.
    """
    opened, path = handle.now(deadline)
    here, nowhere = 0, False
    try:
        here, nowhere = path.load_here(opened, joined, into, deadline)
    except NotAttachedError:
        handle.open_again(deadline)
    loaded = [_ARENA] * here
    if nowhere or here == len(hashes):
        return loaded
    batches = 1 if here else 0

    def load_some(opened: OpenedNamespace, path: Path, left: float) -> tuple[list[str], bool, int]:
        start, end = len(loaded), len(loaded) + path.load_pages(opened)
        tiers = path.load(opened, hashes[start:end], into[start:end], left)
        return tiers, len(tiers) == len(into[start:end]), math.ceil(len(tiers) / opened.batch_pages)

    whole = True
    while whole and len(loaded) < len(hashes):
        try:
            tiers, whole, more = handle.move(load_some, deadline)
        except (UnavailableError, DeadlineError):
            if not loaded:
                raise
            break
        batches += more
        loaded += tiers
    if batches > 1:
        _want_whole(handle, hashes[: min(len(loaded), MOST_LOOKUP_PAGES)], deadline)
    return loaded


def _store(
    handle: Handle, hashes: Sequence[bytes], pages: Sequence[Bytes], parent: bytes, deadline: float
) -> tuple[StoreResult, int]:
    """Store batch by batch, one being copied while the one before it is published. Returns also how many."""
    result = StoreResult()
    begun: deque[tuple[int, int, Callable[[], StoreResult]]] = deque()
    start = batches = 0

    def begin(opened: OpenedNamespace, path: Path, left: float) -> int:
        end = min(start + opened.batch_pages, len(hashes))
        previous = hashes[start - 1] if start else parent
        if end == len(hashes) and not begun:  # nothing is left to be done beside it
            stored = path.store(opened, hashes[start:end], pages[start:end], left, previous)
            begun.append((start, end, lambda: stored))
        else:
            following = min(opened.batch_pages, len(hashes) - end)
            some = hashes[start:end], pages[start:end]
            begun.append((start, end, path.begin_store(opened, *some, left, previous, following)))
        return end

    failed: KVStoreError | None = None
    try:
        while begun or (start < len(hashes) and failed is None):
            try:
                if start < len(hashes) and failed is None:
                    start = handle.move(begin, deadline)
                    batches += 1
                if len(begun) > 1 or start == len(hashes) or failed is not None:
                    result += _finish(handle, hashes, pages, parent, begun.popleft(), deadline)
            except (UnavailableError, DeadlineError) as error:
                failed = error
    finally:
        for *_, finish in begun:  # another error: what was begun ends all the same
            with contextlib.suppress(KVStoreError):
                finish()
    confirmed = result.stored + result.present + result.refused
    if failed is not None and not confirmed:
        raise failed
    return result + StoreResult(refused=len(hashes) - confirmed), batches


def _finish(
    handle: Handle,
    hashes: Sequence[bytes],
    pages: Sequence[Bytes],
    parent: bytes,
    begun: tuple[int, int, Callable[[], StoreResult]],
    deadline: float,
) -> StoreResult:
    """What became of a batch: its pages from one place to another, stored anew when the node came back without
    knowing the namespace or this client."""
    start, end, finish = begun
    try:
        return finish()
    except (UnknownNamespaceError, NotAttachedError):
        previous = hashes[start - 1] if start else parent
        return _store(handle, hashes[start:end], pages[start:end], previous, deadline)[0]


def _settled(handle: Handle, hashes: Sequence[bytes], result: StoreResult, deadline: float) -> StoreResult:
    """The result of several batches: later ones may have pushed out what earlier ones had stored."""
    asked = [(handle.fingerprint, hashes)]
    try:
        if _all_here(handle, hashes, deadline) or _touch_whole(handle, hashes, deadline) == len(hashes):
            return result
        tiers = handle.control(lambda control, left: control.lookup(asked, left)[0], deadline)
        here = len(hashes) - tiers.count(ABSENT)
    except (UnavailableError, DeadlineError):
        return result  # as it was confirmed batch by batch
    left = max(0, result.stored + result.present - here)
    from_stored = min(left, result.stored)
    return StoreResult(result.stored - from_stored, result.present - (left - from_stored), result.refused + left)


def _all_here(handle: Handle, hashes: Sequence[bytes], deadline: float) -> bool:
    """Whether a look without a call finds all pages; then they are also used once more, as a whole."""
    opened, path = handle.now(deadline)
    joined = join_hashes(hashes)
    try:
        found = path.find(opened, joined)
    except NotAttachedError:
        return False
    return found is not None and ABSENT not in found[0] and path.note_wanted(opened, joined)


def _want_whole(handle: Handle, hashes: Sequence[bytes], deadline: float) -> None:
    """As ``_touch_whole``, without a call where there is a way."""
    opened, path = handle.now(deadline)
    if not path.note_wanted(opened, join_hashes(hashes)):
        with contextlib.suppress(UnavailableError, DeadlineError):
            _touch_whole(handle, hashes, deadline)


def _touch_whole(handle: Handle, hashes: Sequence[bytes], deadline: float) -> int:
    """Use a prefix of several batches once more, as a whole: its head must not count as older than its tail."""
    return handle.control(lambda control, left: control.touch(handle.fingerprint, hashes, left), deadline)
