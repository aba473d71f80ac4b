"""Tickets between prefill and decode: what is signed, and what is refused."""

from __future__ import annotations

import base64
import os
from dataclasses import replace

import pytest

from kvstore.connector.blocks.extra_keys import PrefixKeys
from kvstore.connector.blocks.hashing import BlockHashChain
from kvstore.connector.disagg.ticket import (
    Ticket,
    TicketError,
    check,
    fingerprint_of,
    sign,
    verify,
)
from kvstore.hashing import hash_blocks
from kvstore.layout import Layout

KEY = bytes(range(32))
NOW = 1_800_000_000.0
LAYOUT = Layout(model="m", block_size=16, page_bytes=4096, tp_size=2)
LAYOUTS = [LAYOUT, replace(LAYOUT, tp_rank=1)]


@pytest.fixture
def ticket() -> Ticket:
    return Ticket("host-1", os.urandom(16), fingerprint_of(LAYOUTS), LAYOUT.to_json(), 1500, NOW + 60, 1472)


def refused(reason: str):
    return pytest.raises(TicketError, match=rf"^{reason} ticket")


def test_a_ticket_comes_back_as_it_was_signed(ticket):
    parameters = sign(ticket, KEY)
    assert parameters["do_remote_prefill"] is True
    assert verify(parameters, KEY, NOW) == ticket
    without = replace(ticket, has_partial=False)
    assert verify(sign(without, KEY), KEY, NOW) == without
    check(ticket, LAYOUTS, ["host-1"], 1500)


def test_every_bit_of_a_ticket_is_signed(ticket):
    parameters = sign(ticket, KEY)
    data = base64.urlsafe_b64decode(parameters["ticket"])
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        with refused("forged"):
            verify({"ticket": base64.urlsafe_b64encode(changed).decode()}, KEY, NOW)
    for cut in range(len(data)):
        with refused("forged"):
            verify({"ticket": base64.urlsafe_b64encode(data[:cut]).decode()}, KEY, NOW)


def test_another_key_is_a_forgery(ticket):
    with refused("forged"):
        verify(sign(ticket, KEY), bytes(32), NOW)


def test_a_ticket_expires(ticket):
    verify(sign(ticket, KEY), KEY, NOW + 59.9)
    with refused("expired"):
        verify(sign(ticket, KEY), KEY, NOW + 60)


@pytest.mark.parametrize("text", [None, 7, "", "a", "ä", "****", "A" * 5, ["x"]])
def test_what_is_no_ticket_is_refused(text):
    with pytest.raises(TicketError):
        verify({"ticket": text}, KEY, NOW)
    with refused("malformed"):
        verify({}, KEY, NOW)


def test_a_ticket_that_is_too_long_is_not_even_looked_at(ticket):
    with refused("oversized"):
        verify({"ticket": "A" * (16 * 1024 + 1)}, KEY, NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket_id": b"short"},
        {"fingerprint": b""},
        {"num_tokens": 0},
        {"expires_at": "never"},
        {"node_id": "n" * 256},
        {"state_tokens": -1},
        {"state_tokens": 1501},
        {"state_tokens": None},
        {"has_partial": 1},
    ],
)
def test_fields_that_cannot_be_are_refused_even_when_signed(ticket, changes):
    with refused("malformed"):
        verify(sign(replace(ticket, **changes), KEY), KEY, NOW)


def test_a_ticket_of_an_instance_of_another_version_says_so(ticket, monkeypatch):
    monkeypatch.setattr("kvstore.connector.disagg.ticket._VERSION", 2)
    older = sign(ticket, KEY)
    monkeypatch.undo()
    with pytest.raises(TicketError, match=r"^malformed ticket: of version 2, this instance reads version 3$"):
        verify(older, KEY, NOW)


def test_a_nodes_name_may_be_as_long_as_it_says(ticket):
    long = replace(ticket, node_id="ä" * 127 + "n")  # 255 bytes
    assert verify(sign(long, KEY), KEY, NOW) == long


def test_a_foreign_ticket_says_what_differs(ticket):
    other = Layout(model="m", block_size=32, page_bytes=4096, tp_size=1)
    with pytest.raises(TicketError, match=r"block_size 16 there, 32 here; tp_size 2 there, 1 here; .*another number"):
        check(ticket, [other], ["host-1"], 1500)
    with refused("foreign"):
        check(replace(ticket, layout="{}"), [other], ["host-1"], 1500)
    with pytest.raises(TicketError, match="others differ"):
        check(ticket, [LAYOUT], ["host-1"], 1500)


def test_a_ticket_of_another_prompt_or_of_an_unknown_node_is_refused(ticket):
    with pytest.raises(TicketError, match="for a prompt of 1500 tokens, this one has 1501"):
        check(ticket, LAYOUTS, ["host-1"], 1501)
    with refused("unknown"):
        check(ticket, LAYOUTS, ["host-2"], 1500)


def test_a_partial_block_is_named_by_prefix_tokens_keys_and_ticket():
    def name(tokens, start, bound_to=b"t" * 16, **keys):
        chain = BlockHashChain(4, PrefixKeys(**keys))
        chain.extend(tokens)
        return chain.partial(start, tokens[start:], bound_to)

    tokens = list(range(11))
    names = {
        name(tokens, 8),
        name(tokens, 8, bound_to=b"u" * 16),
        name([9, *tokens[1:]], 8),
        name([*tokens[:10], 9], 8),
        name(tokens[:10], 8),
        name(tokens, 8, cache_salt="s"),
        name(tokens, 8, lora_name="l"),
        name(tokens[:3], 0),
        name(tokens[:3], 0, cache_salt="s"),
    }
    assert len(names) == 9
    assert name(tokens, 8) in names
    full = set(hash_blocks(range(12), 4))
    assert name(list(range(12)), 8) not in full
