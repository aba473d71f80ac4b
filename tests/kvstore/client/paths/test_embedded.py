"""The arena of an embedded store is in shared memory as long as the store is open, and no longer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.arena.arena import Arena
from kvstore.client.url import parse_url
from kvstore.errors import ConfigError, InUseError, ResourceError

PAGE = 4096
PAGES = 8
LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=PAGE)
HASHES = [bytes([number]) * 32 for number in range(PAGES)]


@pytest.fixture
def folder(short_folder: Path) -> Path:
    return short_folder / "e"


@pytest.fixture
def url(folder: Path) -> Iterator[Callable[..., str]]:
    """Of the folder, or another one, with its arena in the default place."""
    used = []

    def make(where: Path = folder, **options: str) -> str:
        settings = {"arena": "1MiB", "disk_limit": "16MiB"} | options
        used.append(f"embedded://{where}?" + "&".join(f"{key}={value}" for key, value in settings.items()))
        return used[-1]

    yield make
    for each in used:
        shutil.rmtree(arena_of(each), ignore_errors=True)


def arena_of(url: str) -> Path:
    return parse_url(url.partition("&keep_arena")[0]).arena_directory


def payload() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (PAGES, PAGE), dtype=np.uint8)


def fill(client: kvstore.Client) -> None:
    assert client.namespace(LAYOUT).store(HASHES, payload()).stored == PAGES


def loaded(client: kvstore.Client) -> int:
    """How many pages come, none of them wrong."""
    into = np.zeros((PAGES, PAGE), np.uint8)
    count = client.namespace(LAYOUT).load(HASHES, into)
    assert np.array_equal(into[:count], payload()[:count])
    return count


def killed(url: str) -> None:
    """Have a process open a store, store the pages and be killed."""
    script = f"""
        import os, signal
        import numpy as np, kvstore
        pages = kvstore.connect({url!r}).namespace(kvstore.Layout(model="m", block_size=16, page_bytes={PAGE}))
        data = np.random.default_rng(0).integers(0, 256, ({PAGES}, {PAGE}), dtype=np.uint8)
        assert pages.store([bytes([number]) * 32 for number in range({PAGES})], data).stored == {PAGES}
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL


def test_a_closed_store_leaves_nothing_there_and_has_its_pages_on_disk(url) -> None:
    with kvstore.connect(url()) as client:
        fill(client)
        assert (arena_of(url()) / "pages").exists()
    assert not arena_of(url()).exists()
    with kvstore.connect(url()) as again:
        assert loaded(again) == PAGES
        assert set(again.namespace(LAYOUT).statistics().loaded) <= {"disk", "arena"}
    assert not arena_of(url()).exists()


def test_without_a_disk_the_pages_end_with_the_store(url) -> None:
    with kvstore.connect(url(disk_limit="0")) as client:
        fill(client)
        assert loaded(client) == PAGES
    assert not arena_of(url()).exists()
    with kvstore.connect(url(disk_limit="0")) as again:
        assert loaded(again) == 0


def test_its_memory_goes_though_somebody_still_has_a_view_of_it(url) -> None:
    client = kvstore.connect(url())
    fill(client)
    view = client.arena
    fd = os.open(arena_of(url()) / "pages", os.O_RDONLY)
    try:
        assert os.fstat(fd).st_blocks
        client.close()
        assert not os.fstat(fd).st_blocks
    finally:
        os.close(fd)
    assert not view.any()


def test_an_arena_is_kept_if_that_is_asked_for(url) -> None:
    kept = url(disk_limit="0", keep_arena="true")
    with kvstore.connect(kept) as client:
        fill(client)
    with kvstore.connect(kept) as client:
        assert loaded(client) == PAGES
    with kvstore.connect(url(disk_limit="0")) as client:
        assert loaded(client) == PAGES
    assert not arena_of(kept).exists(), "who closes it last decides"


@pytest.mark.parametrize("value", ["", "maybe", "yes", "1"])
def test_what_cannot_be_said_of_keeping_is_refused(url, value: str) -> None:
    with pytest.raises(ConfigError, match="keep_arena is true or false, got"):
        kvstore.connect(url(keep_arena=value))


def test_a_store_closes_only_where_it_is_opened(url, short_folder, shm_folder) -> None:
    """In a folder of somebody's own, what is not the arena's stays there."""
    (shm_folder / "a").mkdir()
    (shm_folder / "a" / "mine").touch()
    with kvstore.connect(url(arena_dir=str(shm_folder / "a"))) as client:
        fill(client)
    assert [path.name for path in (shm_folder / "a").iterdir()] == ["mine"]


def test_pages_that_cannot_be_written_back_keep_the_arena(url) -> None:
    client = kvstore.connect(url())
    (tier,) = client._session.control._store.lower_tiers.own
    tier.write = lambda pages: [False] * len(pages)
    fill(client)
    with pytest.raises(ResourceError, match=f"{PAGES} of {PAGES} pages are not on disk"):
        client.close()
    with kvstore.connect(url()) as again:
        assert loaded(again) == PAGES
    assert not arena_of(url()).exists()


def test_pages_that_are_not_durable_keep_the_arena(url, monkeypatch) -> None:
    client = kvstore.connect(url())
    (tier,) = client._session.control._store.lower_tiers.own
    fill(client)

    def refuse() -> None:
        raise ResourceError("the disk says no")

    tier.flush = refuse
    with pytest.raises(ResourceError, match="says no"):
        client.close()
    assert (arena_of(url()) / "pages").exists()


def test_an_interrupt_of_closing_leaves_nothing_open(url, monkeypatch) -> None:
    client = kvstore.connect(url())
    fill(client)
    maintenance = client._session.control._maintenance
    stop = maintenance.stop

    def interrupted() -> None:
        stop()
        raise KeyboardInterrupt

    monkeypatch.setattr(maintenance, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    assert not arena_of(url()).exists()
    with kvstore.connect(url()) as again:
        assert loaded(again) == PAGES


def test_a_folder_that_went_before_the_store_keeps_no_arena(url, folder) -> None:
    client = kvstore.connect(url())
    (tier,) = client._session.control._store.lower_tiers.own
    tier.write = lambda pages: [False] * len(pages)
    fill(client)
    shutil.rmtree(folder)
    with pytest.raises(ResourceError):
        client.close()
    assert not arena_of(url()).exists()


class TestFailedOpenings:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"arena": "1000TiB"}, ResourceError),
            ({"redis": "http://nowhere"}, ConfigError),
            ({"disk_key_file": "/no/such/key"}, ConfigError),
        ],
        ids=["too large", "redis", "key"],
    )
    def test_they_leave_nothing(self, url, options, error) -> None:
        with pytest.raises(error):
            kvstore.connect(url(**options))
        assert not arena_of(url()).exists()
        kvstore.connect(url()).close()

    def test_nor_does_one_whose_folder_is_none(self, url, folder) -> None:
        folder.touch()
        with pytest.raises(ResourceError):
            kvstore.connect(url())
        assert not arena_of(url()).exists()
        folder.unlink()
        kvstore.connect(url()).close()

    def test_nor_does_one_whose_disk_is_in_use(self, url, shm_folder) -> None:
        with kvstore.connect(url()):
            with pytest.raises(InUseError):
                kvstore.connect(url(arena_dir=str(shm_folder / "a")))
            assert not (shm_folder / "a").exists()

    @pytest.mark.parametrize("name", ["kvstore.client.paths.embedded.Maintenance", "kvstore.client.connect.Client"])
    def test_nor_does_one_that_fails_at_the_very_end(self, url, monkeypatch, name: str) -> None:
        def refuse(*arguments: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(name, refuse)
            with pytest.raises(RuntimeError):
                kvstore.connect(url())
        assert not arena_of(url()).exists()
        kvstore.connect(url()).close()

    def test_they_keep_what_an_earlier_store_left(self, url, folder) -> None:
        killed(url(disk_limit="0"))
        folder.touch()
        with pytest.raises(ResourceError):
            kvstore.connect(url())
        with kvstore.connect(url(disk_limit="0")) as again:
            assert loaded(again) == PAGES

    def test_a_nodes_leaves_no_memory(self, start_node, shm_folder, short_folder) -> None:
        (short_folder / "disk").touch()
        with pytest.raises(ResourceError):
            start_node()
        assert not [path for path in shm_folder.rglob("*") if path.name in ("pages", "headers", "readers")]


class TestKilledStores:
    @pytest.mark.parametrize("disk_limit", ["0", "16MiB"])
    def test_the_next_opening_finds_the_pages_and_closes_clean(self, url, disk_limit: str) -> None:
        killed(url(disk_limit=disk_limit))
        assert (arena_of(url()) / "pages").exists()
        with kvstore.connect(url(disk_limit=disk_limit)) as again:
            assert loaded(again) == PAGES
        assert not arena_of(url()).exists()

    @pytest.mark.parametrize("disk_limit", ["0", "16MiB"])
    def test_an_arena_whose_folder_is_gone_goes_with_the_next_opening_of_any(
        self, url, folder, short_folder, disk_limit: str
    ) -> None:
        folder.mkdir()
        killed(url(disk_limit=disk_limit))
        other = url(short_folder / "other")
        kvstore.connect(other).close()
        assert arena_of(url()).exists(), "its folder is still there"
        shutil.rmtree(folder)
        kvstore.connect(other).close()
        assert not arena_of(url()).exists()

    def test_not_while_its_store_lives(self, url, folder, short_folder) -> None:
        client = kvstore.connect(url())
        fill(client)
        client.flush()
        shutil.rmtree(folder)
        kvstore.connect(url(short_folder / "other")).close()
        assert loaded(client) == PAGES
        assert arena_of(url()).exists()
        client.close()
        assert not arena_of(url()).exists()

    def test_not_if_it_was_to_be_kept_or_never_had_a_folder(self, url, folder, short_folder) -> None:
        folder.mkdir()
        killed(url(keep_arena="true"))
        shutil.rmtree(folder)
        nowhere = url(short_folder / "nowhere", disk_limit="0")
        killed(nowhere)
        kvstore.connect(url(short_folder / "other")).close()
        assert arena_of(url()).exists()
        with kvstore.connect(nowhere) as again:
            assert loaded(again) == PAGES

    def test_not_once_it_is_a_nodes(self, url, folder, short_folder) -> None:
        killed(url())
        Arena(arena_of(url()), 1 << 20).close()
        shutil.rmtree(folder)
        kvstore.connect(url(short_folder / "other")).close()
        assert arena_of(url()).exists()


def test_whoever_opens_while_another_closes_gets_all_of_it_or_is_refused(url) -> None:
    """The folder and its lock go and come again."""
    opened = [0, 0]
    failures: list[BaseException] = []

    def come_and_go(who: int) -> None:
        try:
            while opened[who] < 20 and not failures:
                try:
                    with kvstore.connect(url(disk_limit="0", arena="64KiB")) as client:
                        fill(client)
                        assert loaded(client) == PAGES
                        opened[who] += 1
                except InUseError:
                    pass
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert not arena_of(url()).exists()
