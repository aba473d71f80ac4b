"""Tickets: what a prefill instance says of the pages that it has computed, signed. Pure: no I/O, no clock of its own.

A ticket names a node, never an address, and no page: decode derives the hashes from the request's own tokens, and
connects to nodes of its configuration only. So the worst that a forged one could bring about is a wait; the signature
keeps that away, too. It may be used several times until it expires: a request whose decode instance dies is sent to
another one with the same ticket.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from kvstore.errors import InvalidRequestError
from kvstore.hashing import HASH_BYTES
from kvstore.layout import Layout

LIFETIME = 300.0
"""Seconds for which a ticket is good: as long as a request may wait for a decode instance."""
MOST_TICKET_CHARACTERS = 16 * 1024
MOST_NODE_ID_BYTES = 255
ID_BYTES = 16

_VERSION = 3
_PURPOSE = b"kvstore/ticket/1\n"
_MAC_BYTES = 32


class TicketError(InvalidRequestError):
    """A ticket that is not taken; its request is computed. ``reason`` is a word for metrics."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(f"{reason} ticket: {words}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Ticket:
    """For the pages of one prompt."""

    node_id: str
    """Where they are, by the name that configurations give it."""
    ticket_id: bytes
    """16 bytes, random: what the prompt's last, partial block is bound to."""
    fingerprint: bytes
    """Of all namespaces that the pages are in (:func:`fingerprint_of`)."""
    layout: str
    """The first of their layouts, as JSON: to say what differs."""
    num_tokens: int
    """How many leading tokens of the prompt were computed."""
    expires_at: float
    """Seconds since the epoch."""
    state_tokens: int = 0
    """Behind how many of them prefill has the last state stored, where it stores only some; 0: nowhere."""
    has_partial: bool = True
    """Whether their last block is stored as well where it is not full."""


def fingerprint_of(layouts: Sequence[Layout]) -> bytes:
    """32 bytes for all namespaces of a model, in the order of its groups and ranks."""
    return hashlib.sha256(b"".join(layout.fingerprint for layout in layouts)).digest()


def sign(ticket: Ticket, key: bytes) -> dict[str, Any]:
    """The ``kv_transfer_params`` that prefill answers with."""
    fields = [
        _VERSION,
        ticket.node_id,
        ticket.ticket_id,
        ticket.fingerprint,
        ticket.layout,
        ticket.num_tokens,
        ticket.expires_at,
        ticket.state_tokens,
        ticket.has_partial,
    ]
    payload: bytes = msgpack.packb(fields)
    text = base64.urlsafe_b64encode(payload + _mac(payload, key)).decode()
    return {"do_remote_prefill": True, "do_remote_decode": False, "ticket": text}


def verify(parameters: Mapping[str, Any], key: bytes, now: float) -> Ticket:
    """The ticket in a request's ``kv_transfer_params``.

    Args:
        parameters: as :func:`sign` made them.
        key: 32 bytes, the same at both ends.
        now: seconds since the epoch.

    Raises:
        TicketError: malformed, oversized, forged or expired.
    """
    text = parameters.get("ticket")
    if not isinstance(text, str):
        raise TicketError("malformed", "there is none")
    if len(text) > MOST_TICKET_CHARACTERS:
        raise TicketError("oversized", f"{len(text)} characters, the limit is {MOST_TICKET_CHARACTERS}")
    try:
        data = base64.b64decode(text.encode("ascii"), b"-_", validate=True)
    except (ValueError, binascii.Error) as error:
        raise TicketError("malformed", str(error)) from error
    payload, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(payload, key)):
        raise TicketError("forged", "it is not signed with this instance's ticket_key_file")
    ticket = _parse(payload)
    if now >= ticket.expires_at:
        raise TicketError("expired", f"{now - ticket.expires_at:.0f} s ago (do the hosts' clocks agree?)")
    return ticket


def check(ticket: Ticket, layouts: Sequence[Layout], node_ids: Collection[str], num_tokens: int) -> None:
    """Whether a request can use it here.

    Args:
        ticket: verified.
        layouts: of this instance's namespaces, as for :func:`fingerprint_of`.
        node_ids: nodes that this instance may load from.
        num_tokens: of the request's prompt.

    Raises:
        TicketError: foreign (another model or layout, or another prompt), or of an unknown node.
    """
    if ticket.fingerprint != fingerprint_of(layouts):
        raise TicketError("foreign", difference(ticket.layout, layouts[0]))
    if ticket.num_tokens != num_tokens:
        raise TicketError("foreign", f"for a prompt of {ticket.num_tokens} tokens, this one has {num_tokens}")
    if ticket.node_id not in node_ids:
        raise TicketError("unknown", f"node {ticket.node_id!r} is not among this instance's peers")


def difference(theirs: str, mine: Layout) -> str:
    """What two layouts do not share, in words; the other one is JSON, and maybe of another version."""
    try:
        other = asdict(Layout.from_json(theirs))
    except InvalidRequestError as error:
        return f"of a layout that can't be read here: {error}"
    told = [
        f"{name} {_shown(other[name])} there, {_shown(value)} here"
        for name, value in asdict(mine).items()
        if other[name] != value
    ]
    if any(name.startswith(("tp_", "pp_")) for name in (part.split(" ")[0] for part in told)):
        told.append(
            "pages of another number of ranks are read only with kv_parts set to the larger one at both sides,"
            ' or to "heads"'
        )
    return "; ".join(told) or "the first cache group is the same, others differ"


def _parse(payload: bytes) -> Ticket:
    """What somebody with the key signed, which may still be of another version."""
    try:
        version, *fields = msgpack.unpackb(payload)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise TicketError("malformed", f"{error}") from error
    if version != _VERSION:
        raise TicketError("malformed", f"of version {_shown(version)}, this instance reads version {_VERSION}")
    if len(fields) != 8:
        raise TicketError("malformed", f"{len(fields)} fields, not 8")
    node_id, ticket_id, fingerprint, layout, num_tokens, expires_at, state_tokens, has_partial = fields
    if (
        not (isinstance(node_id, str) and len(node_id.encode()) <= MOST_NODE_ID_BYTES)
        or not (isinstance(ticket_id, bytes) and len(ticket_id) == ID_BYTES)
        or not (isinstance(fingerprint, bytes) and len(fingerprint) == HASH_BYTES)
        or not isinstance(layout, str)
        or not (isinstance(num_tokens, int) and 0 < num_tokens < 1 << 31)
        or not isinstance(expires_at, float)
        or not (isinstance(state_tokens, int) and 0 <= state_tokens <= num_tokens)
        or not isinstance(has_partial, bool)
    ):
        raise TicketError("malformed", f"its fields are not those of version {_VERSION}")
    return Ticket(node_id, ticket_id, fingerprint, layout, num_tokens, expires_at, state_tokens, has_partial)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _mac(payload: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + payload, "sha256")
