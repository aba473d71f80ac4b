"""Similar prompts of several caches on one store: they know the same, after a restart too, until it is deleted."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from similar_asking import FIRST, OTHER, SIMILAR, Asking, body, fields_of

from kvstore.responses import Caller
from kvstore.responses.lookup_threads import LookupThreads
from kvstore.responses.request import CHAT
from kvstore.responses.semantic.lexical import embed
from kvstore.responses.store import Choice, StoreError

PATIENCE = 60.0
LAST = 3
"""The number of the third prompt."""
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
QUIET = {"shadow": 0.0}


def with_caches(where: str, work: Callable[..., Awaitable[None]], *each: dict[str, Any]) -> None:
    """Do the work with caches that have a store in common."""

    async def asked() -> None:
        caches = [Asking(where, **{"key": KEY} | given) for given in each]
        try:
            await work(*caches)
        finally:
            for cache in caches:
                await cache.cache.close()

    asyncio.run(asked())


def test_a_prompt_of_one_is_told_by_another_and_after_a_restart(where):
    async def work(one: Asking, other: Asking) -> None:
        assert await other.ask(SIMILAR, caller="nobody") is None  # it has looked before
        assert await one.ask(FIRST) is None
        assert await other.ask(SIMILAR) is not None
        assert await other.ask(SIMILAR, caller="another") is None
        assert (one.computed, other.computed) == (1, 2)

    async def again(one: Asking) -> None:
        assert await one.ask("How could I reset my password?") is not None
        assert one.computed == 0

    with_caches(where, work, QUIET, QUIET)
    with_caches(where, again, QUIET)


def test_a_wrong_answer_that_one_was_told_of_is_told_by_none_and_counts_for_all(where):
    """The first checks each hit; the second would tell this one, and shuts because the first found wrong ones."""

    async def work(one: Asking, other: Asking) -> None:
        callers = ("a", "b", "c")
        for caller in callers:
            one.says = "Click on 'forgot'."
            assert await one.ask(FIRST, caller) is None
            assert await other.ask(SIMILAR, caller) is not None
            one.says = "Something else."
            assert await one.ask(SIMILAR, caller) is not None
        assert one.metric("similar_open") == 0
        for caller in callers:
            assert other.metric("similar_open") == 1
            assert await other.ask(SIMILAR, caller) is None
        assert other.metric("similar_open") == 0

    with_caches(where, work, {"shadow": 1.0}, QUIET)


def test_what_one_learns_decides_for_another_and_after_a_restart(where):
    """Prompts that differ in a word are told nowhere at first; many right ones prove them, wherever that was."""
    same = {"vector": lambda text: np.ones(4, np.float32), "vectors": "same", "bound": 0.4} | QUIET
    proven, asked = "What about the colour of a bed?", "What about the colour of a chair?"

    async def learns(one: Asking, other: Asking) -> None:
        assert await one.ask(proven) is None
        assert await other.ask(asked) is None  # compared with that, and right
        for number in range(15):
            await one.ask("What about the colour of a table?", system=f"place {number}")
            await one.ask("What about the colour of a floor?", system=f"place {number}")
        assert other.metric('similar_outcomes_total{outcome="right"}') == 1
        assert await other.ask("What about the colour of a door?") is not None
        assert await other.ask(proven, caller="stranger") is None
        assert await other.ask(asked, caller="stranger") is None  # whom nobody taught

    async def knows(one: Asking) -> None:
        assert await one.ask("What about the colour of a wall?") is not None

    async def knows_not(one: Asking) -> None:
        assert await one.ask("What about the colour of a roof?") is None

    with_caches(where, learns, same, same)
    with_caches(where, knows, same)
    with_caches(where, knows_not, same | {"vectors": "another embedding"})


@pytest.mark.parametrize(
    "choice",
    [Choice(model="m"), Choice(tenant="t"), Choice(), "key", "entry"],
    ids=["model", "tenant", "all", "key", "entry"],
)
def test_a_delete_reaches_all_and_their_memory(where, choice):
    async def work(one: Asking, other: Asking) -> None:
        asking: dict[str, Any] = {} if choice == "key" else {"tenant": "t"}
        assert await one.ask(FIRST, **asking) is None
        assert await other.ask(SIMILAR, **asking) is not None
        (label,) = one.store.labels()
        assert {"reset", "password"} <= words_in_memory(other)
        chosen = {"key": Choice(key=label.key), "entry": Choice(label.entry)}.get(choice, choice)
        assert one.store.delete(chosen) == 1
        assert await other.ask("Why are there 7 windows?", **asking) is None  # guards let nothing be compared with it
        if choice != "entry":  # that one is found gone when it would be told
            assert "password" not in words_in_memory(other)
        assert await other.ask(SIMILAR, **asking) is None

    with_caches(where, work, QUIET, QUIET)


def words_in_memory(asking: Asking) -> set[str]:
    known = asking.cache._similar._answers._remembered._known.values()
    return {stem for each in known for reading in each.group._readings.values() for stem in reading.stems}


def test_many_that_are_gone_do_not_keep_one_that_is_there_from_being_told(where):
    async def work(one: Asking, other: Asking, third: Asking) -> None:
        for text in (FIRST, "How could I reset my password?", "Please, how do I reset my password?"):
            assert await one.ask(text) is None
        entries = {label.entry for label in one.store.labels()}
        for asking in (other, third):  # the nearest goes, and the nearest of the others
            told = await asking.ask(SIMILAR)
            entries.remove(told)
            one.store.delete(Choice(told))
        assert await other.ask(SIMILAR) == entries.pop()
        assert (other.computed, third.computed) == (0, 0)

    with_caches(where, work, {"bound": 0.0000001} | QUIET, QUIET, QUIET)


def test_an_answer_of_another_run_or_too_old_is_computed_and_takes_its_place(where):
    async def work(one: Asking) -> None:
        assert await one.ask(FIRST) is None
        assert await one.ask(SIMILAR, run="s") is None
        assert await one.ask("How could I reset my password?", run="s") is not None  # of the second
        assert await one.ask("How may I reset my password?", control="max-age=0") is None
        one.cache.now = lambda: time.time() + 100
        assert await one.ask("Please, how do I reset my password?", run="s", control="max-age=10") is None
        assert one.computed == 4

    with_caches(where, work, QUIET)


def test_nothing_of_a_prompt_can_be_read_in_the_store_nor_with_another_key(where, tmp_path):
    async def work(one: Asking, stranger: Asking) -> None:
        assert await one.ask(FIRST) is None
        await one.ask(OTHER)
        assert await stranger.ask(SIMILAR) is None
        assert await one.ask(SIMILAR) is not None

    with_caches(where, work, QUIET, QUIET | {"key": OTHER_KEY})
    everything = raw(where)
    assert len(everything) > 4000
    for secret in (b"password", b"forgot", embed(FIRST).tobytes()[:64], b"_words"):
        assert secret not in everything, secret


def raw(where: str) -> bytes:
    """All that lies in a store."""
    if "://" not in where:
        with sqlite3.connect(where) as db:
            rows = [row for table in ("entries", "prompts", "outcomes") for row in db.execute(f"SELECT * FROM {table}")]
        db.close()
        return b" ".join(value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row)
    from redis import Redis

    with Redis.from_url(where) as client:
        return b" ".join(
            filter(None, (client.dump(key) for key in client.scan_iter()))
        )  # values are not compressed: short


def damage(where: str, how: Callable[[bytes], object]) -> None:
    """Change each sealed prompt and outcome but those of the last prompt."""
    if "://" not in where:
        db = sqlite3.connect(where)
        for table in ("prompts", "outcomes"):
            for number, sealed in db.execute(f"SELECT sequence, sealed FROM {table}").fetchall():
                if (table, number) != ("prompts", LAST):
                    db.execute(f"UPDATE {table} SET sealed = ? WHERE sequence = ?", (how(sealed), number))
        db.commit()
        db.close()
        return
    from redis import Redis

    with Redis.from_url(where) as client:
        ((name, _),) = client.zrange(client.keys("*:group:*")[0], -1, -1, withscores=True)
        for key in client.keys("*:entry:*"):
            if not key.endswith(name):
                client.hset(key, "prompt", how(client.hget(key, "prompt")))
        for key in client.keys("*:learnt:*"):
            for member, score in client.zrange(key, 0, -1, withscores=True):
                client.zrem(key, member)
                client.zadd(key, {bytes(str(how(member)), "ascii"): score})


@pytest.mark.parametrize("key", [KEY, None], ids=["sealed", "plain"])
@pytest.mark.parametrize(
    "how",
    [
        lambda sealed: b"",
        lambda sealed: sealed[:-1],
        lambda sealed: sealed[:-1] + b"x",
        lambda sealed: "text",
        lambda _: 5,
    ],
    ids=["empty", "short", "changed", "text", "number"],
)
def test_what_is_damaged_costs_a_computation(where, how, key):
    async def stores(one: Asking) -> None:
        for text in (FIRST, OTHER, "Who wrote this book?"):
            await one.ask(text)

    async def computes(one: Asking) -> None:
        assert await one.ask("Could you tell me who wrote this book?") is not None  # the one that is whole
        assert await one.ask(SIMILAR) is None
        assert one.computed == 1
        assert await one.ask(FIRST) is not None  # the answer itself is whole
        assert await one.ask("How could I reset my password?") is not None  # of the one that was computed

    with_caches(where, stores, QUIET | {"key": key})
    damage(where, how)
    with_caches(where, computes, QUIET | {"key": key})


def test_a_store_that_fails_between_search_and_learning_costs_computations(where):
    async def work(one: Asking) -> None:
        await one.ask(FIRST)
        store = one.store
        news, learn = store.news, store.learn

        def fails(*_: object) -> Any:
            raise StoreError("it is away")

        store.news = fails
        assert await one.ask(SIMILAR) is None
        store.news, store.learn = news, fails
        one.says = "Something else."
        assert await one.ask(OTHER) is None  # compared; what it taught is known here alone
        assert one.metric('similar_outcomes_total{outcome="wrong"}') == 1
        store.learn = learn
        assert await one.ask("How may I reset my password?") is not None

    with_caches(where, work, QUIET)


def test_an_embedding_that_fails_costs_a_computation(where, caplog):
    def fails(text: str) -> Any:
        raise RuntimeError("no such model")

    async def work(one: Asking, other: Asking) -> None:
        await other.ask(FIRST)
        assert await one.ask(SIMILAR) is None
        assert await one.ask(SIMILAR) is not None  # the equal one
        assert await other.ask("How could I reset my password?") is not None  # its own: the first has no vector

    with_caches(where, work, QUIET | {"vector": fails, "vectors": "lexical"}, QUIET)
    assert "no such model" in caplog.text


def test_the_keys_of_a_tenant_share_and_nobody_else_does(where):
    async def work(one: Asking, other: Asking) -> None:
        assert await one.ask(FIRST, caller="a", tenant="t") is None
        assert await other.ask(SIMILAR, caller="b", tenant="t") is not None
        for caller, tenant in (("a", "u"), ("a", ""), ("t", ""), ("", "")):
            assert await other.ask(SIMILAR, caller=caller, tenant=tenant) is None, (caller, tenant)
        assert other.computed == 4

    with_caches(where, work, QUIET, QUIET)


def test_a_search_that_is_late_is_used_for_what_comes_behind_it(where):
    """The request does not wait; its prompt is kept all the same, and its answer compared."""
    goes_on, searched = threading.Event(), threading.Event()

    def slow(text: str) -> Any:
        assert goes_on.wait(PATIENCE)
        return embed(text)

    async def work(one: Asking, late: Asking) -> None:
        await one.ask(OTHER)
        late.cache._similar._threads = threads = LookupThreads(0.01)
        search = late.cache._similar._search

        def tells(*given: Any) -> Any:
            try:
                return search(*given)
            finally:
                searched.set()

        late.cache._similar._search = tells

        async def compute() -> bytes:
            goes_on.set()  # the search goes on behind the deadline
            assert await asyncio.to_thread(searched.wait, PATIENCE)
            return body("Something else.")

        fields = fields_of(FIRST)
        answered = await late.cache.answer(CHAT, fields, compute, caller=Caller("key"), run="r")
        assert answered.entry is None
        await late.settle()
        assert late.metric('similar_outcomes_total{outcome="wrong"}') == 1
        assert await one.ask(SIMILAR) is not None
        await asyncio.to_thread(threads.close)

    with_caches(where, work, QUIET, QUIET | {"vector": slow})
