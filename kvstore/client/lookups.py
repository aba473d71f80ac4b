"""Lookups in several namespaces of one node: from the mapped arena where it can tell, the rest by one call."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.handle import REOPENINGS, Handle, Session
from kvstore.client.paths.deadline import time_left
from kvstore.client.paths.results import Lookup
from kvstore.errors import LimitExceededError, NotAttachedError, UnknownNamespaceError
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.page_codes import PageTier
from kvstore.wire.messages import join_hashes

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
            here, complete = path.find(opened, keys) or (b"", False)
        except NotAttachedError:  # the node came back another one: a call finds that out, and attaches again
            return None
        if not complete:
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
    asked: list[tuple[bytes, Sequence[bytes]]] = []
    open_answers: list[int] = []
    nowhere = PageTier.ABSENT
    for (handle, hashes), keys in zip(queries, joined, strict=True):
        opened, path = handle.now(deadline)
        here, complete = (path.find(opened, keys) if mapped else None) or (bytes(len(hashes)), False)
        if not complete and hashes:
            open_answers.append(len(answers))
            absent = [each for each, tier in zip(hashes, here, strict=True) if tier == nowhere]
            asked.append((handle.fingerprint, absent))
        answers.append(here)
    if asked:
        told = session.control.lookup(asked, time_left(deadline))
        for place, rest in zip(open_answers, map(iter, told), strict=True):
            answers[place] = bytes(tier or next(rest, nowhere) for tier in answers[place])
    return answers


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
