"""The object tier: pages of a fleet in object storage (S3, GCS, Azure), kept when hosts and Redis are gone.

Pages lie in *packs*, large objects that never change, in the segment log's format. Who writes (a *writer*: one process)
tells of its packs in small numbered *index objects*, and that it lives in a *heartbeat*. Everybody follows all writers,
and knows from memory where each page lies. One concept a module; each imports only from those above it in the table:

================= ================= ================================================================= ==================
module            class             owns                                                              I/O
================= ================= ================================================================= ==================
``names``                           what objects are called                                           none
``pack``                            a pack's bytes                                                    none
``index_object``                    an index object's bytes; several as one                           none
``uses``                            a use object's bytes                                              none
``planning``                        packs, ranges, who leaves, who adopts, what is written anew       none
``keys``          ``PackKeys``      keys of the encryption                                            none
``budget``        ``DayBudget``     a day's writes                                                    none
``known_packs``   ``KnownPacks``    which packs there are, whose they are, which of them are doubted    none
``pages``         ``PackPages``     where each page lies, and where else                              none
``use_log``       ``UseLog``        what is to be told of uses                                        none
``catalog``       ``ObjectCatalog`` these three, quotas and counters, under one lock                  none
``bucket``        ``Bucket``        the library, deadlines, breakers, counts of requests              all requests
``reader``        ``Reader``        one call's reads                                                  through ``Bucket``
``heartbeat``     ``Heartbeat``     this process's name, and that it lives                            through ``Bucket``
``leftovers``     ``Leftovers``     what may be there and nobody wants                                through ``Bucket``
``index_writer``  ``IndexWriter``   this process's index objects, and what they are to say            through ``Bucket``
``writer``        ``Writer``        its packs, its limit, and these three                             through ``Bucket``
``follower``      ``Follower``      the other writers; what dead ones left                            through ``Bucket``
``rounds``        ``Rounds``        the thread that does all that every few seconds                   through the others
``tier``          ``ObjectTier``    all of these, and the locks                                       through the others
================= ================= ================================================================= ==================

**Order.** A pack is written first, then an index object that names it; only then is it known to anybody, this process
included. A pack that is to leave is deleted first, and an index object says so with the next one. What of it is written
again lies in another pack, told of before: whoever finds the old one gone looks what was told meanwhile, and reads
there.

**Correctness rests on contents alone.** A page's key stands for its bytes, its checksum is in the index object and is
verified when it is read; an index object has a checksum of its own. No condition, lock or order of the server's is
relied on, nor any clock but this process's own. Lists that are late, objects that are gone, bodies that are cut or
another object's: all of these are misses. Two writers that store one page, or adopt one dead writer, cost space and
requests.

**Names.** A writer's name is 128 random bits, made by each process; numbers of packs are random, too. A process that
was halted for longer than half of the time behind which others adopt its packs goes on under another name.

**Limits.** All that a writer has there counts against its limit: packs, index objects, heartbeat, use object, and what
may be there since a request failed. Packs leave before others come, so the limit holds at every moment. The limit of
all writers together is soft: each knows of the others' packs only after a while, so it may be passed by the number of
writers times what each writes within 30 s. A process that starts has nothing; it adopts what its predecessor left.

**Locks.** *Polling* is held while it is looked what others have told, *writing* while this writer changes what it has;
the first is taken before the second. The catalog has a lock of its own, held for moments and never over a request."""

from kvstore.tiers.objects.tier import ObjectTier

__all__ = ["ObjectTier"]
