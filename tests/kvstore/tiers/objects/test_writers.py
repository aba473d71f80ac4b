"""Several writers: limits, packs that leave and what is carried on, dead writers, names, memory, keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from made_pages import make_page, make_page_of, read_pages
from s3_server import URL, Faults, S3Server

from kvstore.segments.record import decode_trailer
from kvstore.status import TierState
from kvstore.tiers.objects import ObjectTier, index_object, index_writer, names
from kvstore.tiers.tier import PageWrite

Open = Callable[..., ObjectTier]
KEYS = [bytes([n]) * 32 for n in range(3)]
KILLS = int(os.environ.get("KILLS", "3"))
LIMIT = int(os.environ.get("OBJECTS_LIMIT", str(8 << 20)))
STORED = int(os.environ.get("OBJECTS_STORED", str(24 << 20)))


def eventually(so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60.0
    while not so():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class TestLimits:
    def test_two_writers_keep_to_their_limits_and_a_reader_sees_no_error(
        self, open_objects: Open, server: S3Server
    ) -> None:
        """At every moment everything that is there is within both limits, index objects and heartbeats included."""
        first, second, reader = open_objects(LIMIT), open_objects(LIMIT), open_objects(LIMIT)
        length = max(1 << 18, LIMIT >> 6)
        stop = threading.Event()
        seen: list[bool] = []
        pages: list[PageWrite] = []

        def read() -> None:
            while not stop.is_set():
                seen.extend(read_pages(reader, list(pages)))

        reading = threading.Thread(target=read)
        reading.start()
        try:
            for number in range(STORED // length // 2):
                made = [make_page(2 * number, length), make_page(2 * number + 1, length)]
                assert first.write(made[:1]) == second.write(made[1:]) == [True]
                pages[:] = [*pages, *made][-8:]
                assert server.used() <= 2 * LIMIT
        finally:
            stop.set()
            reading.join()
        assert server.most_bytes <= 2 * LIMIT
        for tier in (first, second):
            counts = tier.statistics()
            assert counts.used_bytes <= LIMIT
            assert counts.evicted > 0
        assert any(seen)
        assert reader.statistics().errors == 0

    def test_the_limit_of_all_holds_once_each_knows_of_the_others(self, open_objects: Open, server: S3Server) -> None:
        limits = {"limit_bytes": 32 << 20, "prefix_limit": 16 << 20}
        first, second = open_objects(**limits), open_objects(**limits)
        for number in range(14):
            assert first.write([make_page(number, 1 << 20)]) == [True]
        eventually(lambda: len(second.keys(b"")) > 8, "the second one knows")
        for number in range(100, 120):
            assert second.write([make_page(number, 1 << 20)]) == [True]
        eventually(lambda: server.used() <= 16 << 20, "both make room")
        assert read_pages(second, [make_page(119, 1 << 20)]) == [True]

    def test_what_was_read_is_carried_out_of_a_leaving_pack_and_is_never_nowhere(
        self, open_objects: Open, server: S3Server
    ) -> None:
        """Also for a reader who knows only the old pack: it looks what was told meanwhile."""
        tier = open_objects(LIMIT_SMALL, interval=3600.0)
        first = [make_page(n, 60_000) for n in range(8)]
        assert all(tier.write(first))
        reader = open_objects(LIMIT_SMALL, interval=3600.0)
        assert all(reader.contains([page.key for page in first]))
        (old,) = server.names("fleet/packs/")
        read = [first[0]]
        for number in range(100, 1000, 8):
            assert all(read_pages(tier, [page for page in read if tier.contains([page.key])[0]]))
            made = [make_page(n, 60_000) for n in range(number, number + 8)]
            assert all(tier.write(made))
            read.append(made[0])
            if old not in server.names("fleet/packs/"):
                break
        assert tier.statistics().carried > 0
        assert reader.contains([first[0].key]) == [True]
        assert read_pages(reader, first) == read_pages(tier, first) == [True] + [False] * 7

    def test_a_day_has_so_many_bytes(self, open_objects: Open) -> None:
        tier = open_objects(write_limit=1 << 20)
        assert tier.write([make_page(1, 700_000)]) == [True]
        assert tier.write([make_page(2, 700_000)]) == [False]
        health = tier.health()
        assert health.state is TierState.DEGRADED
        assert "objects_write_limit" in health.reason
        tier.set_write_limit(0)
        assert tier.write([make_page(2, 700_000)]) == [True]

    def test_what_could_not_be_written_is_none_of_a_days_bytes(self, open_objects: Open, server: S3Server) -> None:
        tier = open_objects(write_limit=1 << 20, interval=3600.0)
        server.faults = Faults(status=403, only=lambda method, name: name.startswith("fleet/packs/"))
        assert tier.write([make_page(1, 700_000)]) == [False]
        server.faults = Faults()
        assert tier.write([make_page(1, 700_000)]) == [True]


LIMIT_SMALL = 8 << 20


class TestTheSamePages:
    def _open_two(self, open_objects: Open) -> tuple[ObjectTier, ObjectTier]:
        """Two that know of each other, and do nothing by themselves."""
        first, second = open_objects(interval=3600.0), open_objects(interval=3600.0)
        assert first.write([make_page(100, 50_000)]) == second.write([make_page(101, 50_000)]) == [True]
        for tier in (first, second):
            tier._rounds._follower.poll(ask_all=True)
        return first, second

    def test_two_that_store_the_same_pages_do_not_both_delete_them(self, open_objects: Open, server: S3Server) -> None:
        first, second = self._open_two(open_objects)
        pages = [make_page(n, 50_000) for n in range(4)]
        assert all(first.write(pages))
        assert all(second.write(pages))
        for _ in range(2):
            for tier in (first, second):
                tier._rounds._follower.poll(ask_all=True)
            for tier in (first, second):
                tier._rounds.keep_house()
        assert len(server.names("fleet/packs/")) == 4
        assert all(read_pages(first, pages))
        assert all(read_pages(second, pages))

    def test_when_one_of_two_packs_leaves_the_other_is_looked_at(self, open_objects: Open, server: S3Server) -> None:
        first, second = self._open_two(open_objects)
        pages = [make_page(n, 50_000) for n in range(4)]
        assert all(first.write(pages))
        assert all(second.write(pages))
        second._rounds._follower.poll(ask_all=True)
        first._writer._delete(first._catalog.own_packs()[-1].id, evicted=True)
        first._rounds.keep_house()
        second._rounds._follower.poll(ask_all=True)
        second._rounds.keep_house()
        assert all(read_pages(second, pages))
        second.remove([page.key for page in pages])
        second._rounds.keep_house()
        assert len(server.names("fleet/packs/")) == 2, "nobody counts on what was removed"


class TestDeadWriters:
    def test_what_a_dead_writer_left_is_found_adopted_and_counted(self, open_objects: Open, server: S3Server) -> None:
        first = open_objects(interval=0.1, silence=2.0)
        pages = [make_page(n, 50_000) for n in range(12)]
        assert all(first.write(pages))
        first._rounds._stop.set()  # as a process that is killed: no word any more
        first._rounds._thread.join()
        leftover = f"fleet/packs/{first._writer.name.hex()}/{1:016x}"
        server.put(leftover, b"half of a write")
        second = open_objects(interval=0.1, silence=2.0)
        assert all(read_pages(second, pages))
        assert second.statistics().used_bytes < 100_000
        eventually(lambda: second.statistics().used_bytes > 600_000, "it counts against the limit of who adopts it")
        eventually(lambda: leftover not in server.names(), "what nobody was told of is deleted")
        eventually(lambda: not server.names(f"fleet/index/{first._writer.name.hex()}"), "and the dead one's index")
        assert all(read_pages(second, pages))
        third = open_objects()
        assert all(read_pages(third, pages))

    def test_an_adoption_that_is_tried_again_keeps_what_it_has(self, open_objects: Open, server: S3Server) -> None:
        """Also where there is no room for all of it a second time."""
        first = open_objects(interval=3600.0)
        pages = [make_page(n, 200_000) for n in range(12)]
        assert all(first.write(pages))
        first.close()
        server.faults = Faults(status=503, only=lambda method, name: method in ("DELETE", "POST"))
        second = open_objects(4 << 20, interval=3600.0)
        assert len(server.names(f"fleet/index/{first._writer.name.hex()}")) == 1, "its end failed"
        server.faults = Faults()
        eventually(lambda: second._bucket.may_write, "it tries again")
        second._rounds.keep_house()
        assert not server.names(f"fleet/index/{first._writer.name.hex()}")
        assert all(read_pages(second, pages))

    def test_a_writer_that_was_halted_goes_on_under_another_name(self, open_objects: Open, server: S3Server) -> None:
        now = [1000.0]
        tier = open_objects(silence=600.0, interval=3600.0, clock=lambda: now[0])
        assert tier.write([make_page(1, 50_000)]) == [True]
        before = tier._writer.name
        now[0] += 400.0
        assert tier.write([make_page(2, 50_000)]) == [True]
        assert tier._writer.name != before
        assert len(server.names("fleet/" + names.index_of(before))) == 1
        assert read_pages(tier, [make_page(1, 50_000), make_page(2, 50_000)]) == [True, True]
        assert tier.statistics().used_bytes < 100_000

    def test_killed_while_it_writes_no_half_of_a_pack_is_believed(self, open_objects: Open, server: S3Server) -> None:
        """What others find are whole packs; what is left is deleted once the writer is found silent."""
        code = (
            "import sys; sys.path.insert(0, 'tests/fixtures')\n"
            "from made_pages import make_page\n"
            "from kvstore.tiers.objects import ObjectTier\n"
            f"tier = ObjectTier({URL!r}, 64 << 20, interval=0.2, deadline=20.0)\n"
            "first = int(sys.argv[1])\n"
            "print('ready', flush=True)\n"
            "for n in range(first, first + 1000):\n"
            "    tier.write([make_page(8 * n + k, 60_000) for k in range(8)])\n"
        )
        root = Path(__file__).parents[4]
        for kill in range(KILLS):
            child = subprocess.Popen(
                [sys.executable, "-c", code, str(1000 * kill)],
                cwd=root,
                env=os.environ | {"PYTHONPATH": str(root)},
                stdout=subprocess.PIPE,
            )
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            packs = len(server.names("fleet/packs/"))
            eventually(lambda packs=packs: len(server.names("fleet/packs/")) > packs, "it writes")  # type: ignore[misc]
            time.sleep(np.random.default_rng(kill).random() / 10)
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
        # As much as all of them may have: what leaves for want of room is no page that was lost.
        tier = open_objects((64 << 20) * (KILLS + 1), interval=0.1, silence=6.0)
        keys = tier.keys(b"")
        assert keys
        pages = [make_page(int.from_bytes(key, "big"), 60_000) for key in keys]
        assert all(read_pages(tier, pages))
        eventually(lambda: len(server.names("fleet/writers/")) == 1, "all of them are adopted")
        told = {name.path for name in tier._catalog.pack_names(own=True)}
        eventually(
            lambda: {name.removeprefix("fleet/") for name in server.names("fleet/packs/")} == told, "no leftovers"
        )
        assert all(read_pages(tier, pages))


class TestKeys:
    def test_a_fleet_changes_its_key(self, open_objects: Open) -> None:
        """New packs are of the first key; what an older key wrote is read as long as that is given."""
        pages = [make_page(n, 50_000) for n in range(3)]
        old = open_objects(keys=[KEYS[0]])
        assert old.write(pages[:1]) == [True]
        new = open_objects(keys=[KEYS[1], KEYS[0]])
        assert new.write(pages[1:2]) == [True]
        assert read_pages(new, pages[:2]) == [True, True]
        last = open_objects(keys=[KEYS[1]])
        assert read_pages(last, pages[:2]) == [False, True]

    def test_with_a_key_nothing_is_believed_that_is_not_encrypted(self, open_objects: Open) -> None:
        page = make_page(1, 50_000)
        assert open_objects().write([page]) == [True]
        assert read_pages(open_objects(keys=[KEYS[0]]), [page]) == [False]
        assert read_pages(open_objects(), [page]) == [True]

    @pytest.mark.parametrize("keys", [[], KEYS[:1]], ids=["open", "encrypted"])
    def test_a_page_is_authenticated_by_its_key(self, keys: list[bytes], open_objects: Open, server: S3Server) -> None:
        """Somebody with rights to the bucket says of one page that it lies where another one does, checksum and all.
        Without encryption nothing is there to see that by."""
        pages = [make_page(n, 50_000) for n in range(2)]
        assert all(open_objects(keys=keys, interval=3600.0).write(pages))
        (name,) = server.names("fleet/index/")
        content = index_object.decode_index(server.objects[name].body)
        assert content is not None
        [(pack, records)] = content.packs
        swapped = records.copy()
        swapped["key"] = records["key"][::-1]
        server.put(name, index_object.encode_index(index_object.IndexContent([(pack, swapped)])))
        reader = open_objects(keys=keys, interval=3600.0)
        assert reader.contains([page.key for page in pages]) == [True, True]
        into = [np.zeros(50_000, np.uint8) for _ in pages]
        sums = reader.read([page.key for page in pages], into)
        assert reader.statistics().corrupt == (2 if keys else 0)
        if keys:
            assert sums == [None, None]
        else:
            assert np.array_equal(into[0], pages[1].payload)

    def test_who_lacks_the_key_of_a_dead_writer_leaves_its_packs(self, open_objects: Open, server: S3Server) -> None:
        page = make_page(1, 50_000)
        first = open_objects(keys=[KEYS[0]])
        assert first.write([page]) == [True]
        first.close()
        without = open_objects(keys=[KEYS[1]], interval=3600.0)
        without._rounds.keep_house()
        assert len(server.names("fleet/packs/")) == 1
        assert without._rounds._follower.to_adopt() == [], "not in each round"
        new = open_objects(keys=[KEYS[1], KEYS[0]], interval=3600.0)
        assert read_pages(new, [page]) == [True]
        assert new.statistics().used_bytes > 50_000

    def test_no_byte_of_a_page_is_there_as_it_is(self, open_objects: Open, server: S3Server) -> None:
        page = make_page(1, 50_000)
        tier = open_objects(keys=[KEYS[0]])
        assert tier.write([page]) == [True]
        assert not any(page.payload.tobytes()[:64] in each.body for each in server.objects.values())


class TestMemory:
    def test_where_it_is_short_old_pages_are_forgotten_first(self, open_objects: Open) -> None:
        writer = open_objects()
        for number in range(0, 60, 6):
            assert all(writer.write([make_page(n, 5_000) for n in range(number, number + 6)]))
        reader = open_objects(most_pages=30)
        assert len(reader.keys(b"")) <= 30
        assert read_pages(reader, [make_page(59, 5_000)]) == [True]
        assert read_pages(reader, [make_page(0, 5_000)]) == [False]
        assert all(reader.write([make_page(n, 5_000) for n in range(100, 106)]))
        assert len(reader.keys(b"")) <= 30


class TestPacks:
    def test_chain_neighbours_lie_side_by_side_and_come_by_one_request(
        self, open_objects: Open, server: S3Server
    ) -> None:
        chains = [[make_page_of(c, n, 20_000) for n in range(6)] for c in (1, 2)]
        mixed = [
            page._replace(parent=chain[n - 1].key if n else b"")
            for n in range(6)
            for chain in chains
            for page in chain[n : n + 1]
        ]
        tier = open_objects(interval=3600.0)
        assert all(tier.write(mixed))
        assert len(server.names("fleet/packs/")) == 1
        server.requests.clear()
        assert all(read_pages(tier, chains[0]))
        assert [method for method, name in server.requests if "packs" in name] == ["GET"]

    def test_a_pack_ends_like_a_segment(self, open_objects: Open, server: S3Server) -> None:
        tier = open_objects()
        assert all(tier.write([make_page(n, 5_000) for n in range(3)]))
        (name,) = server.names("fleet/packs/")
        trailer = decode_trailer(server.objects[name].body[-4096:])
        assert trailer is not None
        assert trailer.records == 3

    def test_many_index_objects_become_few(self, open_objects: Open, server: S3Server) -> None:
        tier = open_objects(interval=0.1)
        pages = [make_page(n, 5_000) for n in range(40)]
        for page in pages:
            assert tier.write([page]) == [True]
        eventually(lambda: len(server.names("fleet/index/")) < 16, "they are written anew as one")
        assert all(read_pages(open_objects(), pages))

    def test_many_removals_are_told_in_parts(
        self, open_objects: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody reads an index object that is too large. Large ones go once what they tell of is gone."""
        monkeypatch.setattr(index_object, "PART_BYTES", 2000)
        monkeypatch.setattr(index_writer, "PART_BYTES", 2000)
        monkeypatch.setattr(index_writer, "in_parts", partial(index_object.in_parts, most_bytes=2000))
        tier, other = open_objects(interval=3600.0), open_objects(interval=3600.0)
        pages = [make_page(n, 5_000) for n in range(300)]
        for at in range(0, 300, 10):
            assert all(tier.write(pages[at : at + 10]))
        other._rounds._follower.poll(ask_all=True)
        assert all(other.contains([page.key for page in pages]))
        tier.remove([page.key for page in pages if page is not pages[0]])
        other._rounds._follower.poll(ask_all=True)
        assert sum(other.contains([page.key for page in pages])) == 1
        assert max(len(server.objects[name].body) for name in server.names("fleet/index/")) < 2100
        assert len(server.names("fleet/index/")) > 16
        for _ in range(40):
            tier._rounds.keep_house()
        assert len(server.names("fleet/index/")) < 16
        rest = server.names("fleet/index/")
        for _ in range(3):
            tier._rounds.keep_house()
        assert server.names("fleet/index/") == rest, "they are not written anew for ever"
        assert read_pages(open_objects(), pages[:2]) == [True, False]

    def test_lookups_ask_nobody(self, open_objects: Open, server: S3Server) -> None:
        tier = open_objects(interval=3600.0)
        page = make_page(1, 5_000)
        assert tier.write([page]) == [True]
        server.requests.clear()
        assert tier.contains([page.key, make_page(2, 1).key]) == [True, False]
        assert not server.requests
