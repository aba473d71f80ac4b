"""The arena's files: made, owned by one process, taken over, replaced."""

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.arena import arena as arena_module
from kvstore.arena import format as fmt
from kvstore.arena.arena import Arena, FoundSlab
from kvstore.core import choice
from kvstore.errors import InUseError, ResourceError

KIB = 1 << 10


def make(shm: Path, size: int = 256 * KIB) -> Arena:
    return Arena(shm / "arena", size)


def superblock(data: bytes) -> fmt.Superblock:
    block = fmt.Superblock.unpack(data)
    assert block is not None
    return block


def test_a_new_arena_is_private_allocated_and_empty(shm: Path) -> None:
    arena = make(shm)
    assert not arena.taken_over
    assert (arena.arena_bytes, len(arena.pages)) == (256 * KIB, 256 * KIB)
    assert arena.found() == ([], [])
    assert set(arena.counters().values()) == {0}
    assert stat.S_IMODE((shm / "arena").stat().st_mode) == 0o700
    for name in ("pages", "headers"):
        status = (shm / "arena" / name).stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_blocks * 512 >= status.st_size, "a write into a hole may be a SIGBUS"
    arena.close()


def test_sizes_are_rounded_down_to_whole_units(shm: Path) -> None:
    arena = make(shm, (1 << 20) + 4097)
    assert arena.arena_bytes % arena.unit_bytes == 0
    assert 0 <= (1 << 20) + 4097 - arena.arena_bytes < arena.unit_bytes
    arena.close()
    again = make(shm, (1 << 20) + 4097)
    assert again.taken_over
    again.close()
    with pytest.raises(ResourceError, match="needs at least 4 KiB"):
        make(shm, 4095)


def test_progress_ends_at_all_of_it(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_POPULATE_STEP", 64 * KIB)
    for taken_over in (False, True):
        steps: list[tuple[int, int]] = []
        arena = Arena(shm / "arena", 256 * KIB, lambda done, size, steps=steps: steps.append((done, size)))
        arena.close()
        assert arena.taken_over == taken_over
        assert steps == sorted(steps)
        assert {size for _, size in steps} == {256 * KIB}
        assert steps[-1] == (256 * KIB, 256 * KIB)
        assert steps[0][0] <= 64 * KIB


def test_a_second_owner_is_refused_with_the_firsts_pid(shm: Path) -> None:
    arena = make(shm)
    with pytest.raises(InUseError, match=f"{shm}/arena is in use by process {os.getpid()}"):
        make(shm)
    arena.close()
    arena.close()
    make(shm).close()


def test_a_failed_start_gives_the_folder_up(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_populate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(shm)
    monkeypatch.undo()
    make(shm).close()


def test_a_folder_of_everybody_is_refused_and_left_as_it_is(shm: Path) -> None:
    """/dev/shm itself, say: made private, it would be nobody else's any more."""
    shm.chmod(0o1777)
    with pytest.raises(ResourceError, match=f"{shm} is shared by all users: name a folder inside it"):
        Arena(shm, 256 * KIB)
    assert stat.S_IMODE(shm.stat().st_mode) == 0o1777
    shm.chmod(0o700)


def test_a_folder_of_another_user_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    (shm / "arena").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ResourceError, match=f"{shm}/arena belongs to user {user}, not to {user + 1}"):
        make(shm)


def test_a_folder_below_another_users_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could put another one in its place."""
    real = Path.stat
    fields = list(shm.stat())
    fields[stat.ST_UID] += 1
    above = os.stat_result(fields)
    monkeypatch.setattr(Path, "stat", lambda path, **options: above if path == shm else real(path, **options))
    with pytest.raises(ResourceError, match=f"{shm} belongs to user {above.st_uid}"):
        make(shm)


def test_a_folder_that_cannot_be_made_is_named(shm: Path) -> None:
    (shm / "arena").touch()
    with pytest.raises(ResourceError, match=f"{shm}/arena can't be used"):
        make(shm)


def test_what_was_published_is_found_in_the_order_of_leaving(shm: Path) -> None:
    arena = make(shm)
    arena.set_units([(0, 2), (0, 2), (0, 2), (0, 2), (4, 1)])
    payload = np.arange(5000, dtype=np.uint64).astype(np.uint8)
    for frame in (0, 2):
        arena.view(frame, 5000)[:] = payload
    arena.begin_changes([0, 2], 7)
    arena.publish([0, 2], [b"\0" * 32, b"\2" * 32], 3, 5000, [None, None])
    arena.set_checksum(2, 99)
    arena.begin_change(4, 9)
    arena.publish([4], [b"4" * 32], 3, 4096, [11])
    arena.count("stored", 3)
    arena.close()

    again = make(shm)
    assert again.taken_over
    assert again.arena_id == arena.arena_id
    slabs, slots = again.found()
    assert slabs == [FoundSlab(0, 4, 2), FoundSlab(4, 1, 1)]
    assert [(slot.frame, slot.frames, slot.hash, slot.length, slot.checksum) for slot in slots] == [
        (2, 2, b"\2" * 32, 5000, 99),
        (0, 2, b"\0" * 32, 5000, None),
        (4, 1, b"4" * 32, 4096, 11),
    ]
    assert {(slot.complete, slot.namespace, slot.owner) for slot in slots} == {(True, 3, 0)}
    assert np.array_equal(again.view(0, 5000), payload)
    assert again.counters()["stored"] == 3
    again.begin_change(2, 0)
    again.publish([2], [b"n" * 32], 3, 5000, [None])
    assert [slot.frame for slot in again.found()[1]] == [0, 4, 2], "a page published from now on is newer than all"
    again.close()


def test_a_slot_that_is_being_changed_is_no_page(shm: Path) -> None:
    arena = make(shm)
    arena.set_units([(unit, 1) for unit in range(8)])
    arena.begin_changes(range(6), 0)
    arena.publish(range(6), [bytes([frame]) * 32 for frame in range(6)], 1, 4096, [None] * 6)
    arena.begin_change(0, 0)
    arena.begin_change(1, 5)
    arena.begin_change(2, 5)
    arena.begin_change(2, 0)
    arena._headers[3]["length"] = 4097
    arena._headers[4]["length"] = 0
    arena.begin_change(6, 5)
    # The node was killed while it published: key and length are there, the generation is still odd.
    arena.begin_change(7, 0)
    fmt.HEADER_BODY.pack_into(arena._headers_map, fmt.SLOTS_OFFSET + 7 * 64 + 8, b"7" * 32, 0, 9, 4096, 1, 0)
    arena.close()
    again = make(shm)
    _, slots = again.found()
    assert {(slot.frame, slot.complete, slot.owner) for slot in slots} == {
        (1, False, 5),
        (5, True, 0),
        (6, False, 5),
    }
    again.close()


def test_a_generation_is_never_used_twice(shm: Path) -> None:
    arena = make(shm)
    seen = []
    for _ in range(3):
        arena.begin_change(0, 1)
        arena.begin_change(0, 1)
        seen.append(int(arena._headers[0]["generation"]))
        arena.publish([0], [b"h" * 32], 1, 1, [None])
        seen.append(int(arena._headers[0]["generation"]))
    assert seen == [1, 2, 3, 4, 5, 6]
    arena.close()


@pytest.mark.parametrize(
    "table",
    [
        [(1, 1), (0, 0)],
        [(0, 65)],
        [(0, 8), (0, 8), (2, 100)],
        [(4, 2), (4, 2), (4, 2), (4, 2)],
        [(0xFFFFFFFF, 0xFFFFFFFF)] * 64,
    ],
)
def test_a_unit_table_that_makes_no_sense_is_no_slab(shm: Path, table: list[tuple[int, int]]) -> None:
    arena = make(shm)
    arena.set_units(table)
    arena.close()
    again = make(shm)
    slabs, slots = again.found()
    assert slots == []
    assert all(slab.slot_frames <= slab.units for slab in slabs)
    again.close()


def test_another_size_makes_new_files_and_retires_the_old_ones(shm: Path) -> None:
    arena = make(shm)
    old = (shm / "arena" / "headers").open("rb")
    (shm / "arena" / "clients" / "1").touch()
    (shm / "arena" / "namespaces.json").touch()
    arena.close()
    other = make(shm, 512 * KIB)
    assert not other.taken_over
    assert other.arena_id != arena.arena_id
    with old:
        assert superblock(old.read(4096)).retired == 1
    assert superblock((shm / "arena" / "headers").read_bytes()).retired == 0
    files = sorted(path.name for path in (shm / "arena").iterdir())
    assert files == ["clients", "headers", "node.lock", "pages", "readers"]
    assert list((shm / "arena" / "clients").iterdir()) == []
    arena.pages[0] = 1
    assert other.pages[0] == 0, "the old mapping is another file"
    other.close()


def test_another_format_makes_new_files_and_retires_the_old_ones(shm: Path) -> None:
    make(shm).close()
    with (shm / "arena" / "headers").open("r+b", buffering=0) as file:
        file.seek(len(fmt.MAGIC))
        file.write((fmt.VERSION + 1).to_bytes(4, "little"))
        other = make(shm)
        file.seek(fmt.RETIRED_OFFSET)
        assert file.read(8) == fmt.RETIRED
    assert not other.taken_over
    other.close()


@pytest.mark.parametrize("damage", ["pages cut", "headers cut", "no pages", "no headers", "no superblock", "retired"])
def test_incomplete_files_are_made_anew(shm: Path, damage: str) -> None:
    make(shm).close()
    pages, headers = shm / "arena" / "pages", shm / "arena" / "headers"
    match damage:
        case "pages cut":
            os.truncate(pages, 4096)
        case "headers cut":
            os.truncate(headers, 4096)
        case "no pages":
            pages.unlink()
        case "no headers":
            headers.unlink()
        case "no superblock":  # what a kill in the middle of making leaves
            with headers.open("r+b") as file:
                file.write(bytes(4096))
        case "retired":
            with headers.open("r+b") as file:
                file.seek(fmt.RETIRED_OFFSET)
                file.write(fmt.RETIRED)
    arena = make(shm)
    assert not arena.taken_over
    assert len(arena.pages) == 256 * KIB
    arena.close()


def test_a_size_that_cannot_be_had_costs_no_page_that_is_there(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make(shm)
    arena.set_units([(0, 1)])
    arena.begin_change(0, 0)
    arena.publish([0], [b"h" * 32], 1, 4096, [None])
    arena.close()
    with pytest.raises(ResourceError, match=r"the arena needs \d+ TiB, only .* are free there"):
        make(shm, 1 << 50)
    again = make(shm)
    assert again.taken_over
    assert len(again.found()[1]) == 1
    again.close()


def test_the_space_of_the_old_files_counts_for_the_new_ones(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(shm, 1 << 20).close()
    full = list(os.statvfs("/dev/shm"))
    full[4] = 8  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(full))
    arena = make(shm, 512 * KIB)
    assert not arena.taken_over
    arena.close()


def test_running_out_while_allocating_leaves_nothing_behind(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        if size > 64 * KIB:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=f"{shm}/arena: can't allocate 340 KiB: No space left on device"):
        make(shm)
    assert sorted(path.name for path in (shm / "arena").iterdir()) == ["clients", "node.lock"]
    monkeypatch.undo()
    make(shm).close()


@pytest.mark.parametrize("name", ["pages", "headers", "readers", "node.lock"])
def test_a_folder_in_a_files_place_is_named(shm: Path, name: str) -> None:
    make(shm).close()
    (shm / "arena" / name).unlink()
    (shm / "arena" / name).mkdir()
    with pytest.raises(ResourceError, match=f"arena can't be used: .*/arena/{name}: Is a directory"):
        make(shm)
    (shm / "arena" / name).rmdir()
    make(shm).close()


def test_a_file_in_the_place_of_the_clients_folder_is_named(shm: Path) -> None:
    make(shm).close()
    (shm / "arena" / "clients").rmdir()
    (shm / "arena" / "clients").write_bytes(b"")
    with pytest.raises(ResourceError, match=r"arena can't be used: .*/arena/clients: File exists"):
        make(shm)


def test_a_lock_that_is_a_link_is_not_followed(shm: Path) -> None:
    make(shm).close()
    (shm / "precious").write_text("mine")
    (shm / "arena" / "node.lock").unlink()
    (shm / "arena" / "node.lock").symlink_to(shm / "precious")
    with pytest.raises(ResourceError, match=r"node\.lock"):
        make(shm)
    assert (shm / "precious").read_text() == "mine"


@pytest.mark.parametrize("sequence", [(1 << 64) - 1, 1 << 63])
def test_an_order_of_publication_out_of_range_ends_no_publishing(shm: Path, sequence: int) -> None:
    arena = make(shm)
    arena.set_units([(0, 1)] + [(0, 0)] * (arena.units - 1))
    for frame, there in enumerate((5, sequence)):
        arena._sequence = there - 1
        arena.begin_change(frame, 0)
        arena.publish([frame], [bytes([frame]) * 32], 1, 100, [None])
    arena.close()
    again = make(shm)
    again.begin_change(0, 0)
    again.publish([0], [b"x" * 32], 1, 100, [None])
    assert [slot.sequence for slot in again.found()[1]] == [6]
    again.close()


def test_the_lock_is_the_kernels(shm: Path) -> None:
    arena = make(shm)
    with (shm / "arena" / "node.lock").open() as file:
        assert file.read() == f"{os.getpid()}\n"
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        arena.close()
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_the_epoch_moves_on_when_pages_are_out_of_the_index(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reader that announces the later one could still find them there."""
    monkeypatch.setattr(choice, "CHOSEN", choice.Choice(None, "a test says so"))
    arena = make(shm)
    arena.begin_changes([1, 2], 7)
    arena.publish([1, 2], [b"1" * 32, b"2" * 32], 1, 4096, [None, None])
    epoch, seen = arena._epoch[0], []
    remove_all = arena._index.remove_all

    def removing(*arguments: Any) -> None:
        seen.append(arena._epoch[0])
        remove_all(*arguments)

    monkeypatch.setattr(arena._index, "remove_all", removing)
    arena.begin_changes([1, 2], 0)
    assert seen == [epoch]
    assert (arena._epoch[0], arena.retired_at(1, 2)) == (epoch + 1, epoch)
    arena.close()
