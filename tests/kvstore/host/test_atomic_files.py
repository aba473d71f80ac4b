"""Registers beside a tier's files: replaced as a whole, counted, and never waited for where the disk hangs."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from made_pages import make_page

import kvstore.host.atomic_files
from kvstore.arena.arena import Arena
from kvstore.host.atomic_files import AtomicFiles
from kvstore.layout import Layout
from kvstore.store.store import Store
from kvstore.tiers.disk import DiskTier


def test_space_is_reserved_before_a_file_grows(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    def reserve(size: int) -> None:
        told.append((size, sum(path.stat().st_size for path in tmp_path.iterdir())))

    files = AtomicFiles(tmp_path, reserve)
    files.replace(tmp_path / "a", b"x" * 5000)
    files.replace(tmp_path / "a", b"y" * 9000)
    assert (tmp_path / "a").read_bytes() == b"y" * 9000
    assert [size for size, _ in told] == [8192, 8192, 8192 + 12288, 12288]
    assert all(there <= size for size, there in told)
    again: list[int] = []
    AtomicFiles(tmp_path, again.append).know(tmp_path / "a")
    assert again == [12288], "what is there from before counts as well"


def test_a_disk_that_hangs_is_not_waited_for_and_gets_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.host.atomic_files, "PATIENCE_SECONDS", 0.01)
    begun, hang, written = threading.Event(), threading.Event(), threading.Semaphore(0)
    replace = kvstore.host.atomic_files._replace

    def slowly(path: Path, content: bytes) -> None:
        begun.set()
        assert hang.wait(60)
        replace(path, content)
        written.release()

    monkeypatch.setattr(kvstore.host.atomic_files, "_replace", slowly)
    files = AtomicFiles()
    files.replace(tmp_path / "a", b"0")
    assert begun.wait(60)
    for number in range(1, 5):
        files.replace(tmp_path / "a", str(number).encode())
        assert begun.wait(60), "the first one is being written when the others come"
    assert not (tmp_path / "a").exists()
    hang.set()
    assert written.acquire(timeout=60) and written.acquire(timeout=60)
    assert (tmp_path / "a").read_bytes() == b"4"
    assert not written.acquire(blocking=False), "what lay between was never written"


def test_an_error_that_nobody_thought_of_costs_one_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    def reserve(size: int) -> None:
        if size > 4096:
            raise ValueError("unforeseen")

    files = AtomicFiles(tmp_path, reserve)
    files.replace(tmp_path / "a", b"x" * 5000)
    files.replace(tmp_path / "b", b"y")
    eventually(lambda: (tmp_path / "b").exists())
    assert not (tmp_path / "a").exists()
    assert "a can't be written, what is new in it would be lost in a restart" in caplog.text
    assert "unforeseen" in caplog.text


def test_where_no_thread_can_be_had_a_file_is_written_with_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    files = AtomicFiles()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        files.replace(tmp_path / "a", b"x")
    assert not (tmp_path / "a").exists()
    files.replace(tmp_path / "b", b"y")
    eventually(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())


def test_what_lies_where_the_next_file_is_made_is_not_followed_and_not_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "precious").chmod(0o644)
    (tmp_path / "a.new").symlink_to(tmp_path / "precious")
    (tmp_path / "b.new").mkdir(mode=0o755)
    (tmp_path / "c.new").write_bytes(b"what a crash left")
    files = AtomicFiles()
    for name in "abc":
        files.replace(tmp_path / name, b"new")
    files.close()
    assert [(tmp_path / name).exists() and (tmp_path / name).read_bytes() for name in "abc"] == [b"new", False, b"new"]
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "b.new", "precious")] == [
        0o600,
        0o755,
        0o644,
    ]
    assert f"{tmp_path}/b.new" in caplog.text


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_behind_the_end_nothing_is_written(tmp_path: Path) -> None:
    files = AtomicFiles()
    files.close()
    files.replace(tmp_path / "a", b"late")
    assert not (tmp_path / "a").exists()


def test_registers_count_against_the_disks_limit(shm: Path) -> None:
    """A hundred namespaces, and pages until segments leave: all that lies in the folder stays within the limit."""
    limit = 1 << 20
    folder = shm / "disk"  # where a sync costs nothing
    disk = DiskTier(folder, limit, segment_bytes=512 << 10)
    arena = Arena(shm / "arena", 1 << 20)
    files = AtomicFiles(folder, disk.reserve_for_other_files)
    with Store(arena, [disk], [shm / "arena", folder], small_files=files) as store:
        for number in range(100):
            store.open_namespace(Layout(model=f"model {number} {'x' * 1000}", block_size=16, page_bytes=4096))
            disk.write([make_page(100 * number, 80_000)])
            assert sum(path.stat().st_size for path in folder.iterdir()) <= limit
        assert disk.statistics().used_bytes <= limit
        assert (folder / "namespaces.json").stat().st_size > 100_000
        assert disk.contains([make_page(100 * 99, 80_000).key]) == [True]
