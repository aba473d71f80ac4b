"""The requests of one bulk connection (:mod:`kvstore.wire`), one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvstore.errors import FormatError
from kvstore.limits import LONGEST_LEASE
from kvstore.page_codes import TIER_NAMES
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.channel import Channel
from kvstore.wire.frame import (
    NUMBERED,
    Header,
    Kind,
    number_of,
    pack_frame,
    payload_bytes,
)
from kvstore.wire.messages import error_named

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer", pb.PageRun, pb.PrepareStoreReply, pb.StoreCounts)


class BulkRequests:
    """A bulk connection as its client has it. Not safe for threads.

    Attributes:
        channel: the connection.
        good: whether it waits for a request: all of the last answer was received. After any error but one that the node
            answered, it does not; and an exception (a signal's, say) may come anywhere.

    Methods raise :class:`UnavailableError` when the connection broke, :class:`DeadlineError` when the deadline passed,
    :class:`FormatError` when what came makes no sense, and whatever the node answered.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.good = False
        self._numbered = False
        """Whether answers say which request they answer."""
        self._number = 0
        """Of the last request."""

    def begin(self) -> None:
        """Wait for the word that requests may come."""
        self._numbered = self._expect(Kind.READY)[0].milliseconds == NUMBERED
        self.good = True

    def load(self, pages: pb.PageList, into: Sequence[Bytes], tiers: list[str], deadline: float) -> None:
        """Receive the leading pages into place.

        Args:
            pages: which ones.
            into: where each goes.
            tiers: gets the tier of each page that came whole and right, as it comes, also when an error follows.
            deadline: on the clock of ``time.monotonic``.
        """
        self._ask(Kind.LOAD, pb.LoadPages(pages=pages).SerializeToString(), deadline)
        header, message = self._expect(Kind.RUN)
        run = self._parsed(pb.PageRun, message)
        targets = into[: len(run.tiers)]
        if len(run.tiers) > len(into) or header.payload != sum(payload_bytes(1, target.size) for target in targets):
            raise self._nonsense("other pages than were asked for")
        for tier, checksum in zip(run.tiers, self.channel.receive_pages(targets), strict=True):
            if checksum is None or tier >= len(TIER_NAMES):
                return  # in doubt it is a miss; what follows is left where it is, with the connection
            tiers.append(TIER_NAMES[tier] or "")
        self.good = True

    def reserve(self, request: pb.PrepareStoreRequest, deadline: float) -> pb.PrepareStoreReply:
        """Reserve slots."""
        self._ask(Kind.RESERVE, request.SerializeToString(), deadline)
        reply = self._parsed(pb.PrepareStoreReply, self._expect(Kind.RESERVED)[1])
        self.good = True
        return reply

    def put(
        self,
        request: pb.StorePages,
        pages: Sequence[Bytes],
        deadline: float,
        before_last: Callable[[], object] | None = None,
    ) -> None:
        """Send payloads to be published: of a reservation, or with the request that reserves their slots.

        Args:
            request: which pages.
            pages: their payloads.
            deadline: on the clock of ``time.monotonic``.
            before_last: called before the last page is sent; until then none of them is published.
        """
        head = self._head(Kind.PUT, request.SerializeToString(), deadline, pages)
        if before_last is None:
            self._send(pages, head)
        else:
            self._send(pages[:-1], head)
            before_last()
            self._send(pages[-1:])

    def stored(self) -> pb.StoreCounts:
        """What became of them: the answer to ``put``."""
        counts = self._parsed(pb.StoreCounts, self._expect(Kind.STORED)[1])
        self.good = True
        return counts

    def _expect(self, kind: Kind) -> tuple[Header, bytes]:
        """Receive an answer but for its payload."""
        header, message = self.channel.receive()
        if self._numbered and header.milliseconds != self._number:
            raise self._nonsense("another request")
        if header.kind is Kind.FAILED:
            self.good = True
            reason, _, text = message.decode(errors="replace").partition("\n")
            raise error_named(reason, text)
        if header.kind is not kind:
            raise self._nonsense(f"a frame of kind {header.kind.name} where {kind.name} was awaited")
        return header, message

    def _ask(self, kind: Kind, message: bytes, deadline: float) -> None:
        self._send((), self._head(kind, message, deadline))

    def _head(self, kind: Kind, message: bytes, deadline: float, pages: Sequence[Bytes] = ()) -> bytes:
        """The beginning of a request. From now on its answer is awaited."""
        self.good = False
        self.channel.deadline = deadline
        milliseconds = math.ceil(min(max(deadline - time.monotonic(), 0.0), LONGEST_LEASE) * 1000)
        payload = sum(payload_bytes(1, page.size) for page in pages)
        head = pack_frame(kind, message, payload=payload, milliseconds=milliseconds)
        self._number = number_of(head)
        return head

    def _send(self, pages: Sequence[Bytes], head: bytes = b"") -> None:
        for _ in self.channel.send_pages(pages, head=head):
            pass

    def _nonsense(self, what: str) -> FormatError:
        return FormatError(f"the bulk connection answers {what}")

    def _parsed(self, kind: type[Answer], data: bytes) -> Answer:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise self._nonsense("what can't be read") from error
