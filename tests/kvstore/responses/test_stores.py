"""What both stores promise, of a real SQLite file and a real Redis."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import time

import pytest
from redis_servers import wait_until

from kvstore.errors import ConfigError, FormatError, ResourceError
from kvstore.responses.open import open_store
from kvstore.responses.redis import RedisStore
from kvstore.responses.sqlite import SQLiteStore
from kvstore.responses.store import Choice, Entry, Label, Limits, StoreError, Usage

HOUR = 3600.0


def entry(
    number: int, size: int = 10, ends_in: float = HOUR, *, tenant: str = "", key: str = "k", model: str = "m"
) -> Entry:
    now = time.time()
    return Entry(Label(f"{number:064x}", tenant, key, model, "run", now, now + ends_in), bytes([number]) * size)


def names(store) -> set[int]:
    return {int(label.entry, 16) for label in store.labels()}


def test_what_is_put_is_got_by_everybody_who_shares_the_store(opened):
    first, second = opened(), opened()
    kept = entry(1, tenant="t", model="modèle\n")
    assert first.put(kept)
    assert second.get(kept.label.entry) == kept
    assert second.get("f" * 64) is None
    assert list(second.labels()) == [kept.label]
    assert second.usage() == Usage(1, 10)


def test_a_later_answer_takes_the_place_of_an_earlier_one(opened):
    store = opened()
    store.put(entry(1, 10))
    store.put(later := entry(1, 30))
    assert store.get(later.label.entry) == later
    assert store.usage() == Usage(1, 30)


def test_an_entry_that_has_ended_is_not_there_and_takes_no_room(opened):
    store = opened()
    store.put(short := entry(1, ends_in=0.2))
    store.put(entry(2))
    wait_until(lambda: store.get(short.label.entry) is None)
    wait_until(lambda: names(store) == {2})
    wait_until(lambda: store.usage() == Usage(1, 10))


@pytest.mark.parametrize(("limits", "left"), [({"entries": 3}, {3, 4, 5}), ({"bytes": 25}, {4, 5})])
def test_room_is_made_by_removing_what_ends_first(opened, limits, left):
    store = opened(**limits)
    for number in range(1, 6):
        assert store.put(entry(number, ends_in=HOUR + number))
    assert names(store) == left
    assert store.usage() == Usage(len(left), 10 * len(left))


def test_what_is_larger_than_all_the_room_is_refused_and_nothing_goes_for_it(opened):
    store = opened(bytes=100)
    store.put(entry(1))
    assert not store.put(entry(2, 101))
    assert names(store) == {1}


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        (Choice(entry=f"{1:064x}"), {2, 3, 4}),
        (Choice(tenant="a"), {3, 4}),
        (Choice(key="x"), {2, 4}),
        (Choice(model="n"), {1, 2, 3}),
        (Choice(tenant="a", key="x"), {2, 3, 4}),
        (Choice(tenant="a", model="n"), {1, 2, 3, 4}),
        (Choice(), set()),
    ],
)
def test_deletes_take_what_agrees_with_all_that_is_given(opened, choice, left):
    store, other = opened(), opened()
    for number, tenant, key, model in ((1, "a", "x", "m"), (2, "a", "y", "m"), (3, "", "x", "m"), (4, "", "y", "n")):
        store.put(entry(number, tenant=tenant, key=key, model=model))
    assert store.delete(choice) == 4 - len(left)
    assert names(other) == left
    assert [number for number in range(1, 5) if other.get(f"{number:064x}") is not None] == sorted(left)
    assert other.usage() == Usage(len(left), 10 * len(left))


PUT_FOREVER = """
import sys, time
from pathlib import Path
from kvstore.responses.sqlite import SQLiteStore
from kvstore.responses.store import Entry, Label, Limits

store = SQLiteStore(Path(sys.argv[1]), Limits(entries=50))
for number in range(1 << 30):
    now = time.time()
    store.put(Entry(Label(f"{number % 200:064x}", "", "", "", "", now, now + 3600), bytes(1000)))
    if number == 100:
        print("ready", flush=True)
"""


def test_a_killed_process_leaves_a_file_that_can_be_read_and_written(tmp_path):
    path = tmp_path / "responses.sqlite"
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", PUT_FOREVER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"ready\n"
            writer.kill()
        store = SQLiteStore(path, Limits(entries=50))
        kept = [store.get(label.entry) for label in store.labels()]
        assert store.usage() == Usage(len(kept), sum(each.size for each in kept)) == Usage(50, 50_000)
        store.close()


def test_a_file_is_for_its_user_alone(tmp_path):
    path = tmp_path / "new" / "responses.sqlite"
    store = SQLiteStore(path, Limits())
    store.put(entry(1))
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (path.parent, *path.parent.iterdir())}
    assert modes.pop("new") == 0o700
    assert set(modes.values()) == {0o600}, modes
    store.close()


def test_a_damaged_file_is_put_aside_and_a_new_one_begun(tmp_path):
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"no database at all" * 1000)
    store = SQLiteStore(path, Limits())
    assert store.put(entry(1))
    assert names(store) == {1}
    assert (tmp_path / "responses.sqlite.damaged").read_bytes().startswith(b"no database")
    store.close()


def test_a_file_of_another_version_is_left_alone(tmp_path):
    path = tmp_path / "responses.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 9")
    db.close()
    before = path.read_bytes()
    with pytest.raises(FormatError, match="has version 9, this kvstore reads version 2"):
        SQLiteStore(path, Limits())
    assert path.read_bytes() == before


def test_what_can_t_be_opened_is_told(tmp_path):
    with pytest.raises(ResourceError, match="can't be used"):
        SQLiteStore(tmp_path, Limits())
    with pytest.raises(ConfigError, match="not in mysql://"):
        open_store("mysql://host", Limits())
    with pytest.raises(ConfigError, match="not the URL of a Redis"):
        open_store("redis://host:port", Limits())
    with pytest.raises(ConfigError, match="has no password"):
        open_store(str(tmp_path / "x"), Limits(), "secret")


def test_a_redis_that_is_not_there_is_told_by_each_call():
    store = RedisStore("redis://127.0.0.1:1", Limits())
    for call in (
        lambda: store.get("a"),
        lambda: store.put(entry(1)),
        lambda: list(store.labels()),
        lambda: store.delete(Choice()),
        store.usage,
    ):
        with pytest.raises(StoreError, match="the Redis of responses"):
            call()
    store.close()


def test_a_redis_that_lost_keys_goes_on(redis_server):
    redis_server.client.flushall()
    store = RedisStore(redis_server.url, Limits(bytes=25))
    for number in range(1, 4):
        store.put(entry(number, ends_in=HOUR + number))
    redis_server.client.delete("{kvstore-responses}:order", "{kvstore-responses}:sizes")
    assert store.put(entry(9))
    assert store.usage() == Usage(1, 10)
    redis_server.client.hset("{kvstore-responses}:entry:" + "e" * 64, mapping={"tenant": "x"})
    assert store.get("e" * 64) is None
    assert all(redis_server.client.pttl(key) > 0 for key in redis_server.client.keys("*:entry:0*"))
    store.close()


def test_a_file_is_opened_while_another_process_changes_it(tmp_path):
    path = tmp_path / "r.sqlite"
    SQLiteStore(path, Limits()).close()
    changing = sqlite3.connect(path, isolation_level=None)
    changing.execute("BEGIN IMMEDIATE")
    store = SQLiteStore(path, Limits())
    assert store.get("f" * 64) is None
    store.close()
    changing.execute("ROLLBACK")
    changing.close()
