"""Nodes of an engine whose ranks run on several hosts, each with a node of its own: asked as if they were one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from kvstore.client.paths.results import Lookup

if TYPE_CHECKING:
    from kvstore import Client, Namespace
    from kvstore.layout import Layout

    Queries = Sequence[tuple[Namespace, Sequence[bytes]]]


class NodeClient(Protocol):
    """Where pages are looked up: a client of one node, or :class:`RankNodes`."""

    def lookup(self, queries: Queries, *, counts: bool = True) -> list[Lookup]:
        """As :meth:`kvstore.Client.lookup`."""
        ...

    def lookup_here(self, queries: Queries, *, counts: bool = True) -> list[Lookup] | None:
        """As :meth:`kvstore.Client.lookup_here`."""
        ...


class RankNodes:
    """One call a node answers for all of its ranks; all nodes are called at the same time.

    Args:
        own: client of the node of this host, closed by whoever made it.
        others: the same of other hosts, by host name.
        label: what nodes call the engine's model.
    """

    def __init__(self, own: Client, others: dict[str, Client], label: str = "") -> None:
        self._label = label
        self._own = own
        self._others = others
        self._client_of: dict[Namespace, Client] = {}
        self._threads = ThreadPoolExecutor(max(1, len(others)), "kvstore-rank-nodes")

    def namespaces(self, host: str, layouts: Sequence[Layout]) -> list[Namespace]:
        """Where the pages of a rank are, by group; a host without a node of its own has this one's."""
        client = self._others.get(host, self._own)
        made = [client.namespace(layout, label=self._label, lazy=True) for layout in layouts]
        self._client_of.update(dict.fromkeys(made, client))
        return made

    def lookup(self, queries: Queries, *, counts: bool = True) -> list[Lookup]:
        """Which pages are there, in the order of the queries. Errors as :meth:`kvstore.Client.lookup`: one node that
        fails leaves nothing to be said."""
        places: dict[Client, list[int]] = {}
        for place, (namespace, _) in enumerate(queries):
            places.setdefault(self._client_of[namespace], []).append(place)
        asked = [(client, [queries[place] for place in of_client]) for client, of_client in places.items()]
        calls = [self._threads.submit(client.lookup, theirs, counts=counts) for client, theirs in asked[1:]]
        answers = [client.lookup(theirs, counts=counts) for client, theirs in asked[:1]] + [
            call.result() for call in calls
        ]
        answered = {
            place: lookup
            for of_client, lookups in zip(places.values(), answers, strict=True)
            for place, lookup in zip(of_client, lookups, strict=True)
        }
        return [answered[place] for place in range(len(queries))]

    def lookup_here(self, queries: Queries, *, counts: bool = True) -> list[Lookup] | None:
        """What the node of this host shows without a call, if it has nothing: then it does not matter what others have.
        None: only :meth:`lookup` can tell."""
        mine = [place for place, (namespace, _) in enumerate(queries) if self._client_of[namespace] is self._own]
        shown = self._own.lookup_here([queries[place] for place in mine], counts=counts) if mine else None
        if shown is None or any(any(lookup.present) for lookup in shown):
            return None
        return [Lookup(0, (False,) * len(hashes), (None,) * len(hashes)) for _, hashes in queries]

    def close(self) -> None:
        """Stops its threads, behind the calls under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
