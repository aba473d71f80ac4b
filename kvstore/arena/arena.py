"""The arena's files: made, mapped, taken over from an earlier node, and the headers in them written.

Which page lies in which slot is decided by the catalog of the store.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.arena import format as fmt
from kvstore.arena.detaching import detach
from kvstore.arena.epochs import LINE_WORDS, READERS_BYTES
from kvstore.arena.index import IndexReader, IndexWriter
from kvstore.arena.removal import (
    LOCK_NAME,
    MEMORY_NAMES,
    forget_folder,
    is_gone,
    note_folder,
    remove,
    remove_memory,
)
from kvstore.arena.summary_file import Summaries
from kvstore.core import choice
from kvstore.errors import ResourceError
from kvstore.host.forking import register_forked
from kvstore.host.numa import Placement
from kvstore.host.process_lock import ProcessLock
from kvstore.host.shared_memory import check_space
from kvstore.security.socket_group import SocketGroup
from kvstore.units import format_size

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called with the bytes done so far and in all."""

_MADV_POPULATE_WRITE = 23
_POPULATE_STEP = 64 << 20
_SEQUENCES = 1 << 63
_MOST_TRIES = 100
"""To make and lock a folder that others, who are done with it, remove."""
_ELSEWHERE = 2
"""The native core's word for a page whose word is not in its home bucket."""
_COUNTER_PLACES = {counter: place for place, counter in enumerate(fmt.COUNTERS)}
_log = logging.getLogger(__name__)


class FoundSlot(NamedTuple):
    """What a header said when an earlier node's arena was taken over."""

    frame: int
    frames: int
    complete: bool
    """True: a page. False: a slot into which the client ``owner`` may still write."""
    hash: bytes
    namespace: int
    length: int
    checksum: int | None
    owner: int
    sequence: int


class FoundSlab(NamedTuple):
    """A slab of an earlier node's arena."""

    first_unit: int
    units: int
    slot_frames: int


class Arena:
    """A folder of shared memory that this process owns. Not safe for threads: the store's lock guards the headers.

    Args:
        directory: the folder; made where it is missing.
        arena_bytes: size of ``pages``; rounded down to whole units.
        progress: told how far populating is; it takes about a second for each GiB.
        group: whose members besides this user may attach.
        numa_node: whose memory it is in; None: any.
        embedded_in: the folder of the embedded store whose arena this is, and with which it goes; None: it stays.

    Raises:
        ConfigError: this machine has no such NUMA node.
        InUseError: another process owns the folder.
        ResourceError: the folder can't be used, or the memory is not there; the message names both sizes.
    """

    def __init__(
        self,
        directory: Path,
        arena_bytes: int,
        progress: Progress = lambda done, size: None,
        group: SocketGroup = SocketGroup(),  # noqa: B008 - it can't be changed
        numa_node: int | None = None,
        embedded_in: Path | None = None,
    ) -> None:
        placement = Placement(numa_node)
        self.unit_bytes = fmt.unit_bytes_for(arena_bytes)
        self.units = arena_bytes // self.unit_bytes
        self.arena_bytes = self.units * self.unit_bytes
        if not self.units:
            raise ResourceError(f"an arena needs at least {format_size(fmt.FRAME_BYTES)}")
        self.directory = directory
        self._group = group
        self._embedded_in = embedded_in
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        """By device and inode."""
        register_forked(self)
        self._lock = _own_directory(directory, group)
        self._is_new = not any((directory / name).exists() for name in MEMORY_NAMES)
        try:
            (directory / "clients").mkdir(mode=0o700, exist_ok=True)
            self.taken_over = self._take_over()
            if not self.taken_over:
                with placement.allocating():
                    self._make(lambda done, size: progress(done // 2, size))
            self._set_modes(group)
            self._map()
            if self.taken_over:  # it may lie elsewhere
                placement.move(self._pages_map)
                placement.move(self._headers_map)
            # Allocated memory is not yet zeroed, and not yet in this process's page tables: the first copies would pay.
            before = 0 if self.taken_over else self.arena_bytes
            share = 1 if self.taken_over else 2
            _populate(self._pages_map, lambda done, size: progress((before + done) // share, size))
            if embedded_in is None:
                forget_folder(directory)
        except BaseException as error:
            self.abandon()
            if isinstance(error, OSError) and not isinstance(error, ResourceError):
                raise ResourceError.of_place(directory, error) from error
            raise

    def _set_modes(self, group: SocketGroup) -> None:
        """Set what a client's user needs, and nothing more: who reads a header must not write it."""
        group.set_modes(self.directory / "headers", 0o600, 0o640)
        for name in ("pages", "readers"):
            group.set_modes(self.directory / name, 0o600, 0o660)
        # Set-group-id: a client's lock file is the group's, so that the node may open it.
        group.set_modes(self.directory / "clients", 0o700, 0o2770)

    def _map(self) -> None:
        self._pages_map = self._map_file("pages", self.arena_bytes)
        self._headers_map = self._map_file("headers", fmt.headers_bytes(self.arena_bytes))
        self._geometry = fmt.geometry(self.arena_bytes)
        self.pages: Bytes = np.frombuffer(self._pages_map, np.uint8)
        self._headers = np.frombuffer(self._headers_map, fmt.HEADER, offset=fmt.SLOTS_OFFSET)
        # One aligned 64-bit store a generation: a memoryview of words compiles to a single move on x86-64.
        self._words = memoryview(self._headers_map)[fmt.SLOTS_OFFSET :].cast("Q")
        self._owners = self._words.cast("B").cast("H")
        self._counters = memoryview(self._headers_map)[fmt.COUNTERS_OFFSET :][: 8 * len(fmt.COUNTERS)].cast("Q")
        self._units = np.frombuffer(self._headers_map, fmt.UNIT, fmt.MAX_UNITS, fmt.UNITS_OFFSET)
        self._map_for_readers()
        superblock = fmt.Superblock.unpack(self._headers_map[: fmt.FRAME_BYTES])
        assert superblock is not None
        self.arena_id = superblock.arena_id
        self._sequence = 0
        if self.taken_over:  # what counting can't have come to must not be where it goes on
            sequences = self._headers["sequence"]
            self._sequence = int(sequences[sequences < _SEQUENCES].max(initial=0))

    def _map_for_readers(self) -> None:
        """What clients read without a call; until ``open_for_readers`` they are told not to."""
        headers = memoryview(self._headers_map)
        self._edition = headers[fmt.EDITION_OFFSET :][:8].cast("Q")
        self._edition[0] = 0
        self.summaries = Summaries(self.directory, headers[fmt.SUMMARY_OFFSET :][:8].cast("Q"), self._group, self._maps)
        """Of what the node's own tiers hold."""
        self._elsewhere = headers[fmt.ELSEWHERE_OFFSET :][:8].cast("Q")
        self._elsewhere[0] = 0
        self._epoch = headers[fmt.EPOCH_OFFSET :][:8].cast("Q")
        self._epoch[0] += 1
        start, buckets = fmt.index_offset(self.arena_bytes), fmt.buckets_for(self.arena_bytes)
        reach = start + buckets * fmt.BUCKET_BYTES
        self._index = IndexWriter(headers[start:reach].cast("Q"), headers[reach : reach + buckets])
        self._index.clear()  # it is made from the headers, not trusted
        self._readers_map = self._map_file("readers", READERS_BYTES)
        self.lines = memoryview(self._readers_map).cast("Q")
        self._retired_at = np.zeros(self.arena_bytes // fmt.FRAME_BYTES, np.uint64)
        """For each frame the epoch at which a page left it last."""
        if any(self.lines[::LINE_WORDS]):  # somebody may read what was free before this node was there
            self._retired_at[:] = self._epoch[0]
            self._epoch[0] += 1

    # -- readers -----------------------------------------------------------------------------------------------------

    @property
    def edition(self) -> int:
        """What clients compare; see ``kvstore.arena.format.EDITION_OFFSET``."""
        return int(self._edition[0])

    def open_for_readers(self, *, own_tiers: bool, shared_tier: bool) -> None:
        """The index is complete; a page that is not in it may be in a tier of whose pages the node knows by itself, or
        in a shared one that has to be asked."""
        self._elsewhere[0] |= own_tiers * fmt.IN_OWN_TIER | shared_tier * fmt.IN_SHARED_TIER
        self.new_edition()

    def new_edition(self) -> None:
        """What clients know of namespaces may be out of date."""
        self._edition[0] = secrets.randbits(63) | 1

    def retired_at(self, frame: int, frames: int) -> int:
        """The epoch at which a page left these frames last. Who read it must be done before they are written."""
        return int(self._retired_at[frame : frame + frames].max())

    # -- pages -------------------------------------------------------------------------------------------------------

    def view(self, frame: int, length: int) -> Bytes:
        """A page's payload: a writable view of ``length`` bytes, without a copy."""
        start = frame * fmt.FRAME_BYTES
        return self.pages[start : start + length]

    # -- headers -----------------------------------------------------------------------------------------------------

    def begin_change(self, frame: int, owner: int) -> None:
        """From now on the slot's bytes mean nothing, also to a node that takes over; ``owner`` may write them.

        The order of writes is :mod:`kvstore.arena`'s.
        """
        self.begin_changes((frame,), owner)

    def begin_changes(self, frames: Sequence[int], owner: int) -> None:
        """:meth:`begin_change` of many slots."""
        core = choice.native()
        if core is not None:
            told = core.begin_changes(self._headers_map, self._geometry, list(frames), owner)
            left = list(compress(frames, told))
            indexed = []
            if _ELSEWHERE in told:
                indexed = [frame for frame, how in zip(frames, told, strict=True) if how == _ELSEWHERE]
        else:
            left = indexed = self._begin_changes(frames, owner)
        if indexed:
            self._withdraw(indexed)
        if left:
            self._retire(left)

    def _begin_changes(self, frames: Sequence[int], owner: int) -> list[int]:
        """Make generations odd. Returns which slots held a page."""
        words, owners = self._words, self._owners
        left = []
        for frame in frames:
            word = frame * fmt.HEADER_WORDS + fmt.GENERATION_WORD
            generation = words[word]
            if generation % 2 == 0:
                words[word] = generation + 1
                if generation:
                    left.append(frame)
            owners[frame * (fmt.HEADER_BYTES // 2) + fmt.OWNER_PLACE] = owner
        return left

    def _withdraw(self, frames: Sequence[int]) -> None:
        """Pages' generations are odd: take them out of the index."""
        unpack, headers = fmt.HEADER_BODY.unpack_from, self._headers_map
        first = fmt.SLOTS_OFFSET + fmt.BODY_OFFSET
        pages: dict[int, list[tuple[int, bytes]]] = {}
        for frame in frames:
            block_hash, _, _, _, namespace, _ = unpack(headers, first + frame * fmt.HEADER_BYTES)
            pages.setdefault(namespace, []).append((frame, block_hash))
        for namespace, some in pages.items():
            self._index.remove_all(namespace, some)

    def _retire(self, frames: Sequence[int]) -> None:
        """Pages are out of the index: let the epoch move on."""
        words, retired_at, epoch = self._words, self._retired_at, self._epoch[0]
        for frame in frames:
            length = words[frame * fmt.HEADER_WORDS + fmt.DESCRIPTION_WORD] & fmt.LENGTH_MASK
            retired_at[frame : frame + fmt.frames_for(length)] = epoch
        self._epoch[0] = epoch + 1

    def publish(
        self,
        frames: Sequence[int],
        hashes: Sequence[bytes],
        namespace: int,
        length: int,
        checksums: Sequence[int | None],
    ) -> None:
        """From now on these slots hold these pages of one namespace, complete, and the pages are found.

        Args:
            frames: the first one of each slot.
            hashes: of each page, head of the prefix first: of one batch, the tail counts as older.
            namespace: its number.
            length: of each, in bytes.
            checksums: of each, where it was made.
        """
        self._sequence += len(frames)
        sums = [checksum or 0 for checksum in checksums]
        pages = list(zip(frames, hashes, strict=True))
        core = choice.native()
        if core is not None:
            joined, sequence = b"".join(hashes), self._sequence
            named = core.publish(
                self._headers_map, self._geometry, list(frames), joined, sums, sequence, namespace, length
            )
            pages = [page for page, done in zip(pages, named, strict=True) if not done] if 0 in named else []
        else:
            pack, headers, words = fmt.HEADER_BODY.pack_into, self._headers_map, self._words
            first = fmt.SLOTS_OFFSET + fmt.BODY_OFFSET
            sequences = range(self._sequence, self._sequence - len(frames), -1)
            for (frame, block_hash), checksum, sequence in zip(pages, sums, sequences, strict=True):
                start = first + frame * fmt.HEADER_BYTES
                pack(headers, start, block_hash, checksum, sequence, length, namespace, 0)
                words[frame * fmt.HEADER_WORDS + fmt.GENERATION_WORD] += 1
        if pages:
            self.index(namespace, pages)

    def index(self, namespace: int, pages: Sequence[tuple[int, bytes]]) -> None:
        """Let published pages of a namespace be found: (frame, hash) of each."""
        if not self._index.insert_all(namespace, pages):
            self._elsewhere[0] |= fmt.UNPLACED

    def checksum(self, frame: int) -> int | None:
        """The payload's xxh3_64; None if nobody made it yet."""
        return self._words[frame * fmt.HEADER_WORDS + fmt.CHECKSUM_WORD] or None

    def set_checksum(self, frame: int, checksum: int) -> None:
        """The payload's xxh3_64, known from now on."""
        self._words[frame * fmt.HEADER_WORDS + fmt.CHECKSUM_WORD] = checksum

    def set_units(self, table: list[tuple[int, int]]) -> None:
        """Write down which slab each unit belongs to: (first unit, slot size in frames), ``(0, 0)`` for none."""
        self._units[: len(table)] = table

    def count(self, counter: str, pages: int = 1) -> None:
        """Add to a counter that survives this process."""
        if pages:
            place = _COUNTER_PLACES[counter]
            self._counters[place] = (int(self._counters[place]) + pages) & 0xFFFFFFFFFFFFFFFF

    def counters(self) -> dict[str, int]:
        """The counters since the arena was made."""
        return dict(zip(fmt.COUNTERS, self._counters.tolist(), strict=True))

    def tier_counters(self, tier: str) -> memoryview:
        """The counters of a lower tier, to be written by that tier alone, and released before the arena is given up."""
        start = fmt.TIER_COUNTERS_OFFSETS[tier]
        return memoryview(self._headers_map)[start : start + 8 * len(fmt.TIER_COUNTERS)].cast("Q")

    def found(self) -> tuple[list[FoundSlab], list[FoundSlot]]:
        """The slabs and slots that an earlier node left, slots in the order in which their pages should leave."""
        slabs: list[FoundSlab] = []
        slots: list[FoundSlot] = []
        unit_frames = self.unit_bytes // fmt.FRAME_BYTES
        table = self._units[: self.units]
        unit = 0
        while unit < self.units:
            slab, frames = int(table[unit]["slab"]), int(table[unit]["slot_frames"])
            end = unit + 1
            while frames and end < self.units and tuple(table[end]) == tuple(table[unit]):
                end += 1
            if frames and slab == unit and frames <= (end - unit) * unit_frames:
                slabs.append(FoundSlab(unit, end - unit, frames))
                slots += self._found_slots(unit * unit_frames, (end - unit) * unit_frames // frames, frames)
            unit = end
        slots.sort(key=lambda slot: slot.sequence)
        return slabs, slots

    def _found_slots(self, first: int, count: int, frames: int) -> list[FoundSlot]:
        headers = self._headers[first : first + (count - 1) * frames + 1 : frames]
        generation = headers["generation"]
        fits = (headers["length"] > 0) & (headers["length"] <= frames * fmt.FRAME_BYTES)
        complete = (generation > 0) & (generation % 2 == 0) & fits
        keep = complete | ((generation % 2 == 1) & (headers["owner"] > 0))
        return [
            FoundSlot(
                first + int(index) * frames,
                frames,
                bool(complete[index]),
                header["hash"].tobytes(),
                int(header["namespace"]),
                int(header["length"]),
                int(header["checksum"]) or None,
                int(header["owner"]),
                int(header["sequence"]),
            )
            for index, header in zip(np.flatnonzero(keep), headers[keep], strict=True)
        ]

    def check_index(self, pages: Sequence[tuple[int, int, bytes, int]]) -> None:
        """Compare the index with what should be in it: (frame, namespace, hash, length) of every page.

        Raises:
            AssertionError: a page is not found, or the index holds something else besides.
        """
        reader = IndexReader.of(self._headers_map, self.arena_bytes)
        found = [reader.find_one(namespace, length, block_hash)[0] for _, namespace, block_hash, length in pages]
        lost = [frame for (frame, *_), at in zip(pages, found, strict=True) if at != frame]
        # A page may have no place in the index, if very many keys share a few buckets.
        assert not set(lost) - self._index.unplaced, f"slots {lost} are not in the index"
        assert reader.words_in_use() == len(pages) - len(lost), "the index names slots that hold no page"

    # -- files -------------------------------------------------------------------------------------------------------

    @property
    def is_mapped(self) -> bool:
        """Whether other processes may map it: not an embedded store's."""
        return self._embedded_in is None

    def close(self, *, needed: bool = False) -> None:
        """Give the folder up. The files stay, with their pages, for the next node.

        An embedded store's go, unless they are ``needed``, as they have pages that its folder has not.
        """
        if self._embedded_in is None or (needed and not is_gone(self._embedded_in)):
            self._lock.release()
        else:
            self._remove()

    def abandon(self) -> None:
        """Give the folder up, as the store over it could not be opened: what was there stays, what was made goes."""
        if self._is_new and self._lock.held:
            if self._embedded_in is not None:
                self._remove()
                return
            remove_memory(self.directory)
        self._lock.release()

    def forked(self) -> None:
        """In a child: what it reads and writes is not the parent's arena, and keeps no memory of that."""
        detach(self._maps)

    def note_folder(self) -> None:
        """Let it be known whose arena this is, once the store's folder is there."""
        if self._embedded_in is not None:
            note_folder(self.directory, self._embedded_in)

    def _remove(self) -> None:
        if self._lock.held:
            for mapping in self._maps.values():  # whoever still has a view keeps addresses, and no memory
                with contextlib.suppress(OSError):
                    mapping.madvise(mmap.MADV_REMOVE)
            remove(self.directory, self._lock)

    def _map_file(self, name: str, size: int) -> mmap.mmap:
        fd = os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self._maps[status.st_dev, status.st_ino] = mapped
        return mapped

    def _take_over(self) -> bool:
        """Whether the folder holds complete files of this size and format."""
        pages, headers, readers = (self.directory / name for name in MEMORY_NAMES)
        try:
            with headers.open("rb") as file:
                superblock = fmt.Superblock.unpack(file.read(fmt.FRAME_BYTES))
            sizes = pages.stat().st_size, headers.stat().st_size, readers.stat().st_size
        except OSError:
            return False
        return (
            superblock is not None
            and not superblock.retired
            and superblock.arena_bytes == self.arena_bytes
            and superblock.unit_bytes == self.unit_bytes
            and sizes == (self.arena_bytes, fmt.headers_bytes(self.arena_bytes), READERS_BYTES)
        )

    def _make(self, progress: Progress) -> None:
        headers_bytes = fmt.headers_bytes(self.arena_bytes)
        size = self.arena_bytes + headers_bytes + READERS_BYTES
        old = [path for path in (self.directory / name for name in MEMORY_NAMES) if path.exists()]
        # Before the old files go: a size that can't be had must not cost the pages that are there.
        check_space(self.directory, size, reusable=sum(path.stat().st_blocks * 512 for path in old))
        if old:
            _log.warning("%s: its size or format has changed: the pages in it are dropped", self.directory)
        self._retire_old()
        self._is_new = True
        superblock = fmt.Superblock(self.arena_bytes, self.unit_bytes, secrets.token_bytes(16))
        try:
            _allocate(self.directory / "headers", headers_bytes)
            _allocate(self.directory / "readers", READERS_BYTES)
            _allocate(self.directory / "pages", self.arena_bytes, progress)
        except BaseException as error:
            remove_memory(self.directory)  # or the memory would stay allocated, for nobody
            if not isinstance(error, OSError):
                raise
            raise ResourceError(f"{self.directory}: can't allocate {format_size(size)}: {error.strerror}") from error
        with (self.directory / "headers").open("r+b") as file:
            file.write(superblock.pack())

    def _retire_old(self) -> None:
        """Tell whoever maps the old files that they were replaced, and unlink them."""
        with contextlib.suppress(OSError), (self.directory / "headers").open("r+b") as file:
            if file.read(len(fmt.MAGIC)) == fmt.MAGIC:
                file.seek(fmt.RETIRED_OFFSET)
                file.write(fmt.RETIRED)
                file.seek(fmt.EDITION_OFFSET)
                file.write(bytes(8))
        remove_memory(self.directory)


def _own_directory(directory: Path, group: SocketGroup) -> ProcessLock:
    """Make a folder that is nobody else's and lock it for this process.

    Raises:
        InUseError: another process has it; the message names its pid.
        ResourceError: the folder can't be made, is somebody else's, or is everybody's.
    """
    for tries_left in reversed(range(_MOST_TRIES)):
        try:
            return _try_to_own(directory, group)
        except FileNotFoundError as error:  # an embedded store that is closed takes its folder along
            if not tries_left:
                raise ResourceError.of_place(directory, error) from error
        except OSError as error:
            if isinstance(error, ResourceError):
                raise
            raise ResourceError.of_place(directory, error) from error
    raise AssertionError("every try returns or raises")


def _try_to_own(directory: Path, group: SocketGroup) -> ProcessLock:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise ResourceError(f"{directory} belongs to user {status.st_uid}, not to {os.geteuid()}")
    above = directory.absolute().parent
    if above.stat().st_uid not in (0, os.geteuid()):  # who could put another folder in its place
        raise ResourceError(f"{above} belongs to user {above.stat().st_uid}, not to {os.geteuid()} or root")
    if status.st_mode & stat.S_ISVTX:  # /dev/shm itself, say: made private, it would be taken from everybody else
        raise ResourceError(f"{directory} is shared by all users: name a folder inside it")
    group.set_modes(directory, 0o700, 0o750)
    group.check_way_to(directory)
    return ProcessLock(directory / LOCK_NAME, f"{directory} is in use")


def _allocate(path: Path, size: int, progress: Progress = lambda done, size: None) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for start in range(0, size, _POPULATE_STEP):
            step = min(_POPULATE_STEP, size - start)
            os.posix_fallocate(fd, start, step)
            progress(start + step, size)
    finally:
        os.close(fd)


def _populate(mapping: mmap.mmap, progress: Progress) -> None:
    """Give this process its page table entries now, not at the first copy of each page."""
    for start in range(0, len(mapping), _POPULATE_STEP):
        step = min(_POPULATE_STEP, len(mapping) - start)
        with contextlib.suppress(OSError, ValueError):  # older kernels: the first touch pays instead
            mapping.madvise(_MADV_POPULATE_WRITE, start, step)
        progress(start + step, len(mapping))
