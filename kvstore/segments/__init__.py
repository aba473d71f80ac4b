"""A log of segment files: the format, and the rules that make it survive a crash.

**Files.** A directory belongs to one process at a time, which holds an ``flock`` on its file ``lock`` (it contains that
process's id). ``<id>.segment``, id as 16 hexadecimal digits, are the segments; ids only grow, so names in order are
segments by age. Every other file is left alone. The directory is 0700, the files are 0600.

**Segment.** Everything is little-endian and lies on multiples of 4096 bytes (a *block*)::

    segment header   1 block
    chunk            header: 1 or more blocks; then the payloads in order, each padded with zeros to whole blocks
    chunk ...
    footer           table of all records of the segment, padded to whole blocks; then the trailer, 1 block

What one append writes is one chunk, in one system call; its pages lie side by side. Each header starts with 8 bytes of
magic and the xxh3_64 of all the rest of it, padding included::

    segment header   magic "KVSEGMNT", checksum, version u32, 0 u32, id u64, stamp 16 bytes
    chunk header     magic "KVCHUNK1", checksum, id u64, stamp, sequence u32, records u32, payload bytes u64 (padded),
                     8 zero bytes, then the records
    record           key 64 bytes, offset u64 (in the file), checksum u64 (xxh3_64 of the payload), length u32 (bytes
                     of the payload, unpadded), codec u8 (0 raw, 255 tombstone), 3 zero bytes: 88 bytes
    trailer          magic "KVTRAIL1", checksum, id u64, stamp, footer's offset u64, records u32, 0 u32,
                     xxh3_64 of the footer's table u64

The stamp is random, one a segment, and never leaves the file: payloads, which clients choose, can't pass for headers.
A file opened to be read says by its segment header which version wrote it. Magic, checksum and version keep their
place in all versions; a version above :data:`~kvstore.segments.record.FORMAT_VERSION`, under a checksum that is right,
is refused with ``FormatError`` before anything is changed. Damage never raises.

**Order.** Segments by id, in them chunks by position, in them records in order: the last record of a key says where its
page is, or, being a tombstone, that there is none.

**Reclaim.** Space comes back by deleting whole segments, *strictly the oldest first*; one that can't be deleted stops
the reclaim. So a tombstone needs no care: whatever it hides is older, hence in its own segment or in one that is
deleted earlier. A reclaim in another order would have to carry over, besides live pages, every tombstone that has a
record of its key in an older segment.

**Crash.** An append returned means that its bytes are in the file; sealing only makes opening fast. Opened again:

- A segment with a sound trailer and footer is *sealed*: its records are read from there.
- Any other is scanned chunk header by chunk header. Where no sound header of this segment stands, or one whose payloads
  go past the end of the file, the scan goes on block by block, so that one damaged header costs one chunk. What
  follows the last whole chunk (a torn tail, a damaged footer) is cut off, and the segment is sealed.
- With its segment header damaged, a segment is known by the chunk header in its second block; with both damaged it has
  no records, counts against the limit, and leaves when it is the oldest.
- A file that the system refuses to read is left as it is.

Opening never appends to an old segment. Payloads are not read at opening: their checksums are verified when they are
read. A tombstone in a chunk whose header is damaged is lost with it, and the page it hid comes back, its own bytes.

After a loss of power, only what a flush had confirmed is sure to be there; what is there beyond it is still verified.
"""
