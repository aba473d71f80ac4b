"""Tokens that are good for one connection, for a while."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time

from kvstore.errors import LimitExceededError

TOKEN_BYTES = 32


class OneTimeTokens:
    """Tokens that were given and not used yet. Safe for threads.

    Args:
        limit: most of them at once.
        seconds: how long one is good.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self.seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[bytes, float] = {}
        """By the token's SHA-256: how long finding it takes says nothing of the token. Oldest first."""

    def issue(self) -> bytes:
        """A new token of 32 bytes.

        Raises:
            LimitExceededError: too many were given and not used.
        """
        now = time.monotonic()
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            for digest in [digest for digest, until in self._until.items() if until < now]:
                del self._until[digest]
            if len(self._until) >= self._limit:
                raise LimitExceededError(f"{self._limit} tokens for bulk connections wait to be used, the limit")
            self._until[hashlib.sha256(token).digest()] = now + self.seconds
        return token

    def redeem(self, token: bytes) -> bool:
        """Use a token up. False: it was never given, was used, or is too old."""
        with self._lock:
            until = self._until.pop(hashlib.sha256(token).digest(), 0.0)
        return time.monotonic() <= until
