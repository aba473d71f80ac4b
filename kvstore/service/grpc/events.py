"""The servicer of ``kvstore.v1.Events``: streams which pages are in which tier, first all of them, then changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import grpc

from kvstore.errors import KVStoreError, LimitExceededError
from kvstore.events.ring import Change, PageEvent
from kvstore.namespaces.registry import MOST_NAMESPACES
from kvstore.page_codes import TIER_NAMES
from kvstore.security.grants import READ
from kvstore.service.access.gate import Access
from kvstore.service.calls import ConcurrencyLimit, abort
from kvstore.store.store import Store
from kvstore.store.watch import Complete, Start
from kvstore.v1 import cache_pb2, events_pb2_grpc
from kvstore.v1 import events_pb2 as pb

MOST_WATCHERS = 8
_WATCH = "/kvstore.v1.Events/Watch"
_CHANGES = {Change.STORED: pb.PAGE_CHANGE_STORED, Change.REMOVED: pb.PAGE_CHANGE_REMOVED}
_TIERS = {name: cache_pb2.PageTier.Name(number) for number, name in enumerate(TIER_NAMES)}


class EventsServicer(events_pb2_grpc.EventsServicer):
    """Streams a store's page events, of those namespaces that the caller sees.

    ``instance`` is another number after each start of the node.
    """

    def __init__(self, store: Store, instance: int, access: Access) -> None:
        self._store = store
        self._instance = instance
        self._access = access
        self._limit = ConcurrencyLimit("event streams", MOST_WATCHERS)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End all streams."""
        self._stopping.set()

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Watched]:
        """What is there, then what changes. A caller that does not read stops this thread, and nothing else."""
        try:
            wanted = set(request.fingerprints)
            if len(wanted) > MOST_NAMESPACES:
                raise LimitExceededError(f"{len(wanted)} namespaces, the limit is {MOST_NAMESPACES}")
            shown = self._access.pass_of_call(context)
            sight = _Sight(self._access, shown, wanted)
            with self._limit.slot():
                for told in self._store.follow(sight.sees):
                    grant = self._access.holder(shown)  # it may have been taken away since, or changed
                    self._access.check_right(grant, _WATCH)
                    if self._stopping.is_set() or not context.is_active():
                        return
                    if isinstance(told, Start):
                        # How much happens in others' namespaces is not for a tenant.
                        missed = told.missed if grant.every else min(told.missed, 1)
                        start = pb.WatchStart(instance=self._instance, missed=missed)
                        yield pb.Watched(time=time.time(), start=start)
                    elif isinstance(told, Complete):
                        yield pb.Watched(time=time.time(), complete=pb.WatchComplete())
                    elif told:
                        yield pb.Watched(time=time.time(), events=_events(told))
        except KVStoreError as error:
            abort(context, error)


class _Sight:
    """Which namespaces one caller is told of. One that was seen is seen to its end, since its pages leave behind it;
    but what the token grants may change meanwhile."""

    def __init__(self, access: Access, shown: bytes, wanted: set[bytes]) -> None:
        self._access = access
        self._shown = shown
        self._wanted = wanted
        self._grant = access.holder(shown)
        self._seen: set[bytes] = set()
        """With that grant."""

    def sees(self, fingerprint: bytes) -> bool:
        """Whether this one is the caller's, and wanted."""
        if self._wanted and fingerprint not in self._wanted:
            return False
        grant = self._access.holder(self._shown)
        if grant != self._grant:
            self._grant = grant
            self._seen.clear()
        if READ not in grant.rights:
            return False
        if grant.every or fingerprint in self._seen:
            return True
        if not self._access.sees(grant, fingerprint):
            return False
        if len(self._seen) >= MOST_NAMESPACES:
            self._seen.clear()
        self._seen.add(fingerprint)
        return True


def _events(told: Sequence[PageEvent]) -> pb.PageEvents:
    return pb.PageEvents(
        events=[
            pb.PageEvent(
                change=_CHANGES[event.change],
                tier=_TIERS[event.tier],
                fingerprint=event.fingerprint,
                hashes=b"".join(event.hashes),
                parent=event.parent,
            )
            for event in told
        ]
    )
