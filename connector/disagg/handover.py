"""Handover of a prompt from prefill to decode, on different engines: what the scheduler half does for it.

*Prefill* gives a ticket when a request ends whose prompt it has computed, and has the prompt's last, partial block
stored as well. *Decode* takes it, waits for the pages, loads them from the node that the ticket names, and computes
what did not come. A ticket that can't be used is said and counted; its request is computed.

Several requests may come with one ticket: vLLM makes ``n`` of a request that asks for ``n`` answers. The partial block
goes to the first of them, whose load drops it. The others compute its few tokens, and wait for full blocks alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.client.url import parse_url
from kvstore.connector.blocks.hashing import BlockHashChain
from kvstore.connector.disagg.ticket import (
    ID_BYTES,
    LIFETIME,
    Ticket,
    TicketError,
    check,
    fingerprint_of,
    sign,
    verify,
)
from kvstore.connector.scheduler import NULL_BLOCK_ID, PartialBlock, SchedulerConnector
from kvstore.layout import Layout
from kvstore.rare_lines import one_line

WAIT = 5.0
"""Seconds for which decode waits for pages on their way: as long as prefill holds blocks for their stores."""

MOST_CLAIMS = 65536
"""Tickets in use that are remembered. Whose ticket was forgotten waits for a partial block that may have gone."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOG_INTERVAL = 60.0

_logger = logging.getLogger("kvstore.connector")


@dataclass(frozen=True, slots=True)
class HandoverStatistics:
    """Requests since the start."""

    given: int = 0
    """Answered with a ticket."""
    taken: int = 0
    """Came with a ticket that holds."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Came with one that does not, by reason: forged, expired, foreign, unknown, malformed, oversized."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What tickets need to know of a request's prompt."""

    token_ids: Sequence[int]
    chain: BlockHashChain
    """Of at least all its full blocks."""
    chain_block_size: int
    """Tokens between two of the chain's hashes; each group's block size is a multiple."""
    state_tokens: int = 0
    """Behind how many of its tokens prefill has the last state stored, where not all of them are; 0: nowhere."""

    def hashes(self, block_size: int) -> list[bytes]:
        """Of its full blocks."""
        step = block_size // self.chain_block_size
        return list(self.chain.hashes[step - 1 : len(self.token_ids) // self.chain_block_size : step])

    def partial(self, block_size: int, ticket_id: bytes) -> bytes | None:
        """The name of the block behind them; None: the prompt ends where a block does."""
        start = len(self.token_ids) // block_size * block_size
        return self.chain.partial(start, self.token_ids[start:], ticket_id) if start < len(self.token_ids) else None


class Handover:
    """Gives and takes tickets. Belongs to the scheduler's thread; nothing waits for I/O.

    Args:
        scheduler: the half that it works with, which was given the same peers.
        key: 32 bytes, the same on all instances that hand over to each other.
        node_id: what others call the node of this engine (:func:`default_node_id`); None: its ranks have several, which
            no ticket can name: it takes tickets, and gives none.
        layouts: of the pages of all groups, and all ranks.
        peers: names of the nodes that pages may be loaded from.
        wait: most seconds for which pages are waited for.
        early: whether a load may begin before all of them are there: where an engine computes single blocks that did
            not come, rather than the whole request.
        has_partials: whether the last block of a prompt is of use when it is not full: not where a group's blocks are
            states.
        offered: groups of which only those states are stored that an engine offers. Decode waits for the last one that
            prefill had to store, as the ticket says: which one that is is up to the engine.
    """

    def __init__(
        self,
        scheduler: SchedulerConnector,
        key: bytes,
        node_id: str | None,
        layouts: Sequence[Layout],
        peers: Sequence[str],
        *,
        wait: float = WAIT,
        early: bool = False,
        has_partials: bool = True,
        offered: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._key = key
        self._node_id = node_id
        self._layouts = tuple(layouts)
        self._block_sizes = tuple({layout.group: layout.block_size for layout in layouts}.values())
        self._peers = frozenset(peers)
        self._wait = wait
        self._early = early
        self._has_partials = has_partials
        self._offered = frozenset(offered)
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._log_at = 0.0
        self._claims: dict[bytes, float] = {}  # tickets whose partial block a request has → when they expire

    def give(self, request_id: str, prompt: Prompt, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Prefill has computed a prompt. Call it before the request is finished.

        Args:
            request_id: its blocks are held until what is planned here is stored.
            prompt: all of it computed.
            block_ids: its blocks by group; :data:`NULL_BLOCK_ID` where it has none.

        Returns:
            The ``kv_transfer_params`` of its answer; None: there is no ticket.
        """
        if self._node_id is None:
            return None
        ticket_id = os.urandom(ID_BYTES)
        ticket = Ticket(
            self._node_id,
            ticket_id,
            fingerprint_of(self._layouts),
            self._layouts[0].to_json(),
            len(prompt.token_ids),
            self._now() + LIFETIME,
            prompt.state_tokens,
            self._has_partials and self._save_partials(request_id, prompt, block_ids, ticket_id),
        )
        self._count("given")
        return sign(ticket, self._key)

    def take(self, request_id: str, parameters: Mapping[str, Any], prompt: Prompt) -> bool:
        """A request came to decode. Call it before it is looked up for the first time.

        Args:
            request_id: of this engine.
            parameters: its ``kv_transfer_params``.
            prompt: as prefill saw it.

        Returns:
            Whether its pages are waited for; if not, the request is like any other.
        """
        try:
            ticket = verify(parameters, self._key, self._now())
            own = set() if self._node_id is None else {self._node_id}
            check(ticket, self._layouts, self._peers | own, len(prompt.token_ids))
        except TicketError as error:
            self._refuse(request_id, error)
            return False
        self._count("taken")
        hashes = [prompt.hashes(block_size) for block_size in self._block_sizes]
        has_partial = self._has_partials and ticket.has_partial and self._claim(ticket)
        partials = [
            prompt.partial(block_size, ticket.ticket_id) if has_partial else None for block_size in self._block_sizes
        ]
        wait = min(self._wait, ticket.expires_at - self._now())
        node = "" if ticket.node_id == self._node_id else ticket.node_id
        deadline = self._clock() + wait
        states = [
            ticket.state_tokens // block_size if group in self._offered else None
            for group, block_size in enumerate(self._block_sizes)
        ]
        self._scheduler.await_pages(request_id, node, hashes, partials, deadline, states=states, early=self._early)
        return True

    def statistics(self) -> HandoverStatistics:
        """Counters since the start."""
        with self._lock:
            return HandoverStatistics(self._counts["given"], self._counts["taken"], dict(self._refused))

    def _save_partials(
        self, request_id: str, prompt: Prompt, block_ids: Sequence[Sequence[int]], ticket_id: bytes
    ) -> bool:
        """Have the prompt's partial blocks stored: of all groups, or none, as decode loads them. Whether they are."""
        partials = []
        for group, (block_size, ids) in enumerate(zip(self._block_sizes, block_ids, strict=True)):
            name = prompt.partial(block_size, ticket_id)
            if name is None:
                continue
            hashes = prompt.hashes(block_size)
            if len(ids) <= len(hashes) or ids[len(hashes)] == NULL_BLOCK_ID:
                return False  # the request went on behind its prompt, and this group's window has passed the block
            partials.append(PartialBlock(group, name, ids[len(hashes)], hashes[-1] if hashes else b""))
        return self._scheduler.save_partials(request_id, partials)

    def _claim(self, ticket: Ticket) -> bool:
        """Whether nobody has come with this ticket before."""
        while self._claims and next(iter(self._claims.values())) <= self._now():
            del self._claims[next(iter(self._claims))]
        if ticket.ticket_id in self._claims:
            return False
        self._claims[ticket.ticket_id] = ticket.expires_at
        if len(self._claims) > MOST_CLAIMS:
            del self._claims[next(iter(self._claims))]
        return True

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _refuse(self, request_id: str, error: TicketError) -> None:
        with self._lock:
            self._refused[error.reason] += 1
            count = sum(self._refused.values())
        if self._clock() >= self._log_at:
            self._log_at = self._clock() + _LOG_INTERVAL
            _logger.warning("request %s is computed here (%d so far): %s", one_line(request_id), count, error)


def default_node_id(url: str) -> str:
    """What a node is called that has no name: engines on one machine that use the same node agree on it.

    Args:
        url: of the engine's node.
    """
    where = parse_url(url)
    if not getattr(where, "local", False):
        return url
    try:
        return f"{_BOOT_ID.read_text().strip()}:{url}"
    except OSError:
        return f"{os.uname().nodename}:{url}"
