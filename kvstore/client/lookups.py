"""Lookups in several namespaces of one node: from the mapped arena where it can tell, the rest by one call."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.handle import REOPENINGS, Handle, Session
from kvstore.client.paths.deadline import time_left
from kvstore.client.paths.results import Lookup
from kvstore.errors import LimitExceededError, NotAttachedError, UnknownNamespaceError
from kvstore.hashing import HASH_BYTES
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.page_codes import UNTOLD, PageTier
from kvstore.wire.messages import join_hashes, split_hashes

Queries = Sequence[tuple[Handle, Sequence[bytes]]]
"""Namespaces of one client, each with the block hashes to look up."""


def look_up(session: Session, queries: Queries, deadline: float, *, counts: bool) -> list[Lookup]:
    """One answer for each query. ``counts``: whether this is a lookup that is counted.

    Raises:
        Exception: as :meth:`kvstore.Client.lookup`.
    """
    joined = [join_hashes(hashes) for _, hashes in queries]
    _check_count(sum(len(hashes) for _, hashes in queries), MOST_LOOKUP_PAGES)
    for _ in range(REOPENINGS):
        try:
            answers = _look_up(session, queries, joined, deadline, mapped=True)
        except (UnknownNamespaceError, NotAttachedError):
            for handle, _ in queries:
                handle.open_again(deadline)
        else:
            for handle, _ in queries:
                handle.refresh(deadline)
            break
    else:  # others clear namespaces all the time
        answers = _look_up(session, queries, joined, deadline, mapped=False)
    if counts:
        _count(session, queries, joined, answers)
    return [Lookup.of(tiers) for tiers in answers]


def look_here(session: Session, queries: Queries, *, counts: bool) -> list[Lookup] | None:
    """The same as far as the mapping has the answer: no call is made, nothing waits. None: only a call can tell, and
    nothing is counted."""
    joined = [join_hashes(hashes) for _, hashes in queries]
    answers = []
    for (handle, _), keys in zip(queries, joined, strict=True):
        if handle.current is None:
            return None
        opened, path = handle.current
        try:
            here = path.find(opened, keys)
        except NotAttachedError:  # the node came back another one: a call finds that out, and attaches again
            return None
        if here is None or UNTOLD in here:
            return None
        answers.append(here)
    if counts:
        _count(session, queries, joined, answers)
    return [Lookup.of(tiers) for tiers in answers]


def _count(session: Session, queries: Queries, joined: Sequence[bytes], answers: Sequence[bytes]) -> None:
    for (handle, _), keys, tiers in zip(queries, joined, answers, strict=True):
        session.looked_up(handle.fingerprint, keys, tiers)


def _look_up(
    session: Session, queries: Queries, joined: Sequence[bytes], deadline: float, *, mapped: bool
) -> list[bytes]:
    """One lookup: what can be told without a call (if ``mapped``), and by one call the rest. One byte a page."""
    answers: list[bytes] = []
    asked: list[tuple[bytes, bytes]] = []
    open_answers: list[int] = []
    absent = PageTier.ABSENT
    for (handle, hashes), keys in zip(queries, joined, strict=True):
        opened, path = handle.now(deadline)
        here = path.find(opened, keys) if mapped else None
        if here is None:
            here = bytes([UNTOLD]) * len(hashes)
        if UNTOLD in here:
            open_answers.append(len(answers))
            untold = keys if here.count(UNTOLD) == len(here) else _untold(here, keys)
            asked.append((handle.fingerprint, untold))
        answers.append(here)
    if asked:
        told = _ask(session, asked, deadline)
        for place, rest in zip(open_answers, map(iter, told), strict=True):
            answers[place] = bytes(next(rest, absent) if tier == UNTOLD else tier for tier in answers[place])
    return answers


def _untold(here: bytes, keys: bytes) -> bytes:
    """The joined hashes of those pages of which nothing could be told."""
    places = [place for place, tier in enumerate(here) if tier == UNTOLD]
    return b"".join([keys[place * HASH_BYTES : (place + 1) * HASH_BYTES] for place in places])


def _ask(session: Session, asked: Sequence[tuple[bytes, bytes]], deadline: float) -> list[bytes]:
    """The call, by the shortest way that there is."""
    told = session.path.ask_where(asked, deadline) if session.path is not None else None
    if told is not None:
        return told
    return session.control.lookup(
        [(fingerprint, split_hashes(keys)) for fingerprint, keys in asked], time_left(deadline)
    )


def checked_hashes(hashes: Sequence[bytes], limit: int) -> bytes:
    """The block hashes of one call, joined.

    Raises:
        InvalidRequestError: a hash that has not 32 bytes.
        LimitExceededError: more than ``limit`` of them.
    """
    joined = join_hashes(hashes)
    _check_count(len(hashes), limit)
    return joined


def _check_count(pages: int, limit: int) -> None:
    if pages > limit:
        raise LimitExceededError(f"{pages} pages in one call, the limit is {limit}")
