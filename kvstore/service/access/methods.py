"""The table of rights: what each call needs, and which namespaces its request names.

A method that is not listed is for callers with every right, of every tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvstore.errors import LimitExceededError
from kvstore.limits import MOST_QUERIES
from kvstore.namespaces.registry import MOST_NAMESPACES
from kvstore.security.grants import (
    ADMIN,
    READ,
    WRITE,
    Grant,
)
from kvstore.wire.messages import LOAD_STREAM, STORE_STREAM


def _none(request: Any) -> Iterable[bytes]:
    return ()


def _own(request: Any) -> Iterable[bytes]:
    return (request.fingerprint,)


def _of_pages(request: Any) -> Iterable[bytes]:
    return (request.pages.fingerprint,)


def _of_completed(request: Any) -> Iterable[bytes]:
    """That of a reservation which was made ahead; others' pages were named when they were reserved."""
    return (request.pages.fingerprint,) if request.outcomes or request.HasField("pages") else ()


def _of_queries(request: Any) -> Iterable[bytes]:
    return [query.fingerprint for query in request.queries]


def _watched(request: Any) -> Iterable[bytes]:
    return request.fingerprints  # type: ignore[no-any-return]


ALL_OF_IT = "everything"
"""Instead of one right: every one of them, for every tenant."""


class Needs(NamedTuple):
    """What a call needs."""

    right: str
    fingerprints: Callable[[Any], Iterable[bytes]] = _none
    """Given the request, the namespaces in it. A raw stream's are looked at where it is read."""
    every: bool = False
    """Whether it concerns all tenants, so that a token of one of them is not enough."""

    def met_by(self, grant: Grant) -> bool:
        """Whether a caller may do that at all."""
        if self.right == ALL_OF_IT:
            return grant.all_of_it
        return self.right in grant.rights and (grant.every or not self.every)


_CACHE, _BULK = "/kvstore.v1.Cache/", "/kvstore.v1.Bulk/"
REPORT_USE = _CACHE + "ReportUse"
NEEDS: dict[str, Needs] = {
    # Who maps the arena reads and writes all of it.
    _CACHE + "Attach": Needs(ALL_OF_IT),
    _CACHE + "OpenNamespace": Needs(READ),
    _CACHE + "Lookup": Needs(READ, _of_queries),
    _CACHE + "Explain": Needs(READ, _own),
    _CACHE + "PrepareStore": Needs(WRITE, _of_pages),
    _CACHE + "CompleteStore": Needs(WRITE, _of_completed),
    _CACHE + "PrepareLoad": Needs(READ, _of_pages),
    _CACHE + "CompleteLoad": Needs(READ),
    _CACHE + "Touch": Needs(READ, _own),
    REPORT_USE: Needs(READ),
    _CACHE + "Evict": Needs(WRITE, _own),
    _CACHE + "Clear": Needs(ADMIN, _own),
    _CACHE + "Pin": Needs(ADMIN, _of_pages),
    _CACHE + "Unpin": Needs(ADMIN, _own),
    # It waits for, and counts, everybody's pages.
    _CACHE + "Flush": Needs(WRITE, every=True),
    _CACHE + "Status": Needs(READ),
    _BULK + "Open": Needs(READ),
    _BULK + "Settle": Needs(WRITE),
    "/kvstore.v1.Events/Watch": Needs(READ, _watched),
    LOAD_STREAM: Needs(READ, _of_pages),
    STORE_STREAM: Needs(WRITE),
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Needs(READ),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Needs(READ),
}
"""By the call's path."""


def needs_of(method: str) -> Needs:
    """What a call of this path needs."""
    return NEEDS.get(method, Needs(ALL_OF_IT))


def most_parts(request: Any) -> None:
    """Whether a request has no more parts than any call takes.

    Raises:
        LimitExceededError: it has.
    """
    for parts, most, what in (
        (getattr(request, "queries", ()), MOST_QUERIES, "namespaces in one lookup"),
        (getattr(request, "uses", ()), MOST_QUERIES, "uses in one report"),
        (getattr(request, "lookups", ()), MOST_QUERIES, "counts of lookups in one report"),
        (request.used.uses if hasattr(request, "used") else (), MOST_QUERIES, "uses in one report"),
        (request.used.lookups if hasattr(request, "used") else (), MOST_QUERIES, "counts of lookups in one report"),
        (getattr(request, "fingerprints", ()), MOST_NAMESPACES, "namespaces"),
    ):
        if len(parts) > most:
            raise LimitExceededError(f"{len(parts)} {what}, the limit is {most}")
