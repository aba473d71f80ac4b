"""The disk tier against a dictionary: writes, reads, removals, quotas, restarts, kills and torn tails, in any order.

Segments are small and many, so that they leave in any order, pages are carried over, and tombstones have to be.
"""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from made_pages import make_page_of, read_pages

from kvstore.segments.record import padded
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
LIMIT = 3 * MIB
RECORDS_BYTES = 2 * 88  # of one page, in a chunk's header and a footer
NUMBERS = range(40)
LENGTHS = [1, 4096, 70_000, 150_000, 300_000]
PAGES = [make_page_of(1 + number % 2, number, LENGTHS[number % len(LENGTHS)]) for number in NUMBERS]
NAMESPACES = [bytes([1]) * 32, bytes([2]) * 32]
ALL_KEYS = [page.key for page in PAGES]
some_pages = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=12, unique=True).map(
    lambda numbers: [PAGES[number] for number in numbers]
)


class DiskTierStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        self.lives = 0
        self.directory = self.root / "0"
        self.here: set[bytes] = set()
        self.durable: set[bytes] = set()  # here at the last flush, and neither removed nor evicted since
        self.flushed_sizes: dict[str, int] = {}
        self.quotas = dict.fromkeys(NAMESPACES, 0)

    @initialize()
    def start(self) -> None:
        self.tier = self.open()

    def open(self) -> DiskTier:
        tier = DiskTier(self.directory, LIMIT, segment_bytes=MIB // 2)
        for namespace, quota in self.quotas.items():
            tier.set_quota(namespace, quota)
        return tier

    def found(self) -> set[bytes]:
        return {key for key, here in zip(ALL_KEYS, self.tier.contains(ALL_KEYS), strict=True) if here}

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.directory.glob("*.segment")}

    @rule(pages=some_pages)
    def write(self, pages: list[PageWrite]) -> None:
        before = self.tier.statistics()
        answers = self.tier.write(pages)
        now = self.found()
        assert answers == [page.key in now for page in pages]
        if not self.quotas[pages[-1].key[:32]]:
            assert answers[-1] or pages[-1].key in self.here, "the newest page is never pushed out"
        wanted = self.here | {page.key for page in pages}
        assert now <= wanted
        counts = self.tier.statistics()
        assert counts.evicted - before.evicted + counts.refused - before.refused == len(wanted - now)
        written = {page.key[:32] for page in pages}
        assert counts.refused == before.refused or any(self.quotas[namespace] for namespace in written)
        for namespace in written:
            assert self.tier.used_by(namespace) <= (self.quotas[namespace] or LIMIT)
        self.durable &= now
        self.here = now

    @rule(pages=some_pages)
    def remove(self, pages: list[PageWrite]) -> None:
        keys = {page.key for page in pages}
        evicted = self.tier.statistics().evicted
        assert self.tier.remove([page.key for page in pages]) == len(keys & self.here)
        now = self.found()
        assert now <= self.here - keys
        assert len(self.here - keys) - len(now) == self.tier.statistics().evicted - evicted
        self.here = now
        self.durable &= now

    @rule(pages=some_pages)
    def read(self, pages: list[PageWrite]) -> None:
        assert read_pages(self.tier, pages) == [page.key in self.here for page in pages]

    @rule(namespace=st.sampled_from(NAMESPACES), quota=st.sampled_from([0, 100_000, 400_000, 900_000]))
    def set_quota(self, namespace: bytes, quota: int) -> None:
        self.quotas[namespace] = quota
        self.tier.set_quota(namespace, quota)
        assert self.found() == self.here

    @rule(pages=some_pages)
    def touch(self, pages: list[PageWrite]) -> None:
        self.tier.touch([page.key for page in pages])

    @rule()
    def flush(self) -> None:
        self.tier.flush()
        self.durable = set(self.here)
        self.flushed_sizes = self.sizes()

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = self.open()
        self.came_back()

    @rule()
    def kill(self) -> None:
        """The process dies between two calls: all that it was told is stored is there."""
        self.crash(cut=0.0)
        self.came_back()

    @precondition(lambda self: self.sizes())
    @rule(kept=st.floats(0, 1))
    def lose_power(self, kept: float) -> None:
        """Of the newest file, what was not flushed is lost in part: what was flushed is there, and whole."""
        self.crash(cut=1 - kept)
        self.here = self.found()
        assert self.durable <= self.here
        assert read_pages(self.tier, PAGES) == [key in self.here for key in ALL_KEYS]
        self.flushed_sizes = self.sizes()
        self.durable = set()

    def crash(self, cut: float) -> None:
        self.lives += 1
        copy = self.root / str(self.lives)
        shutil.copytree(self.directory, copy)
        self.tier.close()
        shutil.rmtree(self.directory)
        self.directory = copy
        if cut:
            path = max(self.directory.glob("*.segment"))
            size = path.stat().st_size
            flushed = self.flushed_sizes.get(path.name, 0)
            with path.open("r+b") as file:
                file.truncate(flushed + int((size - flushed) * (1 - cut)))
        self.tier = self.open()

    def came_back(self) -> None:
        assert self.found() == self.here
        assert read_pages(self.tier, PAGES) == [key in self.here for key in ALL_KEYS]

    @invariant()
    def limit_and_index_hold(self) -> None:
        if hasattr(self, "tier"):
            counts = self.tier.statistics()
            held = sum(path.stat().st_size for path in self.directory.iterdir())
            assert held <= counts.used_bytes <= counts.limit_bytes
            assert counts.pages == len(self.here)
            assert counts.corrupt == counts.errors == 0
            for namespace in NAMESPACES:
                here = [page for page in PAGES if page.key in self.here and page.key.startswith(namespace)]
                used = sum(padded(len(page.payload)) + RECORDS_BYTES for page in here)
                assert self.tier.used_by(namespace) == used
            assert self.tier.check().damaged == 0

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
        shutil.rmtree(self.root)


TestDiskTierStates = DiskTierStates.TestCase
TestDiskTierStates.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
