"""Which namespaces the console lists: those that a filter finds, sorted by a column, so many at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore.errors import InvalidRequestError
from kvstore.status import NamespaceStatus

MOST_LISTED = 25
"""Most namespaces of one answer."""
_FOUND = ("found_arena", "found_disk", "found_redis", "found_objects")


def _looked_up(each: NamespaceStatus) -> float:
    return each.counters.get("looked_up", math.nan)


def _hit_ratio(each: NamespaceStatus) -> float:
    found = [each.counters.get(name, math.nan) for name in _FOUND[:-1]]
    return (sum(found) + each.counters.get(_FOUND[-1], 0)) / _looked_up(each) if _looked_up(each) else math.nan


_COLUMNS: Mapping[str, Callable[[NamespaceStatus], float | str]] = {
    "name": lambda each: each.name.lower(),
    **{tier: lambda each, tier=tier: each.used_bytes.get(tier, 0) for tier in ("arena", "disk", "redis", "objects")},  # type: ignore[misc]
    "hits": _hit_ratio,
    "asked": _looked_up,
    "idle": lambda each: each.idle_seconds,
    "size": lambda each: sum(each.used_bytes.values()),
}


class Wanted(NamedTuple):
    """Which part of which order is asked for."""

    sort: str = "size"
    descending: bool = True
    filter: str = ""
    first: int = 0

    @classmethod
    def parse(cls, query: Mapping[str, Sequence[str]]) -> Wanted:
        """From a query of a page: ``sort``, ``order`` (``asc`` or ``desc``), ``filter``, ``from``.

        Raises:
            InvalidRequestError: there is no such column or order, or no such place.
        """
        given = {name: values[-1] for name, values in query.items()}
        sort, order, first = given.get("sort", "size"), given.get("order", "desc"), given.get("from", "0")
        if sort not in _COLUMNS:
            raise InvalidRequestError(f"sort is {sort!r}, it is one of {', '.join(_COLUMNS)}")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order is {order!r}, it is asc or desc")
        if not (first.isascii() and first.isdigit() and len(first) <= 9):
            raise InvalidRequestError(f"from is {first!r}, it is the number of namespaces to pass over")
        return cls(sort, order == "desc", given.get("filter", "").lower(), int(first))

    def among(self, namespaces: Sequence[NamespaceStatus]) -> tuple[list[NamespaceStatus], int]:
        """The namespaces that are asked for, at most ``MOST_LISTED``, and how many the filter finds.

        A filter finds what has it in its name or in a label, whatever its case, or begins its fingerprint. What has
        nothing in the column stands at the end either way.
        """
        found = [
            each
            for each in namespaces
            if any(self.filter in name.lower() for name in (each.name, *each.labels))
            or each.fingerprint.hex().startswith(self.filter)
        ]
        value = _COLUMNS[self.sort]
        found.sort(key=lambda each: each.name.lower())
        nothing = [each for each in found if value(each) != value(each)]
        with_value = [each for each in found if value(each) == value(each)]
        with_value.sort(key=value, reverse=self.descending)
        return [*with_value, *nothing][self.first : self.first + MOST_LISTED], len(found)


def row_of(each: NamespaceStatus) -> dict[str, object]:
    """What the list says of a namespace."""
    return {
        "fingerprint": each.fingerprint.hex(),
        "name": each.name,
        "labels": list(each.labels),
        "used": dict(each.used_bytes),
        "idle": each.idle_seconds,
        "counters": dict(each.counters),
    }


def details_of(each: NamespaceStatus) -> dict[str, object]:
    """Everything that a node says of a namespace."""
    return row_of(each) | {
        "page_bytes": each.page_bytes,
        "arena_pages": each.arena_pages,
        "quota": dict(each.quota_bytes),
        "durability": each.durability,
        "pinned": each.pinned_pages,
        "age": each.age_seconds,
        "layout": json.loads(each.layout),
    }
