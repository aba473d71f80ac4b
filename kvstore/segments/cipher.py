"""Encryption of payloads at rest: AES-256-GCM, under a key that each segment has for itself.

A segment's key is derived (HKDF-SHA256) from the operator's key, the segment's id and its random stamp; the nonce of a
payload is its offset, and no offset of a segment is written twice. The page key is authenticated with it. What
is not hidden: page keys, sizes, and when what was written.

Whether a log can be read with the key that is given is found out at opening, before anything is changed
(:func:`check_key`): a segment's header says by which key it was written; where the header is damaged, a page is tried.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import ConfigError
from kvstore.security.secret_files import KEY_BYTES
from kvstore.segments import record
from kvstore.segments.record import BLOCK, ByteArray
from kvstore.segments.recovery import RecoveredSegment

TAG_BYTES = 16
CHECK_BYTES = 16
_PAGES_TRIED = 8


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


def check_key(path: Path, found: RecoveredSegment, cipher: Cipher | None) -> None:
    """Refuse a key that a segment's pages are not encrypted with.

    Args:
        path: the segment's file.
        found: what it holds.
        cipher: of the key that is given, if one is.

    Raises:
        ConfigError: they are encrypted with another key, or with one and none is given.
        OSError: the system refuses to read it.
    """
    table = np.frombuffer(found.table, record.RECORDS)
    encrypted = table[table["codec"] == record.AES_GCM]
    if found.key_check is None and not len(encrypted):
        return
    if cipher is None:
        raise ConfigError(
            f"{path} is encrypted: give the key that it was written with (disk_key_file). Nothing was changed"
        )
    if not _is_of(path, found, encrypted, cipher):
        raise ConfigError(f"{path} is encrypted with another key. Nothing was changed")


def _is_of(path: Path, found: RecoveredSegment, encrypted: npt.NDArray[np.void], cipher: Cipher) -> bool:
    if found.stamp is None:
        return True
    if found.key_check is not None:
        return hmac.compare_digest(found.key_check, cipher.check_value(found.id, found.stamp))
    segment = cipher.for_segment(found.id, found.stamp)
    smallest = np.argsort(encrypted["length"], kind="stable")[:_PAGES_TRIED]
    with path.open("rb") as file:
        for page in encrypted[smallest]:
            offset, length = int(page["offset"]), int(page["length"])
            stored = np.frombuffer(os.pread(file.fileno(), length, offset), np.uint8)
            if len(stored) == length and xxhash.xxh3_64_intdigest(stored.data) == int(page["checksum"]):
                into = np.empty(length - TAG_BYTES, np.uint8)
                return segment.decrypt(offset, page["key"].tobytes(), stored, into)
    return True  # there is no sound page that could tell, and none that could be lost


def _nonce(offset: int) -> bytes:
    return (offset // BLOCK).to_bytes(12, "little")
