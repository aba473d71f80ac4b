"""A summary of what some buckets hold: bytes, pages, and bytes by namespace. No I/O.

::

    version u8 │ namespaces u16, 32 bytes each │ of each bucket: bytes u64, pages u32, n u16, n × (place u16, bytes u64)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.errors import FormatError
from kvstore.tiers.redis.format.key_names import NAMESPACE_BYTES

_VERSION = 1
_HEAD = struct.Struct(">BH")
_BUCKET = struct.Struct(">QIH")
_SHARE = struct.Struct(">HQ")


@dataclass(slots=True)
class Usage:
    """What a bucket holds."""

    used_bytes: int = 0
    pages: int = 0
    by_namespace: dict[bytes, int] = field(default_factory=dict)


def encode(usages: Sequence[Usage]) -> bytes:
    """The summary of buckets, in this order."""
    named = {name for usage in usages for name in usage.by_namespace if len(name) == NAMESPACE_BYTES}
    places = {name: place for place, name in enumerate(sorted(named)[: (1 << 16) - 1])}
    out = [_HEAD.pack(_VERSION, len(places)), *places]
    for usage in usages:
        shares = [(places[name], size) for name, size in usage.by_namespace.items() if name in places]
        out.append(_BUCKET.pack(usage.used_bytes, usage.pages, len(shares)))
        out += [_SHARE.pack(*share) for share in shares]
    return b"".join(out)


def decode(data: bytes, buckets: int) -> list[Usage]:
    """What so many buckets hold.

    Raises:
        FormatError: these bytes are no summary of so many.
    """
    try:
        version, count = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise FormatError(f"a summary of version {version}, this reads {_VERSION}")
        at = _HEAD.size + count * NAMESPACE_BYTES
        names = [data[start : start + NAMESPACE_BYTES] for start in range(_HEAD.size, at, NAMESPACE_BYTES)]
        usages = []
        for _ in range(buckets):
            used_bytes, pages, shares = _BUCKET.unpack_from(data, at)
            at += _BUCKET.size
            usage = Usage(used_bytes, pages)
            for _ in range(shares):
                place, size = _SHARE.unpack_from(data, at)
                at += _SHARE.size
                usage.by_namespace[names[place]] = size
            usages.append(usage)
    except (struct.error, IndexError) as error:
        raise FormatError(f"a summary of {len(data)} bytes is cut short: {error}") from error
    if at != len(data):
        raise FormatError(f"a summary of {len(data)} bytes, {at} of which are of {buckets} buckets")
    return usages
