"""Lookups and loads without a call: what they answer, what the node learns of them, and what becomes of a reader that
is overtaken, stopped, killed, or left by its node in the middle of a copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from stepped_core import COMPILER, SteppedCore
from untold_reports import ended

import kvstore
from kvstore.client.paths.shm import mapped_arena as mapped
from kvstore.client.paths.use_reports import MOST_PAGES, MOST_USES, UseReports
from kvstore.core import choice
from kvstore.errors import UnavailableError
from kvstore.store import state as books_module
from kvstore.v1 import cache_pb2 as pb

ROOT = Path(__file__).parents[5]
PAGE = 5000
SLOT = 8192

pytestmark = pytest.mark.skipif(not mapped.CAN_READ, reason="this processor does not keep the order of stores")


@pytest.fixture
def node(start_node):
    """With room for 16 pages, and nothing below."""
    return start_node(arena=16 * SLOT, disk_limit=0)


@pytest.fixture
def near(node) -> Iterator[kvstore.Client]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        yield client


def load(pages: kvstore.Namespace, hashes: list[bytes]) -> tuple[int, np.ndarray]:
    into = np.zeros((len(hashes), PAGE), np.uint8)
    return pages.load(hashes, into), into


class Halves:
    """Copies in two halves, and does something in between."""

    def __init__(self) -> None:
        self.between: Callable[[], object] | None = None

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """In Python."""
        middle = len(target) // 2
        target[:middle] = source[:middle]
        self.reached("half")
        target[middle:] = source[middle:]

    def reached(self, step: str) -> None:
        """In the native core."""
        between = self.between
        if step == "half" and between is not None:
            self.between = None
            between()


@pytest.fixture(params=["python", "native"])
def halves(request, monkeypatch) -> Halves:
    halves, chosen = Halves(), choice.Choice(None, "a test says so")
    if request.param == "native":
        if choice.native() is None or COMPILER is None:
            pytest.skip(choice.CHOSEN.reason or "no C compiler here")
        core = SteppedCore()
        core.between = halves.reached
        chosen = choice.Choice(core, "")
    monkeypatch.setattr(mapped, "copy_bytes", halves.copy)
    monkeypatch.setattr(choice, "CHOSEN", chosen)
    return halves


class TestWithoutACall:
    def test_what_is_in_the_arena_is_found_and_loaded(self, near, layout, hashes, payload, calls):
        pages = near.namespace(layout)
        pages.store(hashes(14), payload(14))
        calls.clear()
        for count in (1, 5, 14):  # by the loop, and by NumPy
            assert pages.lookup(hashes(count)) == kvstore.Lookup(count, (True,) * count, ("arena",) * count)
            loaded, into = load(pages, hashes(count))
            assert loaded == count
            assert np.array_equal(into, payload(14)[:count])
        assert calls == []
        assert pages.statistics().loaded == {"arena": 20}

    def test_with_nothing_below_a_miss_is_a_miss(self, near, layout, hashes, payload, calls):
        pages = near.namespace(layout)
        pages.store(hashes(4), payload(4))
        calls.clear()
        assert pages.lookup(hashes(6)).present == (True,) * 4 + (False,) * 2
        assert pages.lookup(hashes(9, name=7)).prefix == 0
        assert load(pages, hashes(6))[0] == 4
        assert load(pages, hashes(3, name=7))[0] == 0
        assert calls == []

    def test_what_the_arena_lacks_is_asked_for_and_only_that(
        self, start_node, layout, hashes, payload, calls, monkeypatch
    ):
        node = start_node(arena=16 * SLOT)
        with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
            pages = client.namespace(layout)
            for start in range(0, 24, 4):
                pages.store(hashes(24)[start : start + 4], payload(24)[start : start + 4])
                client.flush()
            everything = pages.lookup(hashes(24)).tiers
            assert set(everything) == {"arena", "disk"}
            mixed = [h for h, tier in zip(hashes(24), everything, strict=True) if tier == "arena"][:2]
            mixed += [h for h, tier in zip(hashes(24), everything, strict=True) if tier == "disk"][:2]
            asked = []
            ask = client._session.path.ask_where
            monkeypatch.setattr(client._session.path, "ask_where", lambda q, end: asked.append(q) or ask(q, end))
            assert pages.lookup(mixed).tiers == ("arena",) * 2 + ("disk",) * 2
            assert asked == [[(pages.fingerprint, b"".join(mixed[2:]))]]
            calls.clear()
            into = np.zeros((4, PAGE), np.uint8)
            assert pages.load(mixed, into) == 4
            assert calls == ["PrepareLoadRequest", "CompleteLoadRequest"]
            for block_hash, got in zip(mixed, into, strict=True):
                assert np.array_equal(got, payload(24)[hashes(24).index(block_hash)])
            assert pages.statistics().loaded == {"arena": 2, "disk": 2}

    def test_several_groups_are_looked_up_at_once(self, near, hashes, calls):
        groups = [near.namespace(kvstore.Layout(model="m", group=g, block_size=16, page_bytes=64)) for g in range(3)]
        groups[0].store(hashes(2), bytes(128))
        groups[2].store(hashes(1), bytes(64))
        calls.clear()
        assert [answer.prefix for answer in near.lookup([(group, hashes(2)) for group in groups])] == [2, 0, 1]
        assert calls == []

    def test_a_look_here_makes_no_call_and_says_when_only_a_call_can_tell(
        self, start_node, layout, hashes, payload, calls
    ):
        node = start_node(arena=16 * SLOT)
        with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
            pages = client.namespace(layout, lazy=True)
            assert client.lookup_here([(pages, hashes(2))]) is None
            pages.store(hashes(2), payload(2))
            node.store.summary.withdraw()  # of what the disk has
            calls.clear()
            assert client.lookup_here([(pages, hashes(2))]) == [kvstore.Lookup(2, (True,) * 2, ("arena",) * 2)]
            assert client.lookup_here([(pages, hashes(3))]) is None  # the disk might have it
            assert calls == []

    def test_a_client_that_only_looks_reads_the_mapping_of_a_node_that_came_back(
        self, node_process, layout, hashes, payload, eventually
    ):
        node = node_process(disk_limit="0")
        with kvstore.connect(node.url, timeout=20.0) as client:
            pages = client.namespace(layout)
            pages.store(hashes(2), payload(2))
            node.kill()
            node.start()
            eventually(lambda: client.lookup_here([(pages, hashes(2))]) is None, "only a call can tell by now")
            eventually(lambda: client.lookup([(pages, hashes(3))]) and client.lookup_here([(pages, hashes(3))]))

    def test_pages_are_lent_without_a_hold(self, near, node, layout, hashes, payload, calls):
        pages = near.namespace(layout)
        pages.store(hashes(3), payload(3))
        calls.clear()
        with pages.borrow(hashes(4)) as lent:
            assert len(lent.pages) == 3
            assert not lent.pages[0].flags.writeable
            assert np.array_equal(np.array(lent.pages), payload(3))
            assert not node.store._state.leases.loads
            assert not node.store._state.readers.passed(node.store.arena._epoch[0])
            assert lent.complete() == 3
        assert node.store._state.readers.passed(node.store.arena._epoch[0])
        assert calls == []
        assert pages.statistics().loaded == {"arena": 3}

    def test_what_is_here_is_lent_first_and_what_must_come_up_is_held(self, start_node, layout, hashes, payload):
        node = start_node(arena=16 * SLOT)
        with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
            pages = client.namespace(layout)
            pages.store(hashes(4), payload(4))
            client.flush()
            pages.store(hashes(14, name=9000), payload(14))  # some have to go
            tiers = dict(zip(hashes(4), pages.lookup(hashes(4)).tiers, strict=True))
            here = [each for each, tier in tiers.items() if tier == "arena"]
            below = [each for each, tier in tiers.items() if tier == "disk"]
            assert here
            assert below
            with pages.borrow(here + below) as lent:
                assert lent.more
                assert not node.store._state.leases.loads
                assert lent.complete() == len(lent.pages) == len(here)
            with pages.borrow(below) as held:
                assert not held.more
                assert len(held.pages) == len(below)
                assert node.store._state.leases.loads
                assert node.store._state.readers.passed(node.store.arena._epoch[0]), "it would wait for itself"
                assert held.complete() == len(below)

    def test_a_client_that_opened_a_namespace_before_it_was_cleared_finds_the_new_one(
        self, near, node, layout, hashes, payload, calls
    ):
        pages = near.namespace(layout)
        pages.store(hashes(4), payload(4))
        with kvstore.connect(f"unix://{node.config.socket}") as other:
            theirs = other.namespace(layout)
            assert theirs.lookup(hashes(4)).prefix == 4
            pages.clear()
            assert theirs.lookup(hashes(4)).prefix == 0
            assert load(theirs, hashes(4))[0] == 0
            near.namespace(layout).store(hashes(4), payload(4, seed=2))
            loaded, into = load(theirs, hashes(4))
            assert loaded == 4
            assert np.array_equal(into, payload(4, seed=2))
            calls.clear()
            assert theirs.lookup(hashes(4)).prefix == 4
            assert calls == [], "it knows the new one"

    def test_a_closed_client_answers_no_more(self, near, layout, hashes, payload):
        pages = near.namespace(layout)
        pages.store(hashes(4), payload(4))
        near.close()
        for call in (lambda: pages.lookup(hashes(4)), lambda: load(pages, hashes(4)), lambda: pages.borrow(hashes(4))):
            with pytest.raises(UnavailableError, match="closed"):
                call()


class TestWhatTheNodeLearns:
    def test_pages_that_were_read_leave_last(self, near, layout, hashes, payload):
        pages = near.namespace(layout)
        for name in range(4):
            pages.store(hashes(4, name=name * 1000), payload(4))
        assert load(pages, hashes(4))[0] == 4
        pages.store(hashes(4, name=9000), payload(4))
        assert pages.lookup(hashes(4)).prefix == 4
        assert pages.lookup(hashes(4, name=1000)).prefix == 0

    def test_the_tail_of_what_was_read_leaves_first(self, near, layout, hashes, payload):
        pages = near.namespace(layout)
        assert pages.batch_pages == 4
        pages.store(hashes(16), payload(16))
        assert load(pages, hashes(16))[0] == 16
        pages.store(hashes(4, name=9000), payload(4))
        assert pages.lookup(hashes(16)).present == (True,) * 12 + (False,) * 4

    def test_a_moment_later_without_another_call(self, near, node, layout, hashes, payload, eventually):
        pages = near.namespace(layout)
        pages.store(hashes(4), payload(4))
        before = node.store.statistics().counters
        load(pages, hashes(6))
        with pages.borrow(hashes(2)) as lent:
            lent.complete()

        def learnt() -> bool:
            after = node.store.statistics().counters
            return {key: after[key] - before[key] for key in ("asked", "hit", "missed")} == {
                "asked": 8,
                "hit": 6,
                "missed": 2,
            }

        eventually(learnt)

    def test_reports_are_bounded_and_a_node_that_is_away_costs_nothing(self, eventually):
        sent: list[pb.UseReport] = []

        def report(uses: pb.UseReport, timeout: float) -> None:
            sent.append(uses)
            raise UnavailableError("away")

        recency = UseReports(lambda uses, timeout: None)
        recency._over = ended()  # none: what waits goes with a call
        for number in range(3 * MOST_USES):
            recency.note(number.to_bytes(32, "big"), bytes(256 * 32), read=True)
        kept = [int.from_bytes(use.fingerprint, "big") for use in recency.take().uses]
        assert kept == list(range(3 * MOST_USES - MOST_PAGES // 256, 3 * MOST_USES)), "the latest are kept, in order"
        assert recency.take() is None
        recency.note(b"old", bytes(32), read=True)
        recency.note(b"long", bytes((MOST_PAGES + 1) * 32), read=True)
        recency.note(b"new", bytes(32), read=True)
        assert [use.fingerprint for use in recency.take().uses] == [b"old", b"new"], "what is too long is passed over"
        failing = UseReports(report)
        for turn in range(2):
            failing.note(b"f" * 32, bytes(32), read=True)
            eventually(lambda turn=turn: len(sent) == turn + 1)
        over = failing._over
        failing.close()
        assert over.wait(60)

    def test_an_error_that_nobody_thought_of_is_logged_and_the_next_report_goes(self, eventually, caplog):
        sent: list[pb.UseReport] = []

        def report(uses: pb.UseReport, timeout: float) -> None:
            sent.append(uses)
            if len(sent) == 1:
                raise ValueError("unforeseen")

        recency = UseReports(report)
        for turn in range(2):
            recency.note(b"f" * 32, bytes(32), read=True)
            eventually(lambda turn=turn: len(sent) == turn + 1)
        recency.close()
        assert "unforeseen" in caplog.text

    def test_where_no_thread_can_be_had_a_use_waits_for_the_next_call(self, monkeypatch):
        def no_thread(*given: object) -> None:
            raise RuntimeError("can't start new thread")

        recency = UseReports(lambda uses, timeout: None)
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", no_thread)
            recency.note(b"f" * 32, bytes(32), read=True)
        assert len(recency.take().uses) == 1
        assert recency._over is None

    def test_nobody_waits_for_the_threads_first_turn(self, monkeypatch):
        started: list[tuple[object, ...]] = []
        recency = UseReports(lambda uses, timeout: None)
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", lambda *given: started.append(given))  # it never gets one
            for _ in range(2):
                recency.note(b"f" * 32, bytes(32), read=True)
        assert len(started) == 1
        assert len(recency.take().uses) == 2

    def test_a_client_that_reads_nothing_for_a_while_has_no_thread(self, monkeypatch, eventually):
        monkeypatch.setattr("kvstore.client.paths.use_reports.REPORT_SECONDS", 0.01)
        monkeypatch.setattr("kvstore.client.paths.use_reports._IDLE_SECONDS", 0.03)
        sent: list[pb.UseReport] = []
        recency = UseReports(lambda uses, timeout: sent.append(uses))
        for turn in range(2):
            recency.note(b"f" * 32, bytes(32), read=True)
            eventually(lambda: recency._over is None)
            assert len(sent) == turn + 1


class TestOvertaken:
    """The reader's copy is interrupted between its halves."""

    @pytest.fixture
    def far(self, node) -> Iterator[kvstore.Client]:
        """Another client, that stores by messages: it maps nothing."""
        with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=20.0) as client:
            yield client

    @pytest.mark.parametrize("count", [1, 8])
    def test_a_reader_that_is_overtaken_a_thousand_times_returns_no_mixed_page(
        self, near, node, layout, hashes, payload, halves, monkeypatch, count
    ):
        """Nobody waits for readers here: generations alone must tell."""
        monkeypatch.setattr(node.store._state.readers, "passed", lambda epoch: True)
        if count == 8:  # by NumPy
            monkeypatch.setattr("kvstore.arena.index.FEW_KEYS", 0)
            monkeypatch.setattr(mapped, "FEW_KEYS", 0)
        pages = near.namespace(layout)
        store, known = node.store, node.store.open_namespace(layout)
        data = payload(16, seed=1)
        chain = hashes(2000 * 8)
        rewritten = 0

        def put(number: int, pages_of: np.ndarray) -> None:
            batch = chain[number * 8 : number * 8 + count]
            reserved = store.prepare_store(0, known.fingerprint, batch[:4], 9.0, direct=True)
            for frame, page in zip(reserved.frames, pages_of, strict=False):
                store.arena.view(frame, PAGE)[:] = page
            store.complete_store(0, reserved.lease, publish=True)
            if count > 4:
                reserved = store.prepare_store(0, known.fingerprint, batch[4:], 9.0, direct=True)
                for frame, page in zip(reserved.frames, pages_of[4:], strict=False):
                    store.arena.view(frame, PAGE)[:] = page
                store.complete_store(0, reserved.lease, publish=True)

        for turn in range(1000 if count == 1 else 100):
            wanted = chain[turn * 8 : turn * 8 + count]
            put(turn, data)
            [frame] = store.prepare_load(0, known.fingerprint, wanted[:1], 9.0).frames
            store._state.leases.loads.clear()
            store._state.slots.holds[store._catalog.find(known.fingerprint + wanted[0])] = 0

            def overtake(turn: int = turn, wanted: list[bytes] = wanted) -> None:
                store.evict(known.fingerprint, wanted)
                put(1000 + turn, 255 - data)

            halves.between = overtake
            loaded, into = load(pages, wanted)
            assert np.array_equal(into[:loaded], data[:loaded]), f"a mixed page, turn {turn}"
            rewritten += not np.array_equal(store.arena.view(frame, PAGE), data[0])
            store.evict(known.fingerprint, chain[(1000 + turn) * 8 :][:count])
        assert rewritten > turn * 0.9, "the slots were not written over: nothing was shown"

    def test_with_epochs_a_slot_is_not_written_while_it_is_read(
        self, near, far, node, layout, hashes, payload, halves, monkeypatch
    ):
        monkeypatch.setattr(books_module, "LONGEST_WAIT_FOR_READERS", 0.01)
        pages, theirs = near.namespace(layout), far.namespace(layout)
        pages.store(hashes(16), payload(16))
        refused = []
        for turn in range(20):
            halves.between = lambda turn=turn: refused.append(
                theirs.store(hashes(4, name=5000 + turn * 100), payload(4)).refused
            )
            here = pages.lookup(hashes(16)).prefix
            loaded, into = load(pages, hashes(here))
            # Some may have left, but none was written over: what was found is whole.
            assert np.array_equal(into[:loaded], payload(16)[:loaded])
        assert sum(refused) > 0
        assert node.store.statistics().counters["refused"] >= sum(refused)

    def test_a_page_that_left_is_a_miss_and_those_before_it_are_not(self, near, node, layout, hashes, payload, halves):
        pages = near.namespace(layout)
        pages.store(hashes(8), payload(8))
        halves.between = lambda: node.store.evict(pages.fingerprint, hashes(8)[5:6])
        loaded, into = load(pages, hashes(8))
        assert loaded == 5
        assert np.array_equal(into[:5], payload(8)[:5])
        with pages.borrow(hashes(4)) as lent:
            node.store.evict(pages.fingerprint, hashes(8)[2:3])
            assert lent.complete() == 2

    def test_a_reader_past_its_deadline_is_not_waited_for_and_knows(
        self, node, layout, hashes, payload, pass_deadlines
    ):
        with (
            kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as slow,
            kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as fast,
        ):
            mine, theirs = slow.namespace(layout), fast.namespace(layout)
            theirs.store(hashes(16), payload(16))
            lent, other = mine.borrow(hashes(4)), mine.borrow(hashes(4))
            assert theirs.store(hashes(16, name=9000), payload(16, seed=2)).refused
            pass_deadlines(node.store)
            assert not theirs.store(hashes(16, name=9000), payload(16, seed=2)).refused
            assert lent.complete() == 0
            assert other.complete() == 0
            assert load(theirs, hashes(16, name=9000))[0] == 16

    def test_threads_read_while_everything_is_written_over_again_and_again(self, near, node, layout, hashes, payload):
        """One client's threads store and load; each page that comes has exactly its bytes."""
        from concurrent.futures import ThreadPoolExecutor

        pages = near.namespace(layout)
        seen = []

        def work(number: int) -> None:
            for turn in range(60):
                name = (number * 7 + turn * 3) % 11 * 100
                pages.store(hashes(4, name=name), payload(4, seed=name))
                name = turn % 11 * 100
                loaded, into = load(pages, hashes(4, name=name))
                assert np.array_equal(into[:loaded], payload(4, seed=name)[:loaded])
                seen.append(loaded)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        assert sum(seen) > 0
        node.store.check_integrity()


_READER = """
import json, os, signal, sys
import numpy as np
import kvstore
from kvstore.client.paths.shm import mapped_arena as mapped

url, timeout, action, count = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
client = kvstore.connect(url, timeout=timeout)
pages = client.namespace(kvstore.Layout(model="tiny", block_size=16, page_bytes=5000))
hashes = kvstore.hash_blocks(np.arange(count * 16) % 50_000, 16)
copied = 0

def copy(target, source):
    global copied
    middle = len(target) // 2
    target[:middle] = source[:middle]
    copied += 1
    if copied == 1:  # the first two of the pages are there, or half of one
        if action == "announce":
            print("in the middle", flush=True)
            sys.stdin.readline()
        else:
            os.kill(os.getpid(), getattr(signal, action))
    target[middle:] = source[middle:]

mapped.copy_bytes = copy
into = np.zeros((count, 5000), np.uint8)
loaded = pages.load(hashes, into)
sys.stdout.buffer.write(loaded.to_bytes(4, "little") + into[:loaded].tobytes())
sys.stdout.flush()
"""


class ReaderProcess:
    """Loads four pages, and does something to itself in the middle of them."""

    def __init__(self, url: str, action: str, timeout: float = 55.0, count: int = 4) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _READER, url, str(timeout), action, str(count)],
            cwd=ROOT,
            env=os.environ | {"KVSTORE_CORE": "python"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def result(self) -> np.ndarray:
        """The pages that it loaded."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        loaded = int.from_bytes(out[:4], "little")
        return np.frombuffer(out, np.uint8, offset=4).reshape(loaded, PAGE)

    def end(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture
def reader_process() -> Iterator[Callable[..., ReaderProcess]]:
    processes: list[ReaderProcess] = []

    def start(*arguments: object, **options: object) -> ReaderProcess:
        processes.append(ReaderProcess(*arguments, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


class TestReaderProcesses:
    def test_stopped_in_the_middle_of_a_copy_past_its_deadline_and_woken_up(
        self, near, node, layout, hashes, payload, reader_process, pass_deadlines
    ):
        pages = near.namespace(layout)
        pages.store(hashes(16), payload(16))
        reader = reader_process(near.url, "SIGSTOP", timeout=30.0)
        os.waitid(os.P_PID, reader.process.pid, os.WSTOPPED | os.WNOWAIT)
        new = payload(16, seed=2)
        first = pages.store(hashes(16, name=9000), new)
        assert first.refused, "its slots are not lent while it may be reading in time"
        pass_deadlines(node.store)
        assert not pages.store(hashes(16, name=9000), new).refused
        reader.process.send_signal(signal.SIGCONT)
        assert len(reader.result()) == 0, "all of it was written over"
        loaded, into = load(pages, hashes(16, name=9000))
        assert loaded == 16
        assert np.array_equal(into, new), "its waking up touched nobody's bytes"
        node.store.check_integrity()

    def test_stopped_and_woken_up_in_time(self, near, node, layout, hashes, payload, reader_process):
        pages = near.namespace(layout)
        pages.store(hashes(16), payload(16))
        reader = reader_process(near.url, "SIGSTOP")
        os.waitid(os.P_PID, reader.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert pages.store(hashes(4, name=9000), payload(4)).refused == 4
        reader.process.send_signal(signal.SIGCONT)
        got = reader.result()
        # The store's try made room; whatever had to leave is a miss, nothing is mixed.
        assert np.array_equal(got, payload(4)[: len(got)])
        assert not pages.store(hashes(4, name=9000), payload(4)).refused

    def test_killed_in_the_middle_of_a_copy(self, near, node, layout, hashes, payload, reader_process):
        pages = near.namespace(layout)
        pages.store(hashes(16), payload(16))
        reader = reader_process(near.url, "SIGKILL")
        reader.process.wait(60)
        assert reader.process.returncode == -signal.SIGKILL
        # At once: nobody need sweep first.
        assert not pages.store(hashes(4, name=9000), payload(4)).refused
        node.store.check_integrity()

    @pytest.mark.parametrize("then", ["comes back", "comes back and is filled", "comes back smaller"])
    def test_its_node_is_killed_in_the_middle_of_a_copy(
        self, node_process, layout, hashes, payload, reader_process, then, eventually
    ):
        node = node_process(arena=str(16 * SLOT), disk_limit="0")
        with kvstore.connect(node.url, timeout=20.0) as client:
            client.namespace(layout).store(hashes(16), payload(16))
        reader = reader_process(node.url, "announce")
        assert reader.process.stdout.readline() == b"in the middle\n"
        node.kill()
        if then == "comes back smaller":
            node.options["arena"] = str(8 * SLOT)
        node.start()
        with kvstore.connect(node.url, timeout=20.0) as client:
            pages = client.namespace(layout)
            if then == "comes back and is filled":
                refused = pages.store(hashes(4, name=9000), payload(4, seed=2)).refused
                assert refused == 4, "the new node knows who reads"
            elif then == "comes back smaller":
                pages.store(hashes(8, name=9000), payload(8, seed=2))
            reader.process.stdin.write(b"\n")
            got = reader.result()
            assert np.array_equal(got, payload(4)[: len(got)])
            if then != "comes back smaller":
                assert not pages.store(hashes(4, name=9000), payload(4, seed=2)).refused
