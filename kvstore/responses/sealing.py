"""How entries lie in a store: named by a digest, encrypted with the operator's key or, if he says so, as they are.

With a key, AES-256-GCM under a key derived from it (HKDF-SHA256), a random nonce for each entry, and the label
authenticated with it; names are HMACs, so that nobody can try prompts against them. Not hidden: sizes, times, the names
of models and tenants, and which entries were made by the same API key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from dataclasses import astuple

from kvstore.errors import ConfigError
from kvstore.responses.store import Label
from kvstore.security.secret_files import KEY_BYTES

_PLAIN = b"P"
_ENCRYPTED = b"E"
_NONCE_BYTES = 12
_DIGEST_BYTES = 16


class Sealing:
    """Safe for threads.

    Args:
        key: 32 bytes; None: entries are not encrypted.

    Raises:
        ConfigError: the key has another length, or the package ``cryptography`` is missing.
    """

    def __init__(self, key: bytes | None) -> None:
        self._aead = None
        self._name_key = b""
        if key is None:
            return
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a key for responses has {KEY_BYTES} bytes, got {len(key)}")
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ModuleNotFoundError as error:
            raise ConfigError("encryption needs a package: pip install 'kvstore-offload[encryption]'") from error
        self._aead = AESGCM(HKDF(SHA256(), KEY_BYTES, salt=None, info=b"kvstore responses").derive(key))
        self._name_key = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"kvstore response names").derive(key)

    def name(self, kind: str, parts: Sequence[bytes]) -> str:
        """64 hexadecimal digits for these parts; for others, or of another kind, others."""
        content = b"".join(len(part).to_bytes(8, "little") + part for part in (kind.encode(), *parts))
        if self._aead is None:
            return hashlib.sha256(content).hexdigest()
        return hmac.digest(self._name_key, content, "sha256").hex()

    def seal(self, label: Label, content: bytes) -> bytes:
        """What is stored of the content of an entry."""
        return self.seal_for(astuple(label), content)

    def seal_for(self, place: tuple[object, ...], content: bytes) -> bytes:
        """What is stored of a content that can be opened at this place alone: words and numbers."""
        bound = _bound(place)
        if self._aead is None:
            return _PLAIN + _digest(bound, content) + content
        nonce = os.urandom(_NONCE_BYTES)
        return _ENCRYPTED + nonce + self._aead.encrypt(nonce, content, bound)

    def open(self, label: Label, sealed: bytes) -> bytes | None:
        """The content; None: it is damaged, of another key or of another entry, or encrypted where nothing should be
        or the other way round."""
        return self.open_for(astuple(label), sealed)

    def open_for(self, place: tuple[object, ...], sealed: bytes) -> bytes | None:
        """What :meth:`seal_for` was given for this place; None: as :meth:`open`."""
        kind, rest = sealed[:1], sealed[1:]
        bound = _bound(place)
        if self._aead is None:
            digest, content = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
            return content if kind == _PLAIN and digest == _digest(bound, content) else None
        from cryptography.exceptions import InvalidTag

        if kind != _ENCRYPTED or len(rest) <= _NONCE_BYTES:
            return None
        try:
            return self._aead.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], bound)
        except InvalidTag:
            return None


def _bound(place: tuple[object, ...]) -> bytes:
    """What of a label can't be changed without the content being lost: all of it."""
    return json.dumps(place).encode()


def _digest(bound: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=hashlib.sha256(bound).digest()).digest()
