"""Other engines' nodes that pages may be loaded from: those of the configuration, by name, and no others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.client.connect import TIMEOUT
from kvstore.client.environment import connect_by_environment
from kvstore.connector.disagg.ticket import difference
from kvstore.errors import ConfigError, InvalidRequestError, KVStoreError
from kvstore.layout import Layout

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from kvstore import Client, Namespace

_logger = logging.getLogger("kvstore.connector")


class Peers:
    """Clients of the nodes at these URLs, by node id. Nothing is asked of them before somebody does; each may be away.
    ``name`` is what they call this client, ``label`` what they call its model.

    Raises:
        ConfigError: a URL, or one of the files, can't be used.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        environment: Mapping[str, str],
        traces: TracerProvider | None = None,
        timeout: float = TIMEOUT,
        name: str = "",
        label: str = "",
    ) -> None:
        self._label = label
        self._clients = clients_of("peers", urls, environment, traces, timeout, name)

    @property
    def names(self) -> list[str]:
        """Node ids."""
        return list(self._clients)

    def namespaces(self, layouts: Sequence[Layout]) -> dict[str, list[Namespace]]:
        """By node id, where the pages of these groups are, of one rank."""
        return {
            node: [client.namespace(layout, label=self._label, lazy=True) for layout in layouts]
            for node, client in self._clients.items()
        }

    def ranks(self, layouts: Sequence[Sequence[Layout]]) -> dict[str, tuple[Client, list[list[Namespace]]]]:
        """By node id, the client, and where the pages are, rank by rank."""
        return {
            node: (
                client,
                [[client.namespace(layout, label=self._label, lazy=True) for layout in of_rank] for of_rank in layouts],
            )
            for node, client in self._clients.items()
        }

    def compare(self, layouts: Sequence[Layout]) -> None:
        """Says in the log where engines at a peer keep this model in a way that can't be read here, as with another
        number of ranks: their tickets will be refused. Asks in the background, once."""
        if self._clients:
            threading.Thread(target=self._compare, args=(layouts[0],), name="kvstore-peers", daemon=True).start()

    def close(self) -> None:
        """Lets go of them."""
        for client in self._clients.values():
            client.close()

    def _compare(self, mine: Layout) -> None:
        for node, client in self._clients.items():
            try:
                theirs = [namespace.layout for namespace in client.status().namespaces]
            except KVStoreError as error:
                _logger.warning(
                    "peer %s can't be asked yet; what it has will be loaded when it is there: %s", node, error
                )
                continue
            if words := foreign(theirs, mine):
                _logger.warning("tickets of engines at %s will be refused, and prompts computed: %s", node, words)


def clients_of(
    option: str,
    urls: Mapping[str, str],
    environment: Mapping[str, str],
    traces: TracerProvider | None = None,
    timeout: float = TIMEOUT,
    name: str = "",
) -> dict[str, Client]:
    """Clients of the nodes that an option names, with the credentials in ``KVSTORE_CONNECT_*``, seconds for a call, and
    what they call themselves. Nothing is asked yet.

    Raises:
        ConfigError: a URL, or one of the files, can't be used.
    """
    clients = {}
    for node, url in urls.items():
        if not node or url.startswith("embedded:"):
            raise ConfigError(f"{option}: {node!r}: {url!r} is not the name and the URL of a node")
        try:
            clients[node] = connect_by_environment(url, environment, traces, timeout, name)
        except KVStoreError as error:
            raise ConfigError(f"{option}: {node!r}: {error}") from error
    return clients


def foreign(theirs: Sequence[str], mine: Layout) -> str:
    """In what layouts at a node (JSON) of the same model differ; nothing if one is the same, or none is there."""
    alike = []
    for text in theirs:
        try:
            layout = Layout.from_json(text)
        except InvalidRequestError:
            continue  # of another version
        if layout == mine:
            return ""
        if (layout.model, layout.revision, layout.group, layout.tenant) == (
            mine.model,
            mine.revision,
            mine.group,
            mine.tenant,
        ):
            alike.append(text)
    return difference(alike[0], mine) if alike else ""
