"""What entries and keys are called in a store."""

from __future__ import annotations

from kvstore.responses.policy import Caller
from kvstore.responses.request import CacheableRequest
from kvstore.responses.sealing import Sealing


def entry_name(sealing: Sealing, request: CacheableRequest, caller: Caller) -> str:
    """Of the answer to a request, for those who share it."""
    return sealing.name("entry", [*(part.encode() for part in caller.scope), b"", request.canonical])


def key_digest(sealing: Sealing, key: str) -> str:
    """By which entries made with an API key are known; empty for none."""
    return sealing.name("key", [key.encode()])[:32] if key else ""
