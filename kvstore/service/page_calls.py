"""Lookups, and the calls around a client's copies (prepare and complete of stores and loads), the same for gRPC and
local sockets."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from kvstore.arena.format import FRAME_BYTES
from kvstore.errors import InvalidRequestError, LimitExceededError
from kvstore.limits import MOST_QUERIES
from kvstore.page_codes import as_known
from kvstore.store.leases import NODE, Part
from kvstore.store.results import Held, Reserved
from kvstore.store.store import Store
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.messages import split_hashes


class PageCalls:
    """Answers these calls from a store.

    Every method raises the store's errors.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        """Which pages are here."""
        queries = [(query.fingerprint, split_hashes(query.hashes)) for query in request.queries]
        found = self._store.lookup(queries)
        return pb.LookupReply(
            tiers=[as_known(tiers, query.newest_tier) for tiers, query in zip(found, request.queries, strict=True)]
        )

    def prepare_store(self, request: pb.PrepareStoreRequest) -> pb.PrepareStoreReply:
        """Reserve slots."""
        self.note_use(request.used)
        owner = self._owner(request.client)
        if not request.ahead:
            return reserve(self._store, owner, request)
        if request.pages.hashes:
            raise InvalidRequestError("slots are reserved either for the pages that are named, or ahead")
        reserved = self._store.reserve_ahead(
            owner, request.pages.fingerprint, request.ahead, request.ttl_ms / 1000, evict=request.ahead_evict
        )
        return _reserved(reserved)

    def complete_store(self, request: pb.CompleteStoreRequest) -> pb.StoreCounts:
        """Publish or give up."""
        owner = self._owner(request.client)
        self.note_use(request.used)
        part = Part(request.part_at, request.part_slots) if request.publish else None
        if request.outcomes:
            pages, hashes = request.pages, split_hashes(request.pages.hashes)
            done = self._store.complete_ahead(
                owner, request.ticket, pages.fingerprint, hashes, request.outcomes, request.parent, part
            )
        else:
            # What a client says it wrote from afar came by the payload stream, or it did not come.
            publish = request.publish and owner != NODE
            done = self._store.complete_store(owner, request.ticket, publish=publish, part=part)
        return pb.StoreCounts(stored=done.stored, present=done.present, refused=done.refused)

    def catch_up(self) -> None:
        """Do what calls have left for behind their answers."""
        self._store.catch_up()

    def prepare_load(self, request: pb.PrepareLoadRequest) -> pb.PrepareLoadReply:
        """Promote pages to the arena and hold them."""
        owner = self._owner(request.client)
        self.note_use(request.used)
        held = self._store.prepare_load(
            owner, request.pages.fingerprint, split_hashes(request.pages.hashes), request.ttl_ms / 1000
        )
        return _held(held, request.pages.newest_tier)

    def load_parts(self, request: pb.PrepareLoadRequest) -> Generator[tuple[pb.PrepareLoadReply, bool]]:
        """Likewise, in parts as they are promoted. Yields also whether it is the last one."""
        owner = self._owner(request.client)
        self.note_use(request.used)
        hashes = split_hashes(request.pages.hashes)
        with closing(self._store.load_parts(owner, request.pages.fingerprint, hashes, request.ttl_ms / 1000)) as parts:
            for part, last in parts:
                yield _held(part, request.pages.newest_tier), last

    def complete_load(self, request: pb.CompleteLoadRequest) -> pb.CompleteLoadReply:
        """End a hold."""
        return pb.CompleteLoadReply(valid=self._store.complete_load(self._owner(request.client), request.ticket))

    def note_use(self, report: pb.UseReport) -> int:
        """Learn what a client looked up and read. Returns how many of the pages read are in the arena."""
        for parts, what in ((report.uses, "uses"), (report.lookups, "counts of lookups")):
            if len(parts) > MOST_QUERIES:
                raise LimitExceededError(f"{len(parts)} {what} in one report, the limit is {MOST_QUERIES}")
        for each in report.lookups:
            self._store.note_lookups(each.fingerprint, each.asked, (each.arena, each.disk, each.redis, each.objects))
        return sum(
            self._store.note_use(use.fingerprint, split_hashes(use.hashes), read=use.read, missed=use.missed)
            for use in report.uses
        )

    def _owner(self, client: int) -> int:
        return self._store.owner_of(client) if client else NODE


def reserve(store: Store, owner: int, request: pb.PrepareStoreRequest) -> pb.PrepareStoreReply:
    """Reserve slots for an owner, by whatever connection the request came."""
    reserved = store.prepare_store(
        owner,
        request.pages.fingerprint,
        split_hashes(request.pages.hashes),
        request.ttl_ms / 1000,
        direct=owner != NODE,
        parent=request.parent,
    )
    return _reserved(reserved)


def _reserved(reserved: Reserved) -> pb.PrepareStoreReply:
    return pb.PrepareStoreReply(
        ticket=reserved.lease,
        outcomes=reserved.outcomes,
        offsets=[frame * FRAME_BYTES for frame in reserved.frames],
    )


def _held(held: Held, newest_tier: int) -> pb.PrepareLoadReply:
    offsets = [frame * FRAME_BYTES for frame in held.frames]
    return pb.PrepareLoadReply(ticket=held.lease, tiers=as_known(held.tiers, newest_tier), offsets=offsets)
