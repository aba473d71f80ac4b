"""Names of keys in Redis: all begin with ``kvstore:``, and no others are ever written or deleted.

====================================  ========  ===================================================================
``kvstore:buckets``                   string    how many buckets there are; the first node says it
``kvstore:format``                    string    the newest format of what is here; the first node says it, and whoever
                                                writes a newer one
``kvstore:page:PAGE KEY``             string    where a page is (:mod:`kvstore.tiers.redis.format.entry`)
``kvstore:{B}:order``                 zset      bucket B's chunks by last use
``kvstore:{B}:order:NAMESPACE``       zset      of these, the ones of a namespace
``kvstore:{B}:chunks``                hash      what each is charged with, how it is cut, and its namespace
``kvstore:{B}:books``                 hash      ``bytes``, ``pages``, ``bytes:NAMESPACE``: the sums over ``chunks``
``kvstore:{B}:chunk:NONCE:PART``      string    a chunk's bytes, mostly in one part, number 0
``kvstore:{B}:claim:PAGE KEY``        string    the nonce of the chunk from a page on, while its writer sends it;
                                                empty for a moment behind that
``kvstore:summary:BUCKETS:GROUP``     string    what the buckets of a group hold (:mod:`.summary`), for some seconds;
                                                empty while a node asks them
====================================  ========  ===================================================================

Page key (64 bytes), namespace (its first 32) and nonce (16) are raw bytes. The braces are Redis Cluster's hash tag: a
bucket's keys lie in one slot, so that one script can change them together.
"""

from __future__ import annotations

BUCKETS = b"kvstore:buckets"
FORMAT = b"kvstore:format"
FORMAT_VERSION = 1
"""Of entries, chunks and sums together. Where a newer one stands, a node writes and removes nothing: it might take a
newer node's keys for damaged ones."""
PAGE_PREFIX = b"kvstore:page:"
NAMESPACE_FIELD = b"bytes:"
NONCE_BYTES = 16
NAMESPACE_BYTES = 32
MOST_BUCKETS = 1 << 14


def page_name(key: bytes) -> bytes:
    """The name of a page's entry."""
    return PAGE_PREFIX + key


def page_pattern(prefix: bytes) -> bytes:
    """A glob pattern for the entries of all pages whose key begins with ``prefix``."""
    return (
        PAGE_PREFIX
        + b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^-" else bytes([byte]) for byte in prefix)
        + b"*"
    )


def bucket_names(bucket: int) -> tuple[bytes, bytes, bytes]:
    """The names of a bucket's order, chunks and sums."""
    base = b"kvstore:{%d}:" % bucket
    return base + b"order", base + b"chunks", base + b"books"


def part_name(bucket: int, nonce: bytes, part: int) -> bytes:
    """The name of one part of a chunk."""
    return b"kvstore:{%d}:chunk:%b:%d" % (bucket, nonce, part)


def claim_name(bucket: int, claim: bytes) -> bytes:
    """The name of the claim to send a chunk."""
    return b"kvstore:{%d}:claim:%b" % (bucket, claim)


def summary_name(buckets: int, group: int) -> bytes:
    """The name of a summary of some of so many buckets."""
    return b"kvstore:summary:%d:%d" % (buckets, group)
