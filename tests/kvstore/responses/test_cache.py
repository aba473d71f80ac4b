"""``kvstore.responses`` as a program uses it: time, failures of the store, equal requests, cancelled callers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.responses import Answered, Caller, Limits, ResponseCache, Sealing, flight
from kvstore.responses import cache as cache_module
from kvstore.responses.sqlite import SQLiteStore
from kvstore.responses.store import Choice, Entry, Label, Learner, News, Seen, StoreError, Usage

PATH = "/v1/completions"
ASKED = {"prompt": "x", "temperature": 0}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
KEY = bytes(range(32))
PATIENCE = 60.0


class MemoryStore:
    """Keeps entries in a dict, and fails or hangs as it is told."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.error: str | None = None
        self.open = threading.Event()
        self.open.set()
        self.asked = 0

    def get(self, entry: str) -> Entry | None:
        self.asked += 1
        self._step()
        return self.entries.get(entry)

    def put(self, entry: Entry) -> bool:
        self._step()
        self.entries[entry.label.entry] = entry
        return True

    def news(self, group: str, prompts: Seen, learner: str, outcomes: Seen) -> News:
        raise NotImplementedError

    def learn(self, learner: Learner, sealed: bytes, expires_at: float) -> bool:
        raise NotImplementedError

    def labels(self) -> Iterator[Label]:
        return iter([each.label for each in self.entries.values()])

    def groups(self) -> dict[str, str]:
        raise NotImplementedError

    def delete(self, choice: Choice) -> int:
        raise NotImplementedError

    def usage(self) -> Usage:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _step(self) -> None:
        assert self.open.wait(PATIENCE)
        if self.error:
            raise StoreError(self.error)


class Model:
    """Counts what it computes, and waits while it is told to."""

    def __init__(self) -> None:
        self.computed = 0
        self.go = asyncio.Event()
        self.go.set()
        self.cancelled = 0

    async def __call__(self) -> bytes:
        self.computed += 1
        number = self.computed
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        choice = {"index": 0, "text": f"answer {number}", "finish_reason": "stop"}
        return json.dumps({"choices": [choice], "usage": USAGE}).encode()


def cache_of(store: Any, key: bytes | None = KEY, deadline: float = PATIENCE, **more: Any) -> ResponseCache:
    return ResponseCache(store, Sealing(key), ttl=3600, deadline=deadline, **more)


def ask(cache: ResponseCache, model: Callable[[], Awaitable[bytes]], caller: str = "k", **more: Any) -> Any:
    fields = ASKED | more.pop("fields", {})
    return cache.answer(PATH, fields, model, caller=Caller(caller), **{"run": "r"} | more)


def text_of(answered: Answered) -> str:
    return str(json.loads(answered.content)["choices"][0]["text"])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_an_answer_is_told_again_to_its_caller_and_of_its_run_alone(tmp_path):
    now = 1000.0
    model = Model()
    store = SQLiteStore(tmp_path / "r.sqlite", Limits(), now=lambda: now)
    cache = cache_of(store, now=lambda: now)
    assert text_of(await ask(cache, model)) == "answer 1"
    await until(lambda: list(store.labels()))
    now += 12
    again = await ask(cache, model)
    assert (text_of(again), again.age, len(again.entry or "")) == ("answer 1", 12, 64)
    assert text_of(await ask(cache, model, cache_control="max-age=11")) == "answer 2"
    await until(lambda: next(store.labels()).stored_at == now)
    assert text_of(await ask(cache, model, caller="other")) == "answer 3"
    assert text_of(await ask(cache, model, run="s")) == "answer 4"
    await until(lambda: "s" in {label.weights for label in store.labels()})
    now += 3599
    assert text_of(await ask(cache, model, run="s")) == "answer 4"
    now += 1
    assert text_of(await ask(cache, model, run="s")) == "answer 5"
    await cache.close()


@pytest.mark.asyncio
async def test_a_store_that_fails_is_left_alone_for_a_while_and_nothing_fails():
    store, model = MemoryStore(), Model()
    store.error = "it is away"
    cache = cache_of(store)
    for count in range(1, 20):
        assert text_of(await ask(cache, model)) == f"answer {count}"
    assert store.asked <= 3
    await cache.close()


@pytest.mark.asyncio
async def test_a_store_that_hangs_holds_nobody_beyond_the_deadline():
    store, model = MemoryStore(), Model()
    store.open.clear()
    cache = cache_of(store, deadline=0.001)
    for count in range(1, 100):
        assert text_of(await ask(cache, model, fields={"seed": count})) == f"answer {count}"
    assert store.asked <= 4
    assert b'lookups_total{outcome="skipped"}' in cache.metrics.text().encode()
    store.open.set()
    await cache.close()


@pytest.mark.asyncio
async def test_what_is_damaged_or_of_another_key_is_computed():
    store, model = MemoryStore(), Model()
    cache = cache_of(store)
    await ask(cache, model)
    await until(lambda: store.entries)
    ((name, kept),) = store.entries.items()
    for place in range(len(kept.sealed)):
        damaged = bytearray(kept.sealed)
        damaged[place] ^= 1
        assert Sealing(KEY).open(kept.label, bytes(damaged)) is None, place
    for sealed in (b"", b"E", b"P", b"Eshort", kept.sealed[:-1], b"P" + kept.sealed[1:]):
        store.entries[name] = Entry(kept.label, sealed)
        computed = model.computed
        assert (await ask(cache, model)).entry is None
        assert model.computed == computed + 1
        await until(lambda: store.entries[name].sealed != sealed)  # noqa: B023 - at once
    assert Sealing(None).open(kept.label, kept.sealed) is None
    assert Sealing(bytes(32)).open(kept.label, kept.sealed) is None
    await cache.close()


def test_a_label_that_was_changed_or_an_entry_that_was_moved_can_t_be_opened():
    for sealing in (Sealing(KEY), Sealing(None)):
        label = Label("a" * 64, "t", "k", "m", "w", 1.0, 2.0)
        sealed = sealing.seal(label, b"content")
        assert sealing.open(label, sealed) == b"content"
        for name in ("entry", "tenant", "key", "model", "weights", "stored_at", "expires_at"):
            changed = {each: getattr(label, each) for each in Label.__slots__} | {name: "x"}
            assert sealing.open(Label(**changed), sealed) is None, name
    assert b"content" not in Sealing(KEY).seal(label, b"content")
    assert Sealing(KEY).name("entry", [b"ab"]) != Sealing(KEY).name("entry", [b"a", b"b"])
    assert Sealing(KEY).name("entry", [b"ab"]) != Sealing(bytes(32)).name("entry", [b"ab"])
    with pytest.raises(ConfigError, match="has 32 bytes, got 3"):
        Sealing(b"abc")


@pytest.mark.asyncio
async def test_equal_requests_at_once_are_computed_once_though_who_led_is_cancelled():
    store, model = MemoryStore(), Model()
    model.go.clear()
    cache = cache_of(store)
    leader = asyncio.create_task(ask(cache, model))
    await until(lambda: model.computed == 1)
    followers = [asyncio.create_task(ask(cache, model)) for _ in range(9)]
    await until(lambda: cache.flights.followers == 9)
    leader.cancel()
    followers[0].cancel()
    await asyncio.wait([leader, followers[0]])
    model.go.set()
    assert {text_of(each) for each in await asyncio.gather(*followers[1:])} == {"answer 1"}
    assert (model.computed, model.cancelled) == (1, 0)
    await until(lambda: store.entries)
    await cache.close()


@pytest.mark.asyncio
async def test_when_all_are_cancelled_so_is_the_computation_and_the_next_one_computes():
    store, model = MemoryStore(), Model()
    model.go.clear()
    cache = cache_of(store)
    for last_is_leader in (True, False):
        tasks = [asyncio.create_task(ask(cache, model))]
        computed = model.computed
        await until(lambda: model.computed == computed + 1)  # noqa: B023 - at once
        tasks.append(asyncio.create_task(ask(cache, model)))
        await until(lambda: cache.flights.followers == 1)
        for task in tasks[:: -1 if last_is_leader else 1]:
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: not cache.flights.under_way)
    assert model.cancelled == 2
    model.go.set()
    assert text_of(await ask(cache, model)) == "answer 3"
    await cache.close()


@pytest.mark.asyncio
async def test_an_error_is_its_leaders_and_the_others_compute():
    store, model = MemoryStore(), Model()
    cache = cache_of(store)
    go = asyncio.Event()

    async def fails() -> bytes:
        await go.wait()
        raise ValueError("the model's")

    leader = asyncio.create_task(ask(cache, fails))
    await until(lambda: store.asked)
    follower = asyncio.create_task(ask(cache, model))
    await until(lambda: cache.flights.followers == 1)
    go.set()
    with pytest.raises(ValueError, match="the model's"):
        await leader
    assert text_of(await follower) == "answer 1"
    await cache.close()


@pytest.mark.asyncio
async def test_a_follower_that_wants_younger_answers_is_not_told_an_old_one():
    now = 1000.0
    store, model = MemoryStore(), Model()
    cache = cache_of(store, now=lambda: now)
    await ask(cache, model)
    await until(lambda: store.entries)
    now += 100
    store.open.clear()
    leader = asyncio.create_task(ask(cache, model))
    await until(lambda: store.asked == 2)
    follower = asyncio.create_task(ask(cache, model, cache_control="max-age=10"))
    await until(lambda: cache.flights.followers == 1)
    store.open.set()
    assert text_of(await leader) == "answer 1"
    assert text_of(await follower) == "answer 2"
    await cache.close()


@pytest.mark.asyncio
async def test_an_answer_whose_reader_is_slow_is_not_waited_for_without_end(monkeypatch):
    store, model = MemoryStore(), Model()
    model.go.clear()
    cache = cache_of(store)
    leader = asyncio.create_task(ask(cache, model))
    await until(lambda: model.computed == 1)
    monkeypatch.setattr(flight, "FOLLOW_SECONDS", 0.01)
    follower = asyncio.create_task(ask(cache, model))
    await until(lambda: model.computed == 2)
    assert cache.flights.followers == 0
    model.go.set()
    assert [text_of(await each) for each in (leader, follower)] == ["answer 1", "answer 2"]
    await cache.close()


@pytest.mark.asyncio
async def test_requests_to_different_runs_at_once_are_computed_by_each():
    store, model = MemoryStore(), Model()
    model.go.clear()
    cache = cache_of(store)
    asked = [asyncio.create_task(ask(cache, model, run=run)) for run in ("r", "s")]
    await until(lambda: model.computed == 2)
    model.go.set()
    assert {text_of(each) for each in await asyncio.gather(*asked)} == {"answer 1", "answer 2"}
    await cache.close()


class SlowToWrite(MemoryStore):
    """Hangs in what it is told to put alone."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.writes = threading.Event(), threading.Event()

    def put(self, entry: Entry) -> bool:
        self.began.set()
        assert self.writes.wait(PATIENCE)
        return super().put(entry)


@pytest.mark.asyncio
async def test_a_store_that_is_slow_is_not_waited_for_once_for_each_answer(monkeypatch):
    monkeypatch.setattr(cache_module, "CLOSE_SECONDS", 0.01)
    store, model = SlowToWrite(), Model()
    cache = cache_of(store)
    for count in range(9):
        await ask(cache, model, fields={"seed": count})
    assert await asyncio.to_thread(store.began.wait, PATIENCE)
    closing = asyncio.create_task(cache.close())
    await until(lambda: len(cache._writes) == 1)  # the others are given up
    store.writes.set()
    await closing
    assert len(store.entries) == 1
