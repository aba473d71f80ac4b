"""The requests of one bulk connection (:mod:`kvstore.bulk`), one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvstore.answers import LONGEST_TICKET, TIER_NAMES
from kvstore.bulk.channel import Channel
from kvstore.bulk.frame import Header, Kind, pack_frame, payload_bytes
from kvstore.errors import FormatError
from kvstore.hashing import HASH_BYTES
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import error_named

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer", pb.PageRun, pb.PrepareStoreReply, pb.StoreCounts)


class BulkRequests:
    """A bulk connection as its client has it. Not safe for threads.

    Attributes:
        channel: the connection.
        good: whether it waits for a request: after any error but one that the node answered, it does not.

    Methods raise :class:`UnavailableError` when the connection broke, :class:`DeadlineError` when the deadline passed,
    :class:`FormatError` when what came makes no sense, and whatever the node answered.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.good = False

    def load(self, batches: Sequence[pb.PageList], into: Sequence[Bytes], tiers: list[str], deadline: float) -> None:
        """Receive the leading pages into place.

        Args:
            batches: which ones; each batch is asked for before the one before it is here.
            into: where each goes.
            tiers: gets the tier of each page that came whole and right, as it comes, also when an error follows.
            deadline: on the clock of ``time.monotonic``.
        """
        asked = [pb.LoadPages(pages=batch).SerializeToString() for batch in batches]
        self._ask(Kind.LOAD, asked[0], deadline)
        start = 0
        for place, batch in enumerate(batches):
            more = place + 1 < len(batches)
            if more:
                self._ask(Kind.LOAD, asked[place + 1], deadline)
            end = start + len(batch.hashes) // HASH_BYTES
            try:
                whole = self._receive_run(into[start:end], tiers)
            finally:
                good, self.good = self.good, self.good and not more
            if not whole:
                if good and more:  # the next batch is on its way: nobody wants it
                    self.good = not self.expect(Kind.RUN)[0].payload
                return
            start = end

    def _receive_run(self, into: Sequence[Bytes], tiers: list[str]) -> bool:
        """The answer to one batch. Returns whether all of its pages came."""
        header, message = self.expect(Kind.RUN)
        run = self._parsed(pb.PageRun, message)
        targets = into[: len(run.tiers)]
        if len(run.tiers) > len(into) or header.payload != sum(payload_bytes(1, target.size) for target in targets):
            raise self._nonsense("other pages than were asked for")
        self.good = False
        for tier, checksum in zip(run.tiers, self.channel.receive_pages(targets), strict=True):
            if checksum is None or tier >= len(TIER_NAMES):
                return False  # in doubt it is a miss; what follows is left where it is, with the connection
            tiers.append(TIER_NAMES[tier] or "")
        self.good = True
        return len(targets) == len(into)

    def reserve(self, request: pb.PrepareStoreRequest, deadline: float) -> pb.PrepareStoreReply:
        """Reserve slots."""
        self._ask(Kind.RESERVE, request.SerializeToString(), deadline)
        return self._parsed(pb.PrepareStoreReply, self.expect(Kind.RESERVED)[1])

    def put(self, request: pb.StorePages, pages: Sequence[Bytes], deadline: float) -> None:
        """Send payloads to be published: of a reservation, or with the request that reserves their slots."""
        self._ask(Kind.PUT, request.SerializeToString(), deadline, pages)

    def stored(self) -> pb.StoreCounts:
        """What became of them: the answer to ``put``."""
        return self._parsed(pb.StoreCounts, self.expect(Kind.STORED)[1])

    def expect(self, kind: Kind) -> tuple[Header, bytes]:
        """Receive an answer; the connection is good behind it, but for its payload."""
        header, message = self.channel.receive()
        if header.kind is Kind.FAILED:
            self.good = True
            reason, _, text = message.decode(errors="replace").partition("\n")
            raise error_named(reason, text)
        if header.kind is not kind:
            raise self._nonsense(f"a frame of kind {header.kind.name} where {kind.name} was awaited")
        self.good = True
        return header, message

    def _ask(self, kind: Kind, message: bytes, deadline: float, pages: Sequence[Bytes] = ()) -> None:
        self.good = False
        self.channel.deadline = deadline
        milliseconds = math.ceil(min(max(deadline - time.monotonic(), 0.0), LONGEST_TICKET) * 1000)
        payload = sum(payload_bytes(1, page.size) for page in pages)
        head = pack_frame(kind, message, payload=payload, milliseconds=milliseconds)
        for _ in self.channel.send_pages(pages, head=head):
            pass

    def _nonsense(self, what: str) -> FormatError:
        self.good = False
        return FormatError(f"the bulk connection answers {what}")

    def _parsed(self, kind: type[Answer], data: bytes) -> Answer:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise self._nonsense("what can't be read") from error
