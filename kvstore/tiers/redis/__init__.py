"""The tier that nodes share: pages in Redis or Valkey, alone, behind Sentinels, or as a Cluster.

Pages are looked up one by one and stored in chunks. A *chunk* is a run of new pages of one chain, up to 2 MiB, never
over a multiple of ``pages_per_chunk``. It lies in a *bucket*, by the hash of its first page; a bucket has its part of
the byte limit and evicts by least recent use. Buckets are as many as the first node said, each large enough for 16 full
chunks.

**Keys** (:mod:`.format.key_names`). A bucket's keys share a hash tag, and so a slot: one script can change them all.

::

    kvstore:page:KEY               string   a page's *entry*: in which chunk it is, and where
    kvstore:{B}:chunk:NONCE:PART   string   a chunk's bytes: most in part 0, the last few of a full one in part 1
    kvstore:{B}:order              zset     bucket B's chunks by last use; one more for each namespace, :NAMESPACE
    kvstore:{B}:chunks             hash     what each chunk is charged, and how many of its pages have an entry
    kvstore:{B}:books              hash     the sums over that: bytes, pages, bytes of each namespace
    kvstore:{B}:claim:KEY          string   who sends the chunk from a page on; for some seconds at most
    kvstore:buckets, :format       string   how many buckets there are; the newest format of what is here

**Scripts** (:mod:`.net.scripts`) are all that changes a bucket: ``admit`` charges a chunk, evicts the oldest ones until
it fits and makes a place for it; ``touch`` marks chunks as used; ``release`` takes pages off a chunk; ``trim`` evicts
down to a quota; ``idle`` and ``expire`` are for namespaces that nobody uses. ``renew``, ``place``, ``forget`` and
``repoint`` read, put, delete and replace entries, each only where that still says what was seen there. What one call
sends each server, a bar between two round trips:

::

    contains   MGET entries
    touch      renew entries │ touch chunks
    read       MGET entries │ GETRANGE chunks, touch them
    write      MGET entries │ (touch chunks that are here) │ admit chunks │ SET them │ place entries │ end claims
    remove     MGET entries │ forget them │ release chunks │ MGET entries                    more while others compact
    keys       orders of buckets │ chunks │ headers │ orders of buckets │ MGET entries      of a namespace
    expire     idle buckets │ TIME │ expire chunks │ forget entries │ …                     of 64 buckets at once

**Order of writes.** First a chunk is charged, for as many bytes as will come, and gets empty values; then its bytes are
put, only where a place stands (``SET … XX``): what was evicted meanwhile does not come back uncharged. Its entries come
last, so that they name whole chunks; a chunk never changes. A writer that dies on the way leaves a chunk that is
charged, and that no entry names: it leaves as the oldest. The first entry of a page wins (``SET … NX``); another node's
page counts as not there, and a chunk without entries goes. An entry is replaced when its chunk is gone, or when
compaction has written the fragments of a chain anew as one chunk (:mod:`.compaction`), only if what was seen there
still stands there; and whoever replaces it takes the page off the chunk that it named. So a chunk counts at least the
entries that name it, and exactly these when nobody died on the way.

**Who sends.** Nodes that want to store the same new pages at once would each send them, and all but one in vain. So
whoever is admitted first has claimed the chunk; the others are told, wait until that claim has ended, which is when its
entries are there, and send what it did not have. A claim is no lock: it ends with its time, that of one step of a call,
if its writer died, and the next one sends the chunk. Nodes of versions that know no claims send beside it, as if its
time were over: the first entry wins.

**Who evicts, expires and deletes.** A chunk goes by its bucket's scripts only: as the oldest, over a quota, when no
entry names it any more, or with a namespace that no node has used for some time (:mod:`.expiry`). Whoever learns that a
chunk is gone deletes its entries, each only if it still names that chunk; names are never used twice, since a chunk has
16 random bytes. Everything has a time to live, renewed by use, as a safety net: what the server drops by that, or by a
``volatile-*`` policy, stays charged until somebody asks for it or it is the oldest. A server that evicts by
``allkeys-*`` may drop the sums themselves: set ``noeviction``. Keys that do not begin with ``kvstore:`` are never
touched.

**The byte count can't drift.** The sums change in one atomic step with what they count. What is charged is the memory
that the server's allocator takes, entries included. No script fails half way: its first write is the one that a full
server may refuse. A quota is divided over buckets, and enforced as the limit is, at the namespace's own cost
(:mod:`.quotas`); one that is set later counts from the next write of a node that was told.

**What a reader sees** is a whole chunk or none: every page is checked against the key, length and checksum in its
chunk's header, and the header against its own. All else is a miss that is counted: a foreign value, another version's,
half a chunk, a flipped bit. Bytes leave from the arena and arrive in it without a copy between (:mod:`.net.resp`), but
for pages of 16-bit floats that are compressed where the network is slower than the processor (:mod:`.format.codec`).

**Nobody waits.** ``statistics`` and ``used_by`` answer from memory: what this node changes is told along with the
change, what others change is learnt from summaries that one node makes for all, every five seconds or less
(:mod:`.summaries`, :mod:`.accounting`): it is known within fifteen. Every other call has a deadline;
connections are opened in the background; a server that failed three times in a row is left alone for 0.1 to 2 s at a
time (:mod:`kvstore.breaker`). One that is full or read-only is still read from.

::

    tier ──► reader · remover · listing · expiry · writer ──► compaction
                                                     └────► chunk_writer ◄─┘
    all over one context: entries ──► buckets ──► accounting · quotas
    format: bytes and names, no I/O                                 net: servers, sockets, scripts; knows no pages
"""

from __future__ import annotations

from kvstore.tiers.redis.tier import RedisTier

__all__ = ["RedisTier"]
