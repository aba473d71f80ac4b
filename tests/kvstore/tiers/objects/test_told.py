"""What is told, and when: others hear of each pack that left, halted writers name none that may have been swept, no
page is nowhere for a moment while packs change, and the summary of the node has every page that is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from made_pages import make_page, read_pages
from s3_server import Faults, S3Server

from kvstore.tiers.objects import ObjectTier, index_object, index_writer, names
from kvstore.tiers.objects.bucket import Bucket, Listed
from kvstore.tiers.objects.index_object import IndexContent, decode_index
from kvstore.tiers.objects.uses import Uses, decode_uses

Open = Callable[..., ObjectTier]
MIB = 1 << 20


class Held:
    """Counts, as a summary does, in how many places it has each page."""

    def __init__(self, tier: ObjectTier) -> None:
        self.places: dict[bytes, int] = {}
        self.left_for_a_moment: set[bytes] = set()
        assert tier.tell_keys(self, threading.Event())

    def came(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.places[key] = self.places.get(key, 0) + 1
            assert self.places[key] == 1, "told twice"

    def left(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.places[key] -= 1
            assert self.places[key] == 0, "told to leave, and had not come"
            self.left_for_a_moment.add(key)

    @property
    def keys(self) -> set[bytes]:
        return {key for key, places in self.places.items() if places}


def names_in_index(server: S3Server) -> set[str]:
    """The packs that some index object names."""
    told: set[str] = set()
    for name in server.names("fleet/index/"):
        content = decode_index(server.objects[name].body)
        assert content is not None
        told |= {f"fleet/{pack.name.path}" for pack, _ in content.packs if pack.name not in content.gone}
    return told


def halt_in(bucket: Bucket, place: str, halted: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever an object of this kind has been written, what a process does that stands still there for long."""
    put = Bucket.put

    def put_and_halt(self: Bucket, path: str, body: bytes | bytearray, *, quick: bool = False) -> None:
        put(self, path, body, quick=quick)
        if self is bucket and path.startswith(place):
            halted()

    monkeypatch.setattr(Bucket, "put", put_and_halt)


class TestOthers:
    def test_who_reads_rarely_hears_of_packs_that_left(self, open_objects: Open) -> None:
        """Also where the index objects that said so were written anew since."""
        first, other = open_objects(8 * MIB, interval=3600.0), open_objects(8 * MIB, interval=3600.0)
        assert first.write([make_page(0, MIB // 2)]) == [True]
        other._rounds._follower.poll(ask_all=True)
        assert other.contains([make_page(0, 1).key]) == [True]
        for number in range(1, 60):
            assert first.write([make_page(number, MIB // 2)]) == [True]
            first._rounds.keep_house()
        assert first.contains([make_page(0, 1).key]) == [False]
        other._rounds._follower.poll(ask_all=True)
        assert set(other.keys(b"")) == set(first.keys(b""))
        assert other._catalog.others_bytes <= 8 * MIB

    def test_who_has_nothing_new_costs_no_request(self, open_objects: Open, server: S3Server) -> None:
        """One list has all heartbeats, and says which of them say anything else than before."""
        writers = [open_objects(interval=3600.0) for _ in range(3)]
        for number, writer in enumerate(writers):
            assert writer.write([make_page(number, 50_000)]) == [True]
            writer._writer.heartbeat.beat()
        follower = open_objects(interval=3600.0)._rounds._follower
        follower.poll()
        for writer in writers:
            writer._writer.heartbeat.beat()
        server.requests.clear()
        follower.poll()
        assert server.requests == [("GET", "")]
        assert writers[0].write([make_page(9, 50_000)]) == [True]
        writers[0]._writer.heartbeat.beat()
        server.requests.clear()
        follower.poll()
        name = writers[0]._writer.name.hex()
        assert [name in path for method, path in server.requests if path] == [True, True], "its heartbeat, what it told"

    def test_a_namespace_expires_when_nobody_uses_it_there(self, open_objects: Open) -> None:
        first, other = open_objects(interval=3600.0), open_objects(interval=3600.0)
        pages = [make_page(number, 50_000) for number in range(4)]
        namespace = pages[0].key[:32]
        assert all(first.write(pages))
        other._rounds._follower.poll(ask_all=True)
        log = first._catalog.use_log
        now = [log._clock()]
        log._clock = lambda: now[0]
        stop = threading.Event()
        now[0] += 100.0
        assert first.expire(namespace, 200.0, stop) is None
        now[0] += 450.0
        assert all(read_pages(other, pages))
        other._rounds.exchange_uses()
        first._rounds._follower.read_uses()
        now[0] += 100.0
        assert first.expire(namespace, 200.0, stop) is None, "another node uses it"
        now[0] += 200.0
        assert first.expire(namespace, 200.0, stop) == 4
        other._rounds._follower.poll(ask_all=True)
        assert not any(other.contains([page.key for page in pages]))

    def test_all_hear_of_what_a_dead_writer_left_and_nobody_had_room_for(self, open_objects: Open) -> None:
        first = open_objects(interval=3600.0)
        pages = [make_page(number, MIB) for number in range(12)]
        for page in pages:
            assert first.write([page]) == [True]
        small, other = open_objects(8 * MIB, interval=3600.0), open_objects(interval=3600.0)
        assert other._catalog.others_bytes > 12 * MIB
        first.close()
        small._rounds._follower.poll()
        small._rounds._follower.adopt(first._writer.name)
        small._rounds.keep_house()
        other._rounds._follower.poll(ask_all=True)
        assert 0 < len(small.keys(b"")) < 12
        assert set(other.keys(b"")) == set(small.keys(b""))
        found = read_pages(other, pages)
        assert found.count(True) == len(small.keys(b""))

    def test_who_adopts_beside_another_deletes_nothing_that_the_other_one_took(
        self, open_objects: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where it has read nothing of what the dead one told before the other one deleted that."""
        late, first = open_objects(interval=3600.0), open_objects(interval=3600.0)
        pages = [make_page(number, 50_000) for number in range(4)]
        assert all(first.write(pages))
        first.close()
        list_objects, others = Bucket.list, list[ObjectTier]()

        def list_late(self: Bucket, prefix: str, behind: str | None = None) -> list[Listed]:
            if self is late._bucket and prefix == names.index_of(first._writer.name) and not others:
                others.append(open_objects(interval=3600.0))  # and it adopts everything at once
            return list_objects(self, prefix, behind)

        monkeypatch.setattr(Bucket, "list", list_late)
        late._rounds._follower.poll()
        late._rounds._follower.adopt(first._writer.name)
        assert all(read_pages(others[0], pages))
        assert all(read_pages(late, pages))


class TestUses:
    def test_each_is_told_twice_and_one_that_could_not_be_told_is_told_later(
        self, open_objects: Open, server: S3Server
    ) -> None:
        first, other = open_objects(interval=3600.0), open_objects(interval=3600.0)
        page = make_page(1, 50_000)
        assert first.write([page]) == [True]
        other._rounds._follower.poll(ask_all=True)
        assert read_pages(other, [page]) == [True]
        server.faults = Faults(status=403, only=lambda method, name: name.startswith("fleet/uses/"))
        with pytest.raises(OSError, match="403"):
            other._rounds.exchange_uses()
        server.faults = Faults()

        def tell() -> Uses:
            other._rounds.exchange_uses()
            (name,) = server.names("fleet/uses/")
            uses = decode_uses(server.objects[name].body)
            assert uses is not None
            return uses

        told = [tell() for _ in range(3)]
        (pack,) = first._catalog.pack_names(own=True)
        assert [list(uses.packs) for uses in told] == [[pack], [pack], []]
        assert all(page.key[:32] in uses.namespaces for uses in told)


class TestHaltedWriters:
    @pytest.mark.parametrize("place", ["packs/", "index/"])
    def test_one_that_was_halted_while_it_wrote_names_nothing_that_may_be_swept(
        self, place: str, open_objects: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others may have found it dead meanwhile, and have deleted what nobody was told of."""
        now = [1000.0]
        tier = open_objects(interval=3600.0, silence=600.0, clock=lambda: now[0])
        assert tier.write([make_page(1, 50_000)]) == [True]
        before, told = tier._writer.name, names_in_index(server)

        def halted() -> None:
            now[0] += 400.0
            tier._writer.heartbeat.beat()  # the other thread goes on as well

        with monkeypatch.context() as patched:
            halt_in(tier._bucket, place, halted, patched)
            assert tier.write([make_page(2, 50_000)]) == [False]
        swept = set(server.names("fleet/packs/")) - told
        assert len(swept) == 1
        for name in swept:
            del server.objects[name]
        assert tier.write([make_page(3, 50_000)]) == [True]
        assert tier._writer.name != before
        assert names_in_index(server) <= set(server.names("fleet/packs/"))
        assert read_pages(open_objects(), [make_page(n, 50_000) for n in (1, 2, 3)]) == [True, False, True]

    def test_a_heartbeat_never_changes_the_name_while_a_pack_is_written(
        self, open_objects: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [1000.0]
        tier = open_objects(interval=3600.0, silence=600.0, clock=lambda: now[0])
        assert tier.write([make_page(1, 50_000)]) == [True]
        before = tier._writer.name
        now[0] += 400.0
        tier._writer.heartbeat.beat()
        assert tier._writer.name == before
        assert tier._writer.heartbeat.lapsed, "and does not hide that it was halted"

    def test_one_that_was_halted_deletes_no_pack_that_others_may_have(
        self, open_objects: Open, server: S3Server
    ) -> None:
        now = [1000.0]
        tier = open_objects(interval=3600.0, silence=600.0, clock=lambda: now[0])
        assert tier.write([make_page(1, 50_000)]) == [True]
        now[0] += 400.0
        with pytest.raises(OSError, match="halted"):
            tier._writer._delete(tier._catalog.own_packs()[0].id, evicted=True)
        assert len(server.names("fleet/packs/")) == 1


class TestLimit:
    def test_removals_use_objects_and_index_objects_count_before_they_are_written(
        self, open_objects: Open, server: S3Server
    ) -> None:
        limit = 4 * MIB
        tier, other = open_objects(limit, interval=3600.0), open_objects(64 * MIB, interval=3600.0)
        chosen = [make_page(number, 1_000) for number in range(10_000, 13_000)]
        for at in range(0, len(chosen), 500):
            assert all(other.write(chosen[at : at + 500]))
        tier._rounds._follower.poll(ask_all=True)
        for number in range(400):
            tier.write([make_page(number, 30_000)])
            assert mine(server, tier) <= limit
        tier._writer.put_uses(bytes(MIB))
        assert mine(server, tier) <= limit
        assert all(read_pages(tier, chosen))
        tier._rounds.exchange_uses()
        assert server.names("fleet/uses/")
        assert mine(server, tier) <= limit
        tier.remove([page.key for page in chosen])
        assert mine(server, tier) <= limit
        for number in range(400, 440):
            tier.write([make_page(number, 30_000)])
            tier._rounds.keep_house()
            assert mine(server, tier) <= limit


def mine(server: S3Server, tier: ObjectTier) -> int:
    name = tier._writer.name.hex()
    kinds = ("packs/", "index/", "writers/", "uses/")
    return sum(server.used(f"fleet/{kind}{name}") for kind in kinds)


class TestNowhere:
    @pytest.mark.parametrize("part_bytes", [index_object.PART_BYTES, 100])
    def test_a_page_that_is_carried_on_is_never_told_to_have_left(
        self, part_bytes: int, open_objects: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither by its writer nor by who follows it, also where each thing is told by itself."""
        monkeypatch.setattr(index_writer, "in_parts", partial(index_object.in_parts, most_bytes=part_bytes))
        tier, other = open_objects(8 * MIB, interval=3600.0), open_objects(8 * MIB, interval=3600.0)
        wanted = make_page(0, 60_000)
        assert all(tier.write([wanted, *(make_page(number, 60_000) for number in range(1, 8))]))
        other._rounds._follower.poll(ask_all=True)
        held = [Held(tier), Held(other)]
        (old,) = server.names("fleet/packs/")
        read = [wanted]  # of each pack one: some pack with a page that is read has to leave
        for number in range(100, 1000, 8):
            assert all(read_pages(tier, [page for page in read if tier.contains([page.key])[0]]))
            made = [make_page(n, 60_000) for n in range(number, number + 8)]
            assert all(tier.write(made))
            read.append(made[0])
            other._rounds._follower.poll(ask_all=True)
            if old not in server.names("fleet/packs/"):
                break
        assert tier.statistics().carried > 0
        other._rounds._follower.poll(ask_all=True)
        for each, its_tier in zip(held, (tier, other), strict=True):
            assert wanted.key not in each.left_for_a_moment
            assert each.left_for_a_moment, "its neighbours left"
            assert each.keys == set(its_tier.keys(b""))
            assert its_tier.contains([wanted.key]) == [True]

    @pytest.mark.parametrize("leaves", ["is deleted", "is removed in it", "is damaged in it"])
    def test_a_page_of_two_packs_is_found_in_the_other_at_once(self, leaves: str, open_objects: Open) -> None:
        first, second = open_objects(interval=3600.0), open_objects(interval=3600.0)
        page = make_page(1, 50_000)
        assert first.write([page]) == second.write([page]) == [True]
        first._rounds._follower.poll(ask_all=True)
        held, catalog = Held(first), first._catalog
        [asked] = catalog.find([page.key], [50_000], [0])
        if leaves == "is deleted":
            assert catalog.drop_pack(asked.pack.name) == 0
        elif leaves == "is removed in it":
            catalog.learn(IndexContent(removed=[(page.key, asked.pack.name)]), lambda pack: True)
        else:
            catalog.note_read([page.key], [], [asked])
        assert first.contains([page.key]) == [True]
        assert not held.left_for_a_moment
        [now] = catalog.find([page.key], [50_000], [0])
        assert now.pack.name != asked.pack.name
        assert read_pages(first, [page]) == [True]


class TestHeldKeys:
    def test_whoever_is_told_has_what_lookups_have(self, open_objects: Open, server: S3Server) -> None:
        """Through writes, removals, evictions, another writer, and packs that are gone."""
        tier, other = open_objects(8 * MIB, interval=3600.0), open_objects(8 * MIB, interval=3600.0)
        assert all(tier.write([make_page(number, 20_000) for number in range(300)]))
        held = Held(tier)
        assert held.keys == set(tier.keys(b""))
        assert len(held.keys) == 300
        assert all(other.write([make_page(number, 20_000) for number in range(250, 400)]))
        tier._rounds._follower.poll(ask_all=True)
        assert len(held.keys) == 400
        tier.remove([make_page(number, 1).key for number in range(40)])
        assert held.keys == set(tier.keys(b""))
        for number in range(1000, 1400, 40):
            tier.write([make_page(each, 20_000) for each in range(number, number + 40)])
        assert held.keys == set(tier.keys(b""))
        for name in server.names("fleet/packs/"):
            del server.objects[name]
        read_pages(tier, [make_page(number, 20_000) for number in range(400)])
        assert held.keys == set(tier.keys(b""))

    def test_who_was_told_before_is_told_no_more(self, open_objects: Open) -> None:
        tier = open_objects()
        first = Held(tier)
        second = Held(tier)
        assert tier.write([make_page(1, 1_000)]) == [True]
        assert not first.keys
        assert len(second.keys) == 1

    def test_it_can_be_stopped(self, open_objects: Open) -> None:
        stop = threading.Event()
        stop.set()
        told: Any = Held.__new__(Held)
        assert not open_objects().tell_keys(told, stop)
