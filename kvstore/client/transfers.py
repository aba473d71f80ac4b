"""Stores and loads of any number of pages, batch by batch.

A node may be lost or come back between two batches: what was confirmed counts, the rest counts as refused, or not
loaded.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable

from kvstore.client.handle import Handle
from kvstore.client.paths.path import OpenedNamespace, Path
from kvstore.client.paths.results import StoreResult
from kvstore.client.paths.transfer import Transfer
from kvstore.errors import DeadlineError, KVStoreError, NotAttachedError, UnavailableError, UnknownNamespaceError
from kvstore.host.uninterrupted import uninterrupted
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.page_codes import TIER_NAMES, PageTier
from kvstore.wire.messages import split_hashes

_Begun = tuple[Transfer, Callable[[], StoreResult]]
"""A batch whose store was begun, and what waits for its end."""
_ARENA = TIER_NAMES[PageTier.ARENA] or ""


def store(handle: Handle, transfer: Transfer) -> StoreResult:
    """Store pages.

    Raises:
        UnavailableError: the node could not be reached at all.
        DeadlineError: it did not answer in time.
    """
    pages, deadline = transfer.page_count, transfer.deadline
    if not pages:
        return StoreResult()

    def at_once(opened: OpenedNamespace, path: Path) -> StoreResult | None:
        return path.store(opened, transfer) if pages <= opened.batch_pages else None

    stored = handle.move(at_once, deadline)
    if stored is not None:
        return stored
    result, batches = uninterrupted(_store)(handle, transfer)
    return _settled(handle, transfer, result) if batches > 1 and pages <= MOST_LOOKUP_PAGES else result


def load(handle: Handle, transfer: Transfer) -> list[str]:
    """Load the leading pages that are here.

    Returns:
        The tier that each came from; its length is how many were loaded.

    Raises:
        UnavailableError: the node could not be reached at all.
        DeadlineError: it did not answer in time.
    """
    _, into, deadline, _ = transfer  # the quickest way at them: a page that is here takes some microseconds in all
    pages = len(into)
    opened, path = handle.now(deadline)
    here, nowhere = 0, False
    try:
        here, nowhere = path.load_here(opened, transfer)
    except NotAttachedError:
        handle.open_again(deadline)
    loaded = [_ARENA] * here
    if nowhere or here == pages:
        return loaded
    batches = 1 if here else 0

    def load_some(opened: OpenedNamespace, path: Path) -> tuple[list[str], bool, int]:
        some = transfer.part(len(loaded), len(loaded) + path.load_pages(opened))
        tiers = path.load(opened, some)
        return tiers, len(tiers) == some.page_count, math.ceil(len(tiers) / opened.batch_pages)

    whole = True
    while whole and len(loaded) < pages:
        try:
            tiers, whole, more = handle.move(load_some, deadline)
        except (UnavailableError, DeadlineError):
            if not loaded:
                raise
            break
        batches += more
        loaded += tiers
    if batches > 1:
        _touch_loaded(handle, transfer.part(0, min(len(loaded), MOST_LOOKUP_PAGES)))
    return loaded


def _store(handle: Handle, transfer: Transfer) -> tuple[StoreResult, int]:
    """Store batch by batch, one being copied while the one before it is published. Returns also how many."""
    pages, deadline = transfer.page_count, transfer.deadline
    result = StoreResult()
    begun: deque[_Begun] = deque()
    start = batches = 0

    def begin(opened: OpenedNamespace, path: Path) -> int:
        end = min(start + opened.batch_pages, pages)
        batch = transfer.part(start, end)
        if end == pages and not begun:  # nothing is left to be done meanwhile
            stored = path.store(opened, batch)
            begun.append((batch, lambda: stored))
        else:
            begun.append((batch, path.begin_store(opened, batch, min(opened.batch_pages, pages - end))))
        return end

    failed: KVStoreError | None = None
    try:
        while begun or (start < pages and failed is None):
            try:
                if start < pages and failed is None:
                    start = handle.move(begin, deadline)
                    batches += 1
                if len(begun) > 1 or start == pages or failed is not None:
                    result += _finish(handle, begun.popleft())
            except (UnavailableError, DeadlineError) as error:
                failed = error
    finally:
        for _, finish in begun:  # another error: what was begun ends all the same
            with contextlib.suppress(KVStoreError):
                finish()
    confirmed = result.stored + result.present + result.refused
    if failed is not None and not confirmed:
        raise failed
    return result + StoreResult(refused=pages - confirmed), batches


def _finish(handle: Handle, begun: _Begun) -> StoreResult:
    """What became of a batch, stored anew when the node came back without knowing the namespace or this client."""
    batch, finish = begun
    try:
        return finish()
    except (UnknownNamespaceError, NotAttachedError):
        return _store(handle, batch)[0]


def _settled(handle: Handle, transfer: Transfer, result: StoreResult) -> StoreResult:
    """The result of several batches: later ones may have pushed out what earlier ones had stored."""
    deadline, pages = transfer.deadline, transfer.page_count
    try:
        if _found_here(handle, transfer) or _touch(handle, transfer) == pages:
            return result
        asked = [(handle.fingerprint, split_hashes(transfer.hashes))]
        tiers = handle.control(lambda control, left: control.lookup(asked, left)[0], deadline)
        here = pages - tiers.count(PageTier.ABSENT)
    except (UnavailableError, DeadlineError):
        return result  # as it was confirmed batch by batch
    lost = max(0, result.stored + result.present - here)
    from_stored = min(lost, result.stored)
    return StoreResult(result.stored - from_stored, result.present - (lost - from_stored), result.refused + lost)


def _found_here(handle: Handle, transfer: Transfer) -> bool:
    """Whether a look without a call finds all pages; then they are also used once more, as a whole."""
    opened, path = handle.now(transfer.deadline)
    try:
        found = path.find(opened, transfer.hashes)
    except NotAttachedError:
        return False
    here = found is not None and found.count(PageTier.ARENA) == transfer.page_count
    return here and path.touch_later(opened, transfer.hashes)


def _touch_loaded(handle: Handle, transfer: Transfer) -> None:
    """As ``_touch``, without a call where there is a way."""
    opened, path = handle.now(transfer.deadline)
    if not path.touch_later(opened, transfer.hashes):
        with contextlib.suppress(UnavailableError, DeadlineError):
            _touch(handle, transfer)


def _touch(handle: Handle, transfer: Transfer) -> int:
    """Use a prefix of several batches once more, as a whole: its head must not count as older than its tail."""
    hashes = split_hashes(transfer.hashes)
    return handle.control(lambda control, left: control.touch(handle.fingerprint, hashes, left), transfer.deadline)
