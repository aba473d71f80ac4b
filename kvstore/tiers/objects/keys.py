"""The keys that packs are encrypted with: one that writes, and older ones that still read, shared by a fleet."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Sequence

from kvstore.segments import record
from kvstore.segments.cipher import Cipher, SegmentCipher
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import Pack

_REMEMBERED = 4096


class PackKeys:
    """Safe for threads.

    Args:
        keys: 32 bytes each, the one that writes first; none: nothing is encrypted.

    Raises:
        ConfigError: a key has another length, or the package ``cryptography`` is missing.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = [Cipher(key) for key in keys]
        self._lock = threading.Lock()
        self._by_pack: dict[PackName, SegmentCipher] = {}

    @property
    def writing(self) -> Cipher | None:
        """What new packs are encrypted with; None: they aren't."""
        return self._ciphers[0] if self._ciphers else None

    def may_read(self, pack: Pack) -> bool:
        """Whether a pack is one of ours: encrypted with a key that is given, or, where none is, not encrypted.

        With keys, what is not encrypted is passed over: anybody with rights to the bucket could have put it there.
        """
        if pack.codec == record.RAW:
            return not self._ciphers
        return self._find(pack) is not None

    def of(self, pack: Pack) -> SegmentCipher | None:
        """What decrypts a pack's pages; None: they are not encrypted."""
        if pack.codec == record.RAW:
            return None
        with self._lock:
            known = self._by_pack.get(pack.name)
        if known is not None:
            return known
        cipher = self._find(pack)
        assert cipher is not None, "a pack of another key"
        made = cipher.for_segment(pack.name.number, pack.stamp)
        with self._lock:
            if len(self._by_pack) >= _REMEMBERED:
                self._by_pack.clear()
            self._by_pack[pack.name] = made
        return made

    def _find(self, pack: Pack) -> Cipher | None:
        for cipher in self._ciphers:
            if hmac.compare_digest(cipher.check_value(pack.name.number, pack.stamp), pack.key_check):
                return cipher
        return None
