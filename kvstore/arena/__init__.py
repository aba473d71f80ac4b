"""The arena: pages in shared memory, the DRAM tier, which engines on the same host map and read without a call.

Files, in one private folder (by default under ``/dev/shm``, one folder a node):

=============== ====================================================================================================
``pages``       the payloads. A page lies at a multiple of 4 KiB, a *frame*; its slot's number is its first frame's.
``headers``     what the pages are: superblock, counters (those of the lower tiers, too), the unit table, then one
                64-byte header for each frame, of which the first one of each slot is used, then the index from page
                keys to slots. Written by the node alone; clients read it.
``readers``     one line for each client: what it reads without a call, since when. Written by the clients.
``summary-N``   which pages the node's own lower tiers may have: a file for each making, of which the superblock names
                the one that counts; see :mod:`kvstore.arena.summary`. Written by the node alone; clients read it.
``clients/N``   one file for each attached client, which holds it locked (``flock``) as long as it lives. Beside it
                ``N.name`` is what the client calls itself, where it says so.
``calls``       a socket that the node's service answers calls on; see :mod:`kvstore.wire.local`.
``node.lock``   locked by the node that owns the folder; holds its pid.
``folder``      of an embedded store's arena: the path of the store's folder; see :mod:`kvstore.arena.removal`.
``namespaces.json``  which layouts the namespace numbers in the headers stand for.
=============== ====================================================================================================

``pages``, ``headers``, ``readers`` and the summary are never truncated or resized: another size or format makes new
files, and the old ones' superblock is marked retired. They are allocated in full before anyone maps them, or a later
write would be a SIGBUS. ``format.py`` has their bytes, ``arena.py`` makes and maps them.

**Generations.** A header's *generation* says what its slot is, also after the node was killed at any instruction. 0:
never used. Odd: being changed, or free; the bytes mean nothing. Even: a complete page, described by the header. A
generation is never used twice for one slot.

**The order of writes that makes a reader safe.** Readers take no lock that the node waits for, nor the other way round:
each side writes in an order that the other one sees (on x86-64; elsewhere pages are held by calls to the node).

* A page comes (``Arena.publish``, then ``Arena.index``): payload; key, length and checksum; the even generation; last
  its word in the index (:mod:`kvstore.arena.index`).
* A page leaves (``Arena.begin_change``): the odd generation; its word in the index is cleared; the epoch is noted as
  the slot's *retired-at*; last the node's *epoch* moves on. Only then may the slot be lent to a writer, and only when
  no reader is left that could have found the page (``ReaderEpochs.passed``).
* A reader (``ReadingLine``, ``IndexReader``): announces the epoch that it sees in its line of ``readers``; searches the
  index, and reads the generation before and behind the key; copies; compares the generation once more, since a reader
  that is past the deadline which it announced is not waited for; last takes its announcement back.

* A page is nowhere (``MappedArena.find``) if the index has not got it, and then the summary of the lower tiers has
  not, while nothing was withdrawn from that and neither it nor the arena's edition became another one. For that a
  page's tag is in the summary before its word leaves the index, and a page is out of its tier, and that is counted,
  before its tag leaves the summary.

This is epoch-based reclamation, with a seqlock in each slot; :mod:`kvstore.arena.epochs` says why it holds.

**Writers.** While a client may write into a slot, the header names the client as its *owner*. A node that takes the
arena over leaves such slots alone until the client's lock is gone (:mod:`kvstore.arena.clients`): a process that was
stopped may wake up and go on writing.
"""
