"""Prompts and outcomes in both stores: they come, end, make room and are deleted with their entries, for everybody."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time

import pytest
from redis_servers import wait_until

from kvstore.responses import store as store_module
from kvstore.responses.open import open_store
from kvstore.responses.redis import RedisStore
from kvstore.responses.semantic.group import MOST_PROMPTS
from kvstore.responses.sqlite import SQLiteStore
from kvstore.responses.store import Choice, Entry, Label, Learner, Limits, News, Prompt, Seen, Usage

HOUR = 3600.0
GROUP, LEARNER = "a" * 64, Learner("b" * 64, "", "k")


def entry(
    number: int,
    *,
    group: str | None = GROUP,
    ends_in: float = HOUR,
    tenant: str = "",
    key: str = "k",
    model: str = "m",
    size: int = 10,
) -> Entry:
    now = time.time()
    label = Label(f"{number:064x}", tenant, key, model, "run", now, now + ends_in)
    return Entry(label, b"a" * size, None if group is None else Prompt(group, b"prompt %d" % number))


def learn(store, number: int, learner: Learner = LEARNER, ends_in: float = HOUR, size: int = 10) -> bool:
    return store.learn(learner, b"%d" % number + b"." * (size - len(str(number))), time.time() + ends_in)


class Reader:
    """Reads like a process that was there before."""

    def __init__(self, store, group: str = GROUP, learner: str = LEARNER.name) -> None:
        self.store, self.group, self.learner = store, group, learner
        self.prompts_seen, self.outcomes_seen = Seen(), Seen()

    def read(self) -> News:
        news = self.store.news(self.group, self.prompts_seen, self.learner, self.outcomes_seen)
        self.prompts_seen, self.outcomes_seen = news.prompts_seen, news.outcomes_seen
        return news

    def prompts(self) -> list[int]:
        found: list[int] = []
        while True:
            news = self.read()
            found += [int(sealed.split()[1]) for _, sealed in news.prompts]
            assert all(label.entry == f"{int(sealed.split()[1]):064x}" for label, sealed in news.prompts)
            if not news.more:
                return found

    def outcomes(self) -> list[int]:
        return [int(sealed.rstrip(b".")) for sealed in self.read().outcomes]


def test_what_one_stores_the_other_reads_once_and_in_order(opened):
    first, second = opened(), opened()
    reader = Reader(second)
    assert reader.read() == News((), reader.prompts_seen, (), reader.outcomes_seen, False)
    for number in (3, 1, 2):
        first.put(entry(number))
    first.put(entry(4, group="c" * 64))
    first.put(entry(5, group=None))
    for number in (7, 6):
        assert learn(first, number)
    learn(first, 8, Learner("d" * 64, "", "k"))
    news = reader.read()
    assert [sealed for _, sealed in news.prompts] == [b"prompt 3", b"prompt 1", b"prompt 2"]
    assert news.prompts[0][0] == first.get(f"{3:064x}").label
    assert [int(sealed.rstrip(b".")) for sealed in news.outcomes] == [7, 6]
    assert (reader.prompts(), reader.outcomes()) == ([], [])
    first.put(entry(1))
    learn(first, 9)
    assert (reader.prompts(), reader.outcomes()) == ([1], [])  # the outcome came with the same reading
    assert first.usage() == Usage(5, 5 * 10 + 4 * 8 + 4 * 10, prompts=4, outcomes=4)


def test_many_are_read_in_parts(opened):
    store = opened()
    for number in range(store_module.NEWS_AT_ONCE + 3):
        store.put(entry(number))
    reader = Reader(store)
    assert reader.read().more
    assert reader.prompts() == list(range(store_module.NEWS_AT_ONCE, store_module.NEWS_AT_ONCE + 3))


def test_a_prompt_ends_with_its_entry_and_an_outcome_by_itself(opened):
    store = opened()
    store.put(entry(1, ends_in=0.2))
    store.put(entry(2))
    learn(store, 3, ends_in=0.2)
    learn(store, 4)
    wait_until(lambda: Reader(store).prompts() == [2])
    wait_until(lambda: store.usage() == Usage(1, 10 + 8 + 10, 1, 1))
    assert Reader(store).outcomes() == [4]


def test_limits_count_prompts_and_what_goes_takes_its_prompt(opened):
    store = opened(bytes=60)
    for number in range(1, 6):
        assert store.put(entry(number, ends_in=HOUR + number))
    assert store.usage() == Usage(3, 54, prompts=3)
    assert Reader(store).prompts() == [3, 4, 5]
    assert not store.put(entry(6, size=53))  # with its prompt it is larger than all the room
    assert store.put(entry(6, size=52, ends_in=2 * HOUR))
    assert (Reader(store).prompts(), store.usage()) == ([6], Usage(1, 60, prompts=1))


def test_a_limit_of_entries_takes_prompts_with_it(opened):
    store = opened(entries=2)
    for number in range(1, 5):
        store.put(entry(number, ends_in=HOUR + number))
    assert (Reader(store).prompts(), store.usage().prompts) == ([3, 4], 2)


def test_outcomes_take_an_eighth_at_most_and_the_oldest_go(opened):
    store = opened(bytes=400)
    for number in range(10, 18):
        assert learn(store, number)
    assert (Reader(store).outcomes(), store.usage()) == ([13, 14, 15, 16, 17], Usage(0, 50, outcomes=5))
    assert not learn(store, 18, size=51)
    for number in range(1, 4):
        store.put(entry(number, size=102, ends_in=HOUR + number))
    assert store.usage() == Usage(3, 380, 3, 5)
    assert learn(store, 19)
    assert store.usage() == Usage(3, 380, 3, 5)
    assert store.put(entry(4, size=392, ends_in=2 * HOUR))  # all the room: outcomes go where no answer is left
    assert store.usage() == Usage(1, 400, 1, 0)


def test_an_outcome_makes_room_like_an_answer(opened):
    store = opened(bytes=100)
    store.put(entry(1, size=80))
    assert learn(store, 2)
    assert store.usage() == Usage(1, 98, 1, 1)
    store.put(entry(1, size=92))
    assert store.usage() == Usage(1, 100, 1, 0)
    assert learn(store, 3)
    assert store.usage() == Usage(0, 10, 0, 1)


def test_a_learner_has_no_more_outcomes_than_count(opened, monkeypatch):
    store = opened()
    for module in ("sqlite", "redis"):
        monkeypatch.setattr(sys.modules[f"kvstore.responses.{module}"], "MOST_OUTCOMES", 3)
    other = Learner("d" * 64, "", "k")
    for number in range(10, 16):
        learn(store, number)
        learn(store, number, other)
    assert Reader(store).outcomes() == [13, 14, 15]
    assert store.usage() == Usage(0, 60, 0, 6)


def test_the_oldest_prompts_of_a_group_are_found_no_more_and_their_answers_stay(opened):
    store = opened()
    for number in range(MOST_PROMPTS + 2):
        store.put(entry(number))
    assert Reader(store).prompts() == list(range(2, MOST_PROMPTS + 2))
    assert store.get(f"{0:064x}") is not None
    usage = store.usage()
    assert (usage.entries, usage.prompts) == (MOST_PROMPTS + 2, MOST_PROMPTS)
    assert store.delete(Choice(model="m")) == MOST_PROMPTS + 2
    assert store.usage() == Usage(0, 0)


@pytest.mark.parametrize(
    ("choice", "prompts", "outcomes"),
    [
        (Choice(entry=f"{1:064x}"), [2, 3], {"a": [1], "k": [2], "j": [3]}),
        (Choice(model="n"), [1, 2], {"a": [1], "k": [2], "j": [3]}),
        (Choice(tenant="a"), [2, 3], {"a": [], "k": [2], "j": [3]}),
        (Choice(key="k"), [3], {"a": [1], "k": [], "j": [3]}),
        (Choice(tenant="a", key="k"), [2, 3], {"a": [1], "k": [2], "j": [3]}),
        (Choice(), [], {"a": [], "k": [], "j": []}),
    ],
)
def test_deletes_take_prompts_and_what_callers_taught_everywhere(opened, choice, prompts, outcomes):
    """A key's entries in a tenant go with the key; what was learnt there is the tenant's."""
    store, other = opened(), opened()
    learners = {
        "a": Learner("1" * 64, "a", ""),
        "k": Learner("2" * 64, "", "k"),
        "j": Learner("3" * 64, "", "j"),
    }
    store.put(entry(1, tenant="a", key="k"))
    store.put(entry(2, key="k"))
    store.put(entry(3, key="j", model="n"))
    for number, learner in enumerate(learners.values(), 1):
        learn(store, number, learner)
    readers = {name: Reader(other, learner=learner.name) for name, learner in learners.items()}
    assert all(reader.prompts() == [1, 2, 3] for reader in readers.values())
    assert store.delete(choice) == 3 - len(prompts)
    assert Reader(other).prompts() == prompts
    assert {name: Reader(other, learner=learners[name].name).outcomes() for name in learners} == outcomes
    usage = other.usage()
    assert (usage.prompts, usage.outcomes) == (len(prompts), sum(map(len, outcomes.values())))
    if choice.entry is None:  # who had read before begins anew
        assert all(reader.prompts() == prompts for reader in readers.values())
    else:  # who has it finds it gone when it is read for a hit
        assert all(reader.prompts() == [] for reader in readers.values())


def test_a_redis_that_lost_everything_is_read_from_its_beginning(redis_server):
    redis_server.client.flushall()
    store = RedisStore(redis_server.url, Limits())
    for number in range(5):
        store.put(entry(number))
    reader = Reader(store)
    assert reader.prompts() == [0, 1, 2, 3, 4]
    redis_server.client.flushall()
    store.put(entry(7))
    learn(store, 8)
    news = reader.read()
    assert ([sealed for _, sealed in news.prompts], len(news.outcomes)) == ([b"prompt 7"], 1)
    ours = redis_server.client.keys("{kvstore-responses}:*")
    forever = {key.rpartition(b":")[2] for key in ours if redis_server.client.pttl(key) == -1}
    assert forever == {b"order", b"sizes", b"bytes", b"groups", b"learners", b"outcomes", b"outcome-bytes"} | {
        b"sequence",
        b"epoch",
    }
    store.close()


def test_what_goes_leaves_nothing_in_a_redis(redis_server):
    redis_server.client.flushall()
    store = RedisStore(redis_server.url, Limits(entries=2))
    for number in range(5):
        store.put(entry(number))
        learn(store, number)
    assert redis_server.client.zcard("{kvstore-responses}:group:" + GROUP) == 2
    store.delete(Choice())
    left = {key.rpartition(b":")[2] for key in redis_server.client.scan_iter()}
    assert left == {b"bytes", b"outcome-bytes", b"sequence", b"epoch"}
    assert (redis_server.client.get("{kvstore-responses}:bytes"), store.usage()) == (b"0", Usage(0, 0))
    store.close()


def test_a_redis_that_lost_some_keys_goes_on(redis_server):
    for lost in ("order", "sizes", "bytes", "groups", "learners", "outcomes", "outcome-bytes", "sequence", "epoch"):
        redis_server.client.flushall()
        store = RedisStore(redis_server.url, Limits(bytes=160))
        store.put(entry(1))
        learn(store, 2)
        redis_server.client.delete("{kvstore-responses}:" + lost)
        for number in range(3, 30):
            assert store.put(entry(number))
            assert learn(store, number)
        assert 29 in Reader(store).prompts(), lost
        store.delete(Choice())
        store.close()


def test_a_file_of_version_1_is_read_on_and_gets_prompts(tmp_path):
    path = tmp_path / "r.sqlite"
    db = sqlite3.connect(path)
    db.executescript(
        """
        CREATE TABLE entries (
            entry TEXT PRIMARY KEY, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
            weights TEXT NOT NULL, stored_at REAL NOT NULL, expires_at REAL NOT NULL, size INTEGER NOT NULL,
            sealed BLOB NOT NULL);
        CREATE INDEX ends ON entries (expires_at, entry, size);
        CREATE TABLE totals (one INTEGER PRIMARY KEY CHECK (one = 1), entries INTEGER, bytes INTEGER);
        INSERT INTO totals VALUES (1, 0, 0);
        CREATE TRIGGER came AFTER INSERT ON entries BEGIN
            UPDATE totals SET entries = entries + 1, bytes = bytes + new.size; END;
        CREATE TRIGGER went AFTER DELETE ON entries BEGIN
            UPDATE totals SET entries = entries - 1, bytes = bytes - old.size; END;
        PRAGMA user_version = 1;
        """
    )
    old = entry(1, group=None)
    label = old.label
    row = (label.entry, label.tenant, label.key, label.model, label.weights, label.stored_at, label.expires_at)
    db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, 10, old.sealed))
    db.commit()
    db.close()
    store = SQLiteStore(path, Limits())
    assert store.get(label.entry) == old
    store.put(entry(2))
    learn(store, 3)
    assert store.usage() == Usage(2, 10 + 18 + 10, 1, 1)
    store.close()


PUT_FOREVER = """
import sys, time
from kvstore.responses.open import open_store
from kvstore.responses.store import Entry, Label, Learner, Limits, Prompt

store = open_store(sys.argv[1], Limits(entries=50, bytes=100_000))
for number in range(1 << 30):
    now = time.time()
    label = Label(f"{number % 200:064x}", "", "", "", "", now, now + 3600)
    store.put(Entry(label, bytes(1000), Prompt(f"{number % 3:064x}", bytes(100))))
    store.learn(Learner(f"{number % 5:064x}", "", ""), bytes(50), now + 3600)
    if number == 100:
        print("ready", flush=True)
"""


def test_a_killed_process_leaves_sums_that_are_right(where):
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", PUT_FOREVER, where], stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"ready\n"
            writer.kill()
        store = open_store(where, Limits(entries=50, bytes=100_000))
        usage = store.usage()
        kept = [store.get(label.entry) for label in store.labels()]
        prompts = sum(len(store.news(f"{group:064x}", Seen(), "0" * 64, Seen()).prompts) for group in range(3))
        outcomes = sum(len(outcomes_of(store, f"{learner:064x}")) for learner in range(5))
        size = sum(len(each.sealed) for each in kept)
        assert usage == Usage(len(kept), size + 100 * prompts + 50 * outcomes, prompts, outcomes)
        assert (usage.entries, usage.prompts) == (50, 50)
        assert usage.outcomes > 100
        store.close()


def outcomes_of(store, learner: str) -> list[bytes]:
    found: list[bytes] = []
    seen = Seen()
    while True:
        news = store.news(GROUP, Seen(), learner, seen)
        found += news.outcomes
        seen = news.outcomes_seen
        if not news.more:
            return found
