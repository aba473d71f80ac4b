"""Servers that fail: every fault costs misses, which are counted, and heals by itself; no wrong bytes, and no error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from made_pages import make_page, read_pages
from s3_server import URL, Faults, S3Server

from kvstore.breaker import State
from kvstore.errors import ConfigError, ResourceError
from kvstore.status import TierState
from kvstore.tiers.objects import ObjectTier, known_packs
from kvstore.tiers.objects import bucket as bucket_module
from kvstore.tiers.objects.bucket import Bucket

Open = Callable[..., ObjectTier]
PAGES = [make_page(n, 50_000) for n in range(12)]
MORE = [make_page(n, 50_000) for n in range(100, 104)]


def eventually(so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30.0
    while not so():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def packs_alone(method: str, name: str) -> bool:
    return name.startswith("fleet/packs/")


READ_FAULTS: dict[str, dict[str, Any]] = {
    "denied": {"status": 403},
    "too many requests": {"status": 429},
    "ill": {"status": 500},
    "unavailable": {"status": 503},
    "cut": {"cut": True},
    "corrupt": {"corrupt": True},
    "swapped": {"swap": True},
    "slow": {"delay": 3.0},
}
CASES = [("packs", fault) for fault in READ_FAULTS] + [
    ("everywhere", fault) for fault in READ_FAULTS if fault not in ("cut", "corrupt", "swapped")
]


class TestReads:
    @pytest.mark.parametrize(("where", "fault"), CASES)
    def test_a_fault_gives_misses_and_heals(
        self, where: str, fault: str, open_objects: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Calls end within their deadline, and what was there is found again once the server is well."""
        monkeypatch.setattr(known_packs, "_DOUBT_SECONDS", 0.2)
        tier = open_objects(deadline=1.0)
        assert all(tier.write(PAGES))
        server.faults = Faults(**READ_FAULTS[fault])
        if where == "packs":
            server.faults.only = packs_alone
        began = time.monotonic()
        found = read_pages(tier, PAGES)
        assert time.monotonic() - began < 20.0
        assert not any(found)
        counts = tier.statistics()
        assert (counts.asked, counts.missed) == (12, 12)
        assert counts.corrupt + counts.errors + counts.late > 0
        server.faults = Faults()
        eventually(lambda: all(read_pages(tier, PAGES)), "it heals")

    def test_ranges_of_several_packs_are_asked_for_side_by_side(self, open_objects: Open, server: S3Server) -> None:
        """None is answered before the other one has come."""
        tier = open_objects(interval=3600.0)
        for page in PAGES[:2]:
            assert tier.write([page]) == [True]
        both = threading.Barrier(2, timeout=15.0)

        def wait(method: str, name: str) -> bool:
            if packs_alone(method, name):
                both.wait()
            return False

        server.faults = Faults(only=wait)
        assert read_pages(tier, PAGES[:2]) == [True, True]

    def test_an_empty_server_is_forgotten_at_once(self, open_objects: Open, server: S3Server) -> None:
        """Packs that are gone are misses, and nobody is told again that they are there."""
        tier = open_objects()
        assert all(tier.write(PAGES))
        for name in server.names("fleet/packs/"):
            del server.objects[name]
        assert not any(read_pages(tier, PAGES))
        assert tier.contains([page.key for page in PAGES]) == [False] * 12
        assert tier.health().state is TierState.OK
        assert all(tier.write(PAGES))
        assert all(read_pages(tier, PAGES))

    def test_failing_again_and_again_it_is_left_alone(self, open_objects: Open, server: S3Server) -> None:
        """Reads say why, lookups find nothing then, and no request is made for a while."""
        tier = open_objects(deadline=1.0)
        assert all(tier.write(PAGES))
        server.faults.status = 503
        eventually(lambda: not read_pages(tier, PAGES)[0] and tier.health().reason != "", "it says so")
        health = tier.health()
        assert "503" in health.reason
        assert "AKTEST" not in health.reason
        server.faults.status = 0
        eventually(lambda: tier.health().state is TierState.OK and all(read_pages(tier, PAGES)), "it heals")

    def test_a_look_that_is_late_says_nothing_of_the_server(self, open_objects: Open) -> None:
        """It waits for another look, perhaps; reads go on meanwhile."""
        tier = open_objects(interval=3600.0)
        assert all(tier.write(PAGES))
        with tier._rounds._polling:
            for _ in range(40):
                assert not tier._rounds.refresh(time.monotonic())
            assert tier.health().state is TierState.OK
            assert all(read_pages(tier, PAGES))
        assert tier._rounds.refresh(time.monotonic() + 30.0)


class TestWrites:
    @pytest.mark.parametrize("fault", ["denied", "too many requests", "ill", "unavailable", "slow"])
    def test_a_fault_refuses_pages_and_heals(self, fault: str, open_objects: Open, server: S3Server) -> None:
        tier = open_objects(deadline=0.5)
        assert all(tier.write(PAGES))
        server.faults = Faults(**READ_FAULTS[fault] | ({"delay": 8.0} if fault == "slow" else {}))
        server.faults.only = lambda method, name: method == "PUT"
        assert tier.write(MORE) == [False] * 4
        assert tier.statistics().refused == 4
        server.faults = Faults()
        eventually(lambda: all(tier.write(MORE)), "it heals")
        assert all(read_pages(tier, MORE))
        eventually(lambda: len(server.names("fleet/packs/")) == 2, "what may have been written is deleted")

    def test_a_pack_of_which_nothing_is_told_is_nobodys(self, open_objects: Open, server: S3Server) -> None:
        """The index object can't be written: the page is refused, and its pack deleted."""
        tier = open_objects()
        server.faults = Faults(status=503, only=lambda method, name: name.startswith("fleet/index/"))
        assert tier.write(PAGES) == [False] * 12
        assert tier.contains([page.key for page in PAGES]) == [False] * 12
        server.faults = Faults()
        eventually(lambda: not server.names("fleet/packs/"), "it is deleted")
        assert all(tier.write(PAGES))

    def test_a_pack_that_arrives_behind_its_deletion_is_deleted_again(
        self, open_objects: Open, server: S3Server
    ) -> None:
        tier = open_objects(interval=3600.0)
        server.faults = Faults(status=403, only=packs_alone)
        assert tier.write(PAGES) == [False] * 12
        server.faults = Faults()
        tier._rounds.keep_house()
        (name,) = {name for method, name in server.requests if method == "PUT" and packs_alone(method, name)}
        server.put(name, b"what was on its way")
        assert all(tier.write(PAGES))
        tier._rounds.keep_house()
        assert name not in server.names()
        assert all(read_pages(tier, PAGES))

    def test_no_number_of_an_index_object_is_used_twice(self, open_objects: Open, server: S3Server) -> None:
        """One whose writing failed may be there all the same, and others read each number once."""
        tier = open_objects(interval=3600.0)
        failed = []

        def note(method: str, name: str) -> bool:
            failed.append(name)
            return name.startswith("fleet/index/")

        server.faults = Faults(status=403, only=note)
        assert tier.write(PAGES) == [False] * 12
        server.faults = Faults()
        assert all(tier.write(PAGES))
        numbers = {name.split("/")[-1].split("-")[0] for name in failed if name.startswith("fleet/index/")}
        assert len(numbers) == 1
        assert not any(name.split("/")[-1].split("-")[0] in numbers for name in server.names("fleet/index/"))

    def test_removals_that_cannot_be_told_raise_and_are_told_later(self, open_objects: Open, server: S3Server) -> None:
        tier, other = open_objects(deadline=0.5), open_objects()
        assert all(tier.write(PAGES))
        eventually(lambda: all(other.contains([page.key for page in PAGES])), "the other one knows them")
        server.faults = Faults(status=503, only=lambda method, name: method == "PUT")
        with pytest.raises(ResourceError, match="503"):
            tier.remove([page.key for page in PAGES[:6]])
        server.faults = Faults()
        eventually(lambda: sum(other.contains([page.key for page in PAGES])) == 6, "the other one hears of it")


class TestBackoff:
    @pytest.mark.parametrize("status", [429, 503])
    def test_a_server_that_has_too_much_to_do_is_asked_less_and_less(self, status: int, server: S3Server) -> None:
        """Each request is tried three times, further apart; behind four that fail in a row none is made for a while,
        which doubles with each that fails then."""
        clock = FakeClock()
        bucket = Bucket(URL, 20.0, clock.monotonic)
        server.faults.status = status
        pauses = []
        for failures in (bucket_module.FAILURES, 1, 1, 1):
            assert bucket.may_read
            for _ in range(failures):
                with pytest.raises(OSError, match=str(status)):
                    bucket.get("x")
            assert not bucket.may_read
            assert bucket.may_write, "writes may go well all the same"
            began = clock.now
            while bucket.reading.state is State.OPEN:
                clock.now += bucket_module.FIRST_PAUSE / 4
            pauses.append(clock.now - began)
        assert [later / before for before, later in pairwise(pauses)] == [2.0, 2.0, 2.0]
        requests = bucket_module.FAILURES + 3
        assert requests < len(server.requests) <= 3 * requests
        server.faults.status = 0
        server.put("fleet/x", b"well")
        assert bucket.may_read
        assert bucket.get("x") == b"well"
        assert bucket.reading.state is State.CLOSED
        bucket.close()


class TestOthers:
    def test_why_requests_fail_is_said(self, open_objects: Open, server: S3Server) -> None:
        tier = open_objects(deadline=0.2, interval=3600.0)
        server.faults.delay = 1.0
        with pytest.raises(OSError, match="timed out"):
            tier._bucket.get("x")
        server.close()
        with pytest.raises(OSError, match="connection refused"):
            tier._bucket.get("x")

    def test_late_lists_make_pages_late_and_nothing_else(self, open_objects: Open, server: S3Server) -> None:
        tier, other = open_objects(), open_objects()
        server.faults.lists_late = 1.0
        assert all(tier.write(PAGES))
        assert all(read_pages(tier, PAGES))
        eventually(lambda: all(read_pages(other, PAGES)), "the other one has them, later")

    def test_damaged_index_objects_say_nothing(self, open_objects: Open, server: S3Server) -> None:
        tier = open_objects()
        assert all(tier.write(PAGES))
        server.faults = Faults(corrupt=True, only=lambda method, name: name.startswith("fleet/index/"))
        other = open_objects()
        assert other.contains([page.key for page in PAGES]) == [False] * 12
        server.faults = Faults()
        eventually(lambda: all(read_pages(other, PAGES)), "read again, they do")

    def test_a_server_that_is_away_at_the_start_comes_later(self, open_objects: Open, server: S3Server) -> None:
        first = open_objects()
        assert all(first.write(PAGES))
        server.faults.status = 503
        second = open_objects(deadline=0.5)
        assert second.contains([PAGES[0].key]) == [False]
        server.faults.status = 0
        eventually(lambda: all(read_pages(second, PAGES)), "it heals")

    def test_foreign_objects_are_passed_over(self, open_objects: Open, server: S3Server) -> None:
        for name in ("writers/x", "writers/" + 32 * "0", "index/" + 32 * "0" + "/y", "packs/z", "uses/q", "more"):
            server.put("fleet/" + name, b"{}" * 100)
        server.put("fleet/index/" + 32 * "0" + "/" + 16 * "0" + "-" + 16 * "0", b"KVOBJIX1" + bytes(100))
        tier = open_objects()
        assert all(tier.write(PAGES))
        assert all(read_pages(tier, PAGES))


class TestProfiles:
    @pytest.fixture
    def profile(self, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Credentials lie in a file, under a name."""
        file = tmp_path / "credentials"
        file.write_text("[fleet]\naws_access_key_id = AKPROFILE\naws_secret_access_key = SKPROFILE-secret\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.setenv("AWS_PROFILE", "fleet")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)

    @pytest.mark.usefixtures("profile")
    def test_credentials_of_a_profile_are_used(self, open_objects: Open, server: S3Server) -> None:
        pytest.importorskip("boto3", reason="boto3 reads files of profiles, and is not installed")
        tier = open_objects()
        assert all(tier.write(PAGES))
        assert all(read_pages(tier, PAGES))
        assert server.signers == {"AKPROFILE"}

    @pytest.mark.usefixtures("profile")
    def test_without_the_package_that_reads_them_it_is_named(
        self, open_objects: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "boto3", None)
        monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
        with pytest.raises(ConfigError, match=r"AWS_PROFILE=fleet: .* pip install boto3"):
            open_objects()

    def test_keys_of_the_environment_come_first(
        self, open_objects: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_PROFILE", "fleet")
        assert all(open_objects().write(PAGES))
        assert server.signers == {"AKTEST"}
