"""Tracing: the client whose calls are OpenTelemetry spans, as :func:`kvstore.connect` with ``traces`` gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.client.client import Client
from kvstore.client.handle import Handle
from kvstore.client.namespace import Namespace
from kvstore.client.paths.buffers import Pages
from kvstore.client.paths.path import Control, Path
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.results import Lookup, StoreResult
from kvstore.tracing import ClientSpans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class TracedClient(Client):
    """A :class:`Client` whose calls are spans of ``provider``."""

    def __init__(
        self,
        url: str,
        control: Control,
        timeout: float,
        make_path: Callable[[str, float], Path],
        provider: TracerProvider,
    ) -> None:
        super().__init__(url, control, timeout, make_path)
        self._spans = ClientSpans(provider)

    def lookup(self, queries: Sequence[tuple[Namespace, Sequence[bytes]]], *, counts: bool = True) -> list[Lookup]:
        """As of :class:`Client`."""
        with self._spans.span("kvstore lookup", sum(len(hashes) for _, hashes in queries)) as span:
            found = super().lookup(queries, counts=counts)
            span.set_attribute("kvstore.pages.found", sum(each.prefix for each in found))
            return found

    def _make_namespace(self, handle: Handle) -> Namespace:
        return _TracedNamespace(handle, self._spans)


class _TracedNamespace(Namespace):
    def __init__(self, handle: Handle, spans: ClientSpans) -> None:
        super().__init__(handle)
        self._spans = spans

    def lookup(self, hashes: Sequence[bytes], *, counts: bool = True) -> Lookup:
        """As of :class:`Namespace`."""
        with self._spans.span("kvstore lookup", len(hashes)) as span:
            found = super().lookup(hashes, counts=counts)
            span.set_attribute("kvstore.pages.found", found.prefix)
            return found

    def store(self, hashes: Sequence[bytes], pages: Pages, *, parent: bytes = b"") -> StoreResult:
        """As of :class:`Namespace`."""
        with self._spans.span("kvstore store", len(hashes)) as span:
            result = super().store(hashes, pages, parent=parent)
            for name in ("stored", "present", "refused"):
                span.set_attribute(f"kvstore.pages.{name}", getattr(result, name))
            return result

    def load(self, hashes: Sequence[bytes], into: Pages, *, counts: bool = True) -> int:
        """As of :class:`Namespace`."""
        with self._spans.span("kvstore load", len(hashes)) as span:
            loaded = super().load(hashes, into, counts=counts)
            span.set_attribute("kvstore.pages.loaded", loaded)
            return loaded

    def prepare_store(self, hashes: Sequence[bytes], *, parent: bytes = b"") -> PendingStore:
        """As of :class:`Namespace`."""
        with self._spans.span("kvstore prepare_store", len(hashes)):
            return super().prepare_store(hashes, parent=parent)

    def prepare_load(self, hashes: Sequence[bytes], *, counts: bool = True) -> PendingLoad:
        """As of :class:`Namespace`."""
        with self._spans.span("kvstore prepare_load", len(hashes)):
            return super().prepare_load(hashes, counts=counts)

    def borrow(self, hashes: Sequence[bytes], *, counts: bool = True) -> PendingLoad:
        """As of :class:`Namespace`."""
        with self._spans.span("kvstore borrow", len(hashes)):
            return super().borrow(hashes, counts=counts)
