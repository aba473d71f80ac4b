"""One-time tokens: each opens one bulk connection, within seconds."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from typing import NamedTuple

from kvstore.errors import LimitExceededError

TOKEN_BYTES = 32


class Issued(NamedTuple):
    """For whom a token is."""

    holder: bytes
    """As which pass they are known to the node."""
    name: str
    """What they call themselves."""


class OneTimeTokens:
    """At most ``limit`` tokens that were given and not used yet, each good for ``seconds``. Safe for threads."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self.seconds = seconds
        self._lock = threading.Lock()
        self._given: dict[bytes, tuple[float, Issued]] = {}
        """By the token's SHA-256, until when it is good and for whom: how long finding it takes says nothing of the
        token. Oldest first."""

    def issue(self, holder: bytes = b"", name: str = "") -> bytes:
        """A new token of 32 bytes.

        Args:
            holder: whose it is; ``redeem`` says so.
            name: what they call themselves.

        Raises:
            LimitExceededError: too many were given and not used.
        """
        now = time.monotonic()
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            for digest in [digest for digest, (until, _) in self._given.items() if until < now]:
                del self._given[digest]
            if len(self._given) >= self._limit:
                raise LimitExceededError(f"{self._limit} tokens for bulk connections wait to be used, the limit")
            self._given[hashlib.sha256(token).digest()] = now + self.seconds, Issued(holder, name)
        return token

    def waiting(self, holder: bytes) -> int:
        """How many of a holder's are not used yet."""
        now = time.monotonic()
        with self._lock:
            return sum(each.holder == holder and until >= now for until, each in self._given.values())

    def redeem(self, token: bytes) -> Issued | None:
        """Use a token up. Returns for whom it was; None: it was never given, was used, or is too old."""
        with self._lock:
            until, issued = self._given.pop(hashlib.sha256(token).digest(), (0.0, None))
        return issued if time.monotonic() <= until else None
