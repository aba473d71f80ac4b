"""The disk tier: pages of one node in a log of segment files, kept over restarts and crashes.

Files, format and recovery are :mod:`kvstore.segments`. This package decides what is written to that log, which segments
leave it, and what is found in it. One class a module; each imports only from those above it in the table:

=============== =================== ============================================================== ====================
class           module              owns                                                           I/O
=============== =================== ============================================================== ====================
``Device``      ``device_trust``    threads, deadlines and a circuit breaker, for reads and for    lends the threads
                                    writes apart
``DiskReader``  ``reader``          reads under way: verified, decrypted, copied to the caller     reads segments
``Quotas``      ``quotas``          bytes that each namespace may take; which of its pages leave   none
``Tombstones``  ``tombstones``      which removed pages still want one                             none
``LogPages``    ``pages``           where each page lies, and these; events                        none
``DiskCatalog`` ``catalog``         these under one lock; when each page was used; counters        none
``PageLog``     ``page_log``        the log and the catalog, changed together: one append, and     appends, reads
                                    what is then known
``Reclaimer``   ``reclaim``         which segment is deleted when space is short, and what of it   reads, appends,
                                    is carried over first                                          deletes segments
``DiskWriter``  ``writer``          batches of pages and tombstones, whose failures are counted    appends, syncs
                                    and not raised; syncs, whose failures are raised
``DiskTier``    ``tier``            all of these, and the lock around changes                      through the others
=============== =================== ============================================================== ====================

**Locks.** There are two. The *log lock* (``DiskTier``) is held by whoever changes the log, over its I/O: the segment
log, ``PageLog``, ``Reclaimer`` and ``DiskWriter`` belong to its holder, so writes, removals, flushes and new limits
come one after the other. The *catalog lock* (inside ``DiskCatalog``, used nowhere else) is held for moments, for
decisions in memory, and never over I/O. It is taken under the log lock or alone; never the other way round.

**Reads** take the catalog lock only, twice: to look pages up, and to note what came of it. In between they read without
any lock. A segment that is being read is not deleted: its deletion waits for the reads inside. A page whose segment has
left meanwhile is a miss.

**Writes.** Under the log lock: the catalog chooses which pages are new; pending tombstones are written; for each chunk
``Reclaimer`` deletes segments until it fits, and ``PageLog`` appends it and tells the catalog; then quotas are
enforced, and what left for them gets tombstones.

**Threads.** I/O that may hang runs on threads of ``Device``, some for reads and one for writes, and is waited for up to
a deadline. Which calls were refused or late opens the circuit breaker: until a trial succeeds, nothing is found and
nothing is taken. Only the I/O of opening the log has no deadline.

**After a crash** the log says what is there (``SegmentLog.replay``), and the catalog is filled from it, the oldest
segment first. Nothing of this package is on disk: neither the order of use nor quotas.
"""

from kvstore.tiers.disk.tier import CheckReport, DiskTier

__all__ = ["CheckReport", "DiskTier"]
