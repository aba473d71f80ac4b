"""The servicer of ``kvstore.v1.Cache``: lookups, reservations, loads, and the management of namespaces."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from kvstore.errors import InvalidRequestError
from kvstore.layout import Layout
from kvstore.page_codes import as_known
from kvstore.service.access.gate import Access
from kvstore.service.calls import answering
from kvstore.service.page_calls import PageCalls
from kvstore.status import Status, seen_by
from kvstore.store.store import Store
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore.wire.messages import split_hashes


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """Answers ``kvstore.v1.Cache`` from a store; whether the caller may make the call was decided before.

    The status's ``instance`` tells this start of the node from any other; ``socket`` is the one that it serves on.
    """

    def __init__(self, store: Store, status: Callable[[], Status], access: Access, socket: Path) -> None:
        self._store = store
        self._access = access
        self._calls = PageCalls(store)
        arena, folder = store.arena.directory.absolute(), socket.absolute().parent
        self._beside_socket = str(arena.relative_to(folder)) if arena.is_relative_to(folder) else ""
        self._node_status = status
        self._instance = status().instance

    @answering
    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        """Share the arena with a client on this host."""
        if not context.peer().startswith("unix:"):
            raise InvalidRequestError(f"a client can attach over the Unix socket only, not from {context.peer()}")
        return pb.AttachReply(instance=self._instance, client=self._store.attach(request.lock_name, request.name))

    @answering
    def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: grpc.ServicerContext) -> pb.OpenNamespaceReply:
        """Name the layout of a client's pages."""
        edition = self._store.arena.edition  # before: a namespace that is dropped meanwhile is then out of date
        every = self._access.caller(context).every
        layout, durability = Layout.from_json(request.layout), request.durability
        known = self._store.open_namespace(layout, durability, label=request.label, of_tenant=not every)
        batch_pages = self._store.batch_pages(known)
        if not every:  # who can't map the arena has no use for the rest
            return pb.OpenNamespaceReply(fingerprint=known.fingerprint, batch_pages=batch_pages)
        return pb.OpenNamespaceReply(
            fingerprint=known.fingerprint,
            batch_pages=batch_pages,
            arena_directory=str(self._store.arena.directory),
            arena_beside_socket=self._beside_socket,
            number=known.number,
            edition=edition,
        )

    @answering
    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        """Which pages are here."""
        return self._calls.lookup(request)

    @answering
    def Explain(self, request: pb.PageList, context: grpc.ServicerContext) -> pb.ExplainReply:
        """Which pages are here, and why not."""
        tiers, absences = self._store.explain(request.fingerprint, split_hashes(request.hashes))
        return pb.ExplainReply(tiers=as_known(tiers, request.newest_tier), absences=absences)

    @answering
    def PrepareStore(self, request: pb.PrepareStoreRequest, context: grpc.ServicerContext) -> pb.PrepareStoreReply:
        """Reserve slots."""
        return self._calls.prepare_store(request)

    @answering
    def CompleteStore(self, request: pb.CompleteStoreRequest, context: grpc.ServicerContext) -> pb.StoreCounts:
        """Publish or give up."""
        return self._calls.complete_store(request)

    @answering
    def PrepareLoad(self, request: pb.PrepareLoadRequest, context: grpc.ServicerContext) -> pb.PrepareLoadReply:
        """Promote pages to the arena and hold them."""
        return self._calls.prepare_load(request)

    @answering
    def CompleteLoad(self, request: pb.CompleteLoadRequest, context: grpc.ServicerContext) -> pb.CompleteLoadReply:
        """End a hold."""
        return self._calls.complete_load(request)

    @answering
    def Touch(self, request: pb.PageList, context: grpc.ServicerContext) -> pb.PageCount:
        """Mark pages as used."""
        return pb.PageCount(pages=self._store.touch(request.fingerprint, split_hashes(request.hashes)))

    @answering
    def ReportUse(self, request: pb.UseReport, context: grpc.ServicerContext) -> pb.PageCount:
        """Learn what a client read."""
        return pb.PageCount(pages=self._calls.note_use(request))

    @answering
    def Evict(self, request: pb.PageList, context: grpc.ServicerContext) -> pb.PageCount:
        """Drop pages."""
        hashes = split_hashes(request.hashes)
        return pb.PageCount(pages=self._store.evict(request.fingerprint, hashes, pinned=request.pinned))

    @answering
    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PageCount:
        """Keep pages in the arena."""
        hashes = split_hashes(request.pages.hashes)
        return pb.PageCount(pages=self._store.pin(request.pages.fingerprint, hashes, request.seconds))

    @answering
    def Unpin(self, request: pb.PageList, context: grpc.ServicerContext) -> pb.PageCount:
        """End that."""
        return pb.PageCount(pages=self._store.unpin(request.fingerprint, split_hashes(request.hashes)))

    @answering
    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.PageCount:
        """Drop a namespace."""
        return pb.PageCount(pages=self._store.clear(request.fingerprint))

    @answering
    def Flush(self, request: pb.FlushRequest, context: grpc.ServicerContext) -> pb.FlushReply:
        """Make everything durable."""
        remaining = context.time_remaining()
        deadline = time.monotonic() + (remaining if remaining is not None else 3600.0)
        return pb.FlushReply(pages=self._store.flush(deadline))

    @answering
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        """What this node holds and has done."""
        status = seen_by(self._node_status(), self._access.caller(context))
        return pb.StatusReply(
            version=status.version,
            instance=status.instance,
            pid=status.pid,
            uptime_seconds=status.uptime_seconds,
            tiers=[pb.TierStatus(**dataclasses.asdict(tier)) for tier in status.tiers],
            namespaces=[pb.NamespaceStatus(**dataclasses.asdict(each)) for each in status.namespaces],
            clients=status.clients,
            arena_directory=status.arena_directory,
            disk_directory=status.disk_directory,
            time=status.time,
            hash_check=status.hash_check,
            connected=[pb.ClientStatus(**dataclasses.asdict(each)) for each in status.connected],
            certificate_begins=status.certificate_begins,
            certificate_ends=status.certificate_ends,
            lookups=pb.LookupCount(**dataclasses.asdict(status.lookups)),
            core=status.core,
        )
