"""Threads and processes that share a disk tier."""

import os
import random
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_tiers import MIB, opened
from made_pages import make_page, read_pages

from kvstore.errors import InUseError
from kvstore.tiers.disk import DiskTier


def test_a_deletion_waits_for_a_reader_who_gets_his_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_page(1, 500_000)
    in_read, go_on, in_wait = threading.Event(), threading.Event(), threading.Event()
    real_preadv, real_wait_for = os.preadv, threading.Condition.wait_for

    def slow(*args: object) -> int:
        in_read.set()
        assert go_on.wait(30)
        return real_preadv(*args)

    def watched(self: threading.Condition, *args: object, **options: object) -> object:
        if self is oldest._state and oldest._readers:
            in_wait.set()
        return real_wait_for(self, *args, **options)

    answers: dict[str, list[bool]] = {}
    with opened(tmp_path, 2 * MIB, segment_bytes=MIB) as tier:
        tier.write([first])
        oldest = tier._log.segments[0]
        monkeypatch.setattr(os, "preadv", slow)
        reader = threading.Thread(target=lambda: answers.update(reader=read_pages(tier, [first])))
        reader.start()
        assert in_read.wait(30)
        monkeypatch.setattr(threading.Condition, "wait_for", watched)
        rest = [make_page(n, 500_000) for n in range(2, 6)]
        writer = threading.Thread(target=lambda: answers.update(writer=[tier.write([page])[0] for page in rest]))
        writer.start()
        assert in_wait.wait(30)
        assert oldest.path.exists(), "the bytes are not free while someone reads them"
        assert tier.contains([first.key]) == [False], "but no one else finds them"
        go_on.set()
        reader.join(30)
        writer.join(30)
        assert answers == {"reader": [True], "writer": [True] * 4}
        assert not oldest.path.exists()
        tier.check()


def test_readers_under_constant_reclaim_never_get_other_bytes(tmp_path: Path) -> None:
    pages = [make_page(n, 40_000 + n) for n in range(60)]
    done = threading.Event()

    def read(seed: int) -> int:
        rng = random.Random(seed)
        found = 0
        while not done.is_set():
            found += sum(read_pages(tier, rng.sample(pages, 4)))
        return found

    with opened(tmp_path, 2 * MIB, segment_bytes=MIB) as tier, ThreadPoolExecutor(2) as readers:
        found = [readers.submit(read, seed) for seed in range(2)]
        try:
            rng = random.Random(9)
            for _ in range(400):
                batch = rng.sample(pages, 3)
                here = tier.contains([page.key for page in batch])
                answers = tier.write(batch)
                # One that was here already may have to leave for the new ones; the newest of those is here.
                assert all(here) or [answer for answer, was in zip(answers, here, strict=True) if not was][-1]
                if rng.random() < 0.1:
                    tier.remove([rng.choice(pages).key])
        finally:
            done.set()
        assert min(future.result(30) for future in found) > 0
        counts = tier.statistics()
        assert counts.evicted > 100, "the test deleted no segment"
        assert counts.corrupt == counts.errors == 0
        assert counts.asked == counts.hit + counts.missed
        assert tier.check().damaged == 0


def test_two_writers_of_the_same_pages_store_each_once(tmp_path: Path) -> None:
    pages = [make_page(n, 5000) for n in range(50)]
    together = threading.Barrier(2)
    answers: list[list[bool]] = []

    def write() -> None:
        together.wait(30)
        answers.append([tier.write([page])[0] for page in pages])

    with opened(tmp_path) as tier:
        writers = [threading.Thread(target=write) for _ in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(30)
        assert answers == [[True] * 50] * 2
        assert tier.statistics().stored == 50


def test_a_process_that_ends_lets_the_directory_go(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from kvstore.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 8 << 20)
print("open", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()) as owner:
        assert owner.stdout is not None
        select.select([owner.stdout], [], [], 30)
        with pytest.raises(InUseError, match=f"is in use by process {owner.pid}"):
            DiskTier(tmp_path, 8 * MIB)
        owner.kill()
    with opened(tmp_path, 8 * MIB):
        pass
