"""The DRAM tier: pages in shared memory that engines on the host map.

Files, in one private folder (by default under ``/dev/shm``, one folder a node):

=============== ====================================================================================================
``pages``       the payloads. A page lies at a multiple of 4 KiB, a *frame*; its slot's number is its first frame's.
``headers``     what the pages are: superblock, counters (those of the tiers below, too), the unit table, then one
                64-byte header for each frame, of which the first one of each slot is used, then the index from page
                keys to slots. Written by the node alone; clients read it.
``readers``     one line for each client: what it reads without a call, since when. Written by the clients.
``clients/N``   one file for each attached client, which holds it locked (``flock``) as long as it lives.
``calls``       a socket that the node's service answers calls on; see :mod:`kvstore.wire.local`.
``node.lock``   locked by the node that owns the folder; holds its pid.
``folder``      of an embedded store's arena: the path of the store's folder; see :mod:`kvstore.arena.removal`.
``namespaces.json``  which layouts the namespace numbers in the headers stand for.
=============== ====================================================================================================

These three are never truncated or resized: another size or format makes new files, and the old ones' superblock is
marked retired. They are allocated in full before anyone maps them, or a later write would be a SIGBUS.

A header's *generation* says what its slot is, also after the node was killed at any instruction:

* 0: never used. Odd: being changed, or free; the bytes mean nothing. Even: a complete page, described by the header.
* Publishing writes key, length and checksum first and the even generation last. Taking a page out makes the
  generation odd first. A generation is never used twice for one slot.
* While a client may write into a slot, the header names the client as its *owner*. A node that takes the arena over
  leaves such slots alone until the client's lock is gone: a process that was stopped may wake up and go on writing.
"""
