"""Encryption of payloads at rest: AES-256-GCM, under a key that each segment has for itself.

A segment's key is derived (HKDF-SHA256) from the operator's key, the segment's id and its random stamp; the nonce of a
payload is its offset, and no offset of a segment is written twice. Page key and codec are authenticated with it. What
is not hidden: page keys, sizes, and when what was written.
"""

from __future__ import annotations

import hmac

from kvstore.errors import ConfigError
from kvstore.security.secret_files import KEY_BYTES
from kvstore.segments.record import BLOCK, ByteArray

TAG_BYTES = 16
CHECK_BYTES = 16


class Cipher:
    """The operator's key.

    Args:
        key: 32 bytes.

    Raises:
        ConfigError: the key has another length, or the package ``cryptography`` is missing.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a disk key has {KEY_BYTES} bytes, got {len(key)}")
        try:
            import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401 - here, so that only its users need it
        except ModuleNotFoundError as error:
            raise ConfigError("encryption needs a package: pip install 'kvstore-offload[encryption]'") from error
        self._key = key

    def check_value(self, segment: int, stamp: bytes) -> bytes:
        """16 bytes by which the same key is known again, and no other."""
        return hmac.digest(self._key, b"kvstore check" + segment.to_bytes(8, "little") + stamp, "sha256")[:CHECK_BYTES]

    def for_segment(self, segment: int, stamp: bytes) -> SegmentCipher:
        """What encrypts and decrypts the payloads of one segment."""
        return SegmentCipher(self._key, segment, stamp)


class SegmentCipher:
    """Encrypts and decrypts the payloads of one segment. Safe for threads."""

    def __init__(self, key: bytes, segment: int, stamp: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = b"kvstore segment" + segment.to_bytes(8, "little")
        self._aead = AESGCM(HKDF(SHA256(), KEY_BYTES, salt=stamp, info=info).derive(key))

    def encrypt(self, offset: int, page_key: bytes, payload: ByteArray, into: ByteArray) -> None:
        """Encrypt a payload.

        Args:
            offset: where it will lie in the segment; never given twice.
            page_key: whose it is.
            payload: any length.
            into: ``TAG_BYTES`` longer.
        """
        self._aead.encrypt_into(_nonce(offset), payload.data, page_key, into.data)

    def decrypt(self, offset: int, page_key: bytes, stored: ByteArray, into: ByteArray) -> bool:
        """Decrypt what ``encrypt`` made. False: it is not what was written there for this page."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(_nonce(offset), stored.data, page_key, into.data)
        except InvalidTag:
            return False
        return True


def _nonce(offset: int) -> bytes:
    return (offset // BLOCK).to_bytes(12, "little")
