"""The tier that nodes share: pages in Redis or Valkey, single, behind Sentinels, or as a Cluster.

Pages match, chunks move. A *chunk* is a run of new pages of one chain, up to 2 MiB, never over a multiple of
``pages_per_chunk``; its bytes are one value, the last few a second one (:mod:`.chunk`). A *page entry* says in which
chunk a page is, and where (:mod:`.entry`). Chunks lie in *buckets* by the hash of their first page; a bucket has a
budget, an access order and books, and all that belongs to it shares a hash tag (:mod:`.names`). Buckets are as many as
the first node said, each large enough for 16 full chunks.

::

    contains   MGET entries                                                          one request to each server
    touch      renew entries │ touch chunks                                          two
    read       MGET entries │ GETRANGE chunks, touch them                            two
    remove     MGET entries │ delete entries │ MGET entries                          three, more while others merge
    expire     ask all buckets │ drop chunks │ delete entries                        two for each 64 buckets, and more
    write      MGET entries │ (touch chunks) │ admit, SET parts │ SET entries        three, four if some are here

::

    tier ──► reader · remover · expiring · writer ──► rows ──► reader
                                            │           │
                                            └─► admitting · making · planning · merging
    entries ──► buckets ──► books · quotas · scripts ──► servers ──► node ──► resp · crew

A row of short chunks that a write fills to its end is written anew as one chunk; its entries are pointed there, and the
pieces go (:mod:`.merging`). Bytes leave from the arena and arrive in it without a copy between (:mod:`.resp`). Where
the network is slower than the processor, pages of 16-bit floats go packed (:mod:`.codec`, :mod:`.codec_choice`).

What holds at every moment, however many nodes are at work, and whichever of them dies at whatever point:

**The byte count can't drift.** Only scripts change a bucket's books, each atomically with what it counts: both lie in
one slot (:mod:`.scripts`). A chunk is charged *before* its bytes come, for as many as will come: ``admit`` lets the
oldest chunks leave until it fits, charges it, and makes a place for it. Bytes are put only where a place stands
(``SET … XX``), so what was evicted meanwhile is not brought back uncounted. A writer that dies leaves a place that is
charged and empty, or a chunk that no entry names: both leave as the oldest. What is charged is the memory that the
server's allocator takes, entries included. An error in the midst of a script can't be: the first write is the one that
a full server may refuse. ``volatile-*`` policies and the time to live drop values that stay charged until somebody
asks for them or they are the oldest: the count errs on the side of the limit. A server that evicts by ``allkeys-*``
may drop the books themselves: set ``noeviction``.

**A quota is a budget.** A bucket keeps an order and a sum for each namespace beside its own, and ``admit`` enforces the
namespace's part of its quota as it enforces the bucket's budget: that namespace's oldest chunks leave, nobody else's.
The parts of all buckets are the quota. A small quota is divided over fewer buckets, each part at least four full chunks
or the whole quota, and one of less than four chunks gets smaller chunks (:mod:`.quotas`). A quota that is set later
counts from the next write of a node that was told: what lies elsewhere, or is too much, leaves along with it.

**Who may delete what.** A chunk goes by its bucket's scripts only: as the oldest, when no entry names it any more, or
with a namespace that no node uses (:mod:`.expiring`).
An entry is deleted, or replaced, by whoever knows that its chunk is gone, and only if it still names that chunk.
Names are never used twice (a chunk has 16 random bytes), so an entry that is late can't hit another chunk. Keys that
do not begin with ``kvstore:`` are never touched.

**What a reader sees** is a whole chunk or none. An entry is written after its chunk's last byte; a chunk never changes.
Every page is checked against the key, length and checksum in its chunk's header, and the header against its own. All
else is a miss that is counted: a foreign value, another version's, half a chunk, a flipped bit. An entry whose chunk is
gone is deleted on the spot.

**The first entry wins.** Two nodes that store one page at once both bring a chunk; the entry is the first one's
(``SET … NX``), the other one's page counts as not there, and a chunk without pages goes. An entry that is replaced,
since its chunk is gone or since the row is merged, is replaced only if what was seen there still stands there; and
whoever replaces it takes the page off the chunk that it named. So a chunk counts at least the entries that name it,
and exactly these when nobody died on the way.

**Nobody waits.** ``statistics`` and ``used_by`` answer from memory: what this node changes is told along with the
change, what others change is asked for every five seconds (:mod:`.books`). Every other call has a deadline; connections
are opened in the background; a server that failed three times in a row is left alone for 0.1 to 2 s at a time
(:mod:`.breaker`). One that is full or read-only is still read from.
"""

from __future__ import annotations

from kvstore.tiers.redis.tier import RedisTier

__all__ = ["RedisTier"]
