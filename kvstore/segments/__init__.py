"""An append-only log of segment files: its format on disk, and what is found again after a crash.

The format is drawn here and coded in ``record`` (bytes) and ``cipher`` (encryption). ``segment`` is one file, ``log``
all files of a directory, ``folder`` tells them from foreign ones, ``recovery`` reads what a process left, and ``check``
verifies and repairs a log that no node has open. In memory, ``index`` knows where each page lies (``fingerprints``: of
which namespace), and ``dead_records`` which records have to stay hidden. I/O goes through ``blockfile`` (whole blocks,
O_DIRECT), ``aligned`` (memory for that) and ``io_threads`` (deadlines); ``batching`` plans it, and ``write_budget``
limits it by the day. What is written and what is deleted is decided in :mod:`kvstore.tiers.disk`.

**Files.** A directory belongs to one process at a time, which holds an ``flock`` on its file ``lock`` (it contains that
process's id). ``<id>.segment``, id as 16 hexadecimal digits, are the segments; ids only grow, so names in order are
segments by age. Where a day's bytes are limited, ``writes``, one line of text, says how many may have been written
today (``writes.new`` while it is replaced). The directory is 0700, the files are 0600. Everything else is left alone
and does not count: also folders and links that are called like segments, and a file with a number of 2^63 or more, to
which no log gets by counting, unless its own header says that number, or that of a later file. These are named in the
node's log, and by ``kvstore check``.

**Segment.** Everything is little-endian and lies on multiples of 4096 bytes (a *block*)::

    segment header   1 block
    chunk            header: 1 or more blocks; then the payloads in order, each padded with zeros to whole blocks
    chunk ...
    footer           table of all records of the segment, padded to whole blocks; then the trailer, 1 block

What one append writes is one chunk, in one system call; its pages lie side by side. Each header starts with 8 bytes of
magic and the xxh3_64 of all the rest of it, padding included::

    segment header   magic "KVSEGMNT", checksum, version u32, codec of its pages u32, id u64, stamp 16 bytes,
                     check of the key 16 bytes (zeros where codec is 0)
    chunk header     magic "KVCHUNK1", checksum, id u64, stamp, sequence u32, records u32, payload bytes u64 (padded),
                     8 zero bytes, then the records
    record           key 64 bytes, offset u64 (in the file), checksum u64 (xxh3_64 of the payload as it is stored),
                     length u32 (bytes of the payload as it is stored, unpadded), codec u8 (0 raw, 1 AES-GCM,
                     255 tombstone), 3 zero bytes: 88 bytes
    trailer          magic "KVTRAIL1", checksum, id u64, stamp, footer's offset u64, records u32, 0 u32,
                     xxh3_64 of the footer's table u64

The stamp is random, one a segment, and never leaves the file: payloads, which clients choose, can't pass for headers.

**Versions.** A segment header says the oldest version that suffices to read it: 1 for segments as above with codecs 0
and 255; 2 for encrypted ones. Magic, checksum and version keep their place in all versions; a version above
:data:`~kvstore.segments.record.FORMAT_VERSION`, under a checksum that is right, is refused with ``FormatError`` before
anything is changed. Segments of all older versions lie side by side. Damage never raises.

**Encryption** (:mod:`~kvstore.segments.cipher`). Codec 1: the page's bytes under AES-256-GCM, then the tag, 16 bytes.
The key is HKDF-SHA256 of the operator's key, with the stamp as salt and ``"kvstore segment"`` and the id (8 bytes) as
info; the nonce is the payload's offset in blocks, 12 bytes; the page key is authenticated with it. No offset of a
segment is written twice: after an append that failed, a segment takes no other. The header's check of the key is the
first 16 bytes of HMAC-SHA256 of ``"kvstore check"``, id and stamp under the operator's key: a log of another key is
refused before anything is changed; where the header is damaged, a sound page is decrypted to tell. Checksums are over
what is stored: a log is checked without its key.

**Order.** Segments by id, in them chunks by position, in them records in order: the last record of a key says where its
page is, or, being a tombstone, that there is none.

**Reclaim.** Space is reclaimed by deleting whole segments, in any order: first the one of which the smallest part is in
recent use. Before it is deleted, pages of it that were read recently are appended once more (*carried over*), up to a
quarter of its bytes; so at least three quarters of each segment are reclaimed, and of what is written at most a third
is written again. A record whose page was removed, or stored again, is *dead*. It stays in its segment until that is
deleted, and something newer hides it: a tombstone, or another record of the key. Before a segment is deleted that hides
a dead record of an *older* segment, a tombstone for it is appended elsewhere. The oldest segment hides nothing of the
kind: where there is no space for the tombstones of another, it is deleted instead. A segment in which no page is left
is deleted at once.

**Limit.** Everything counts: all files, the footer that the open segment will get, and what a call that hangs may still
write. A quarter of a segment is kept free where there are segments enough, for carrying over within the limit.

**What is found again after a crash.** When the process dies, at any instruction: every page and every tombstone whose
append had returned, since its bytes are in the file. Of an append that was under way, the chunk as a whole or nothing.
When the machine loses power: what a flush had confirmed; more may be there, and is verified like all else. Never wrong
bytes, nor another page's: checksums refuse them when a page is read.

How it is found, when the log is opened again; sealing only makes this fast:

- A segment with a sound trailer and footer is *sealed*: its records are read from there.
- Any other is scanned chunk header by chunk header. Where no sound header of this segment stands, or one whose payloads
  go past the end of the file, the scan goes on block by block, so that one damaged header costs one chunk. What
  follows the last whole chunk (a torn tail, a damaged footer) is cut off, and the segment is sealed.
- With its segment header damaged, a segment is known by the chunk header in its second block; with both damaged it has
  no records, counts against the limit, and leaves before any other.
- A file that the system refuses to read is left as it is; as long as it is there, no tombstone newer than it is lost.

An append that failed, or was late, and could not be cut off may be found whole at the next opening. Its records count
as dead until then, and their keys get tombstones, so that a page which is removed meanwhile stays away.

Opening never appends to an old segment. Payloads are not read at opening: their checksums are verified when they are
read. A tombstone in a chunk whose header is damaged is lost with it, and the page it hid comes back, its own bytes.

A segment whose sync the system refused is not synced again: a later sync would succeed though what could not be written
was dropped. What can be read of it is appended anew, and it is deleted. That a sync was refused is not written down.
"""
