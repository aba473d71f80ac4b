"""The asyncio client: the synchronous one's methods, a free loop, and nothing behind an await that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aio_clients import Gate, public
from blocking_aio import LoopThread
from forked import in_child

import kvstore
import kvstore.aio
from kvstore.aio.operations import MOST_BEGUN, MOST_ENDING
from kvstore.arena.epochs import LINE_WORDS
from kvstore.client.paths.bulk.pool import BulkPool
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.shm.mapped_summary import MappedSummary
from kvstore.errors import DeadlineError, InvalidRequestError, ResourceError, UnavailableError

ROOT = Path(__file__).parents[3]
PAGE = 5000
SPACE = kvstore.Layout(model="awaited", block_size=16, page_bytes=PAGE)
FAR_AWAY = 60.0
"""Seconds of a timeout that nothing here waits for."""


def hashes(count: int, name: int = 0) -> list[bytes]:
    return kvstore.hash_blocks(np.arange(count * 16) % 50_000 + name, 16)


def payload(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, PAGE), dtype=np.uint8)


class TestSameMethods:
    """A new method of one, or a new argument, can't be forgotten in the other."""

    def test_of_each_class(self, start_node) -> None:
        url = f"unix://{start_node(disk_limit=0).config.socket}"

        async def main() -> None:
            async with kvstore.aio.connect(url) as awaited:
                pages = await awaited.namespace(SPACE)
                async with pages.prepare_store(hashes(1)) as storing, pages.prepare_load(hashes(1)) as loading:
                    with kvstore.connect(url) as client:
                        space = client.namespace(SPACE)
                        with space.prepare_store(hashes(1)) as store, space.prepare_load(hashes(1)) as load:
                            assert public(awaited) == public(client)
                            assert public(pages) == public(space) | {"blocking"}
                            assert public(storing) == public(store) - {"observe"}
                            assert public(loading) == public(load) - {"observe"}

        asyncio.run(main())

    @pytest.mark.parametrize(
        ("awaited", "blocking"),
        [
            (kvstore.aio.AsyncClient, kvstore.Client),
            (kvstore.aio.AsyncNamespace, kvstore.Namespace),
            (kvstore.aio.AsyncPendingStore, PendingStore),
            (kvstore.aio.AsyncPendingLoad, PendingLoad),
        ],
    )
    def test_with_the_same_arguments(self, awaited: type, blocking: type) -> None:
        for name in public(blocking) & public(awaited):
            mine, theirs = inspect.getattr_static(awaited, name), inspect.getattr_static(blocking, name)
            if inspect.isfunction(mine) and inspect.isfunction(theirs):
                assert arguments(mine) == arguments(theirs), name
            elif name == "batch_pages":  # a lazy namespace's asks the node
                assert list(arguments(mine)) == ["self"]
            else:
                assert type(mine) is type(theirs), name

    def test_of_connect(self) -> None:
        mine, theirs = arguments(kvstore.aio.connect), arguments(kvstore.connect)
        assert mine | {"timeout": None} == theirs | {"timeout": None}  # tests have another one


def arguments(function: Callable[..., Any]) -> dict[str, tuple[object, object]]:
    return {name: (each.kind, each.default) for name, each in inspect.signature(function).parameters.items()}


def test_importing_kvstore_leaves_it_out_until_it_is_asked_for() -> None:
    program = "import sys, kvstore; assert 'kvstore.aio' not in sys.modules; kvstore.aio.connect; print('as asked')"
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "as asked\n", done.stderr


@pytest.fixture
def url(start_node) -> str:
    return f"unix://{start_node(disk_limit=0).config.socket}"


@pytest.fixture
def gate(python_core, monkeypatch) -> Iterator[Gate]:
    """Holds loads up in the middle of a page's copy."""
    gate = Gate()
    monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.copy_bytes", gate.copy)
    yield gate
    gate.open.set()


def run(url: str, work: Callable[[kvstore.aio.AsyncClient, kvstore.aio.AsyncNamespace], Awaitable[None]]) -> None:
    """Do ``work`` with a client, and a namespace in which four pages are stored."""

    async def main() -> None:
        async with kvstore.aio.connect(url, timeout=FAR_AWAY) as client:
            pages = await client.namespace(SPACE)
            assert (await pages.store(hashes(4), payload(4))).refused == 0
            await work(client, pages)

    asyncio.run(main())


async def held_up(gate: Gate, pages: kvstore.aio.AsyncNamespace, into: np.ndarray) -> asyncio.Task[int]:
    """A load that stands before the gate."""
    task = asyncio.create_task(pages.load(hashes(1), into))
    await asyncio.to_thread(gate.begun.acquire)
    return task


class TestLoop:
    def test_it_is_free_while_pages_are_copied(self, url, gate) -> None:
        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            into = np.zeros((1, PAGE), np.uint8)
            task = await held_up(gate, pages, into)
            assert (await client.status()).pid == os.getpid()
            assert (await pages.lookup(hashes(4))).prefix == 4
            assert not task.done()
            gate.open.set()
            assert await task == 1
            assert np.array_equal(into, payload(4)[:1])

        run(url, work)

    def test_what_needs_no_wait_is_answered_on_it(self, url) -> None:
        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            assert client.lookup_here([(pages, hashes(4))]) == [await pages.lookup(hashes(4))]
            assert pages.statistics().stored == 4
            assert client.arena is not None
            assert client.timeout == FAR_AWAY

        run(url, work)


class TestCancelled:
    def test_it_has_let_go_of_the_buffer_when_the_await_ends(self, url, gate) -> None:
        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            into = np.zeros((1, PAGE), np.uint8)
            task = await held_up(gate, pages, into)
            for _ in range(3):
                task.cancel()
                await client.status()
                assert not task.done(), "a thread still writes to the buffer"
            gate.open.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            into[:] = 7
            await client.status()
            assert (into == 7).all()
            assert pages.statistics().loaded in ({}, {"arena": 1})

        run(url, work)

    def test_its_time_limit_and_its_group_end_behind_it(self, url, gate) -> None:
        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            into = np.zeros((2, PAGE), np.uint8)
            opening = threading.Timer(0.05, gate.open.set)
            opening.start()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await pages.load(hashes(1), into[:1])
            assert gate.open.is_set()
            opening.join()
            gate.open.clear()
            failing = asyncio.Event()

            async def fail() -> None:
                await failing.wait()
                raise ZeroDivisionError

            async def fail_when_begun() -> None:
                gate.begun.acquire()  # of the first load
                await asyncio.to_thread(gate.begun.acquire)
                failing.set()
                for _ in range(20):
                    await asyncio.sleep(0)
                gate.open.set()

            opens = asyncio.create_task(fail_when_begun())
            with pytest.raises(ExceptionGroup) as failed:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
                    group.create_task(pages.load(hashes(1), into[1:]))
            assert [type(each) for each in failed.value.exceptions] == [ZeroDivisionError]
            assert gate.open.is_set()
            await opens

        run(url, work)

    @pytest.mark.parametrize("act", ["prepare_store", "prepare_load", "borrow"])
    def test_what_it_would_have_lent_is_given_up(self, start_node, monkeypatch, eventually, act) -> None:
        monkeypatch.setattr("kvstore.client.paths.shm.preallocation.LEAST_BYTES", 1 << 40)
        node = start_node(disk_limit=0)

        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            async def lent() -> Any:
                return await getattr(pages, act)(hashes(4, int(act == "prepare_store")))

            cancelled = 0
            for turns in range(6):
                task = asyncio.create_task(lent())
                await asyncio.sleep(0)
                [operation] = client._operations._under_way
                if turns < 3:  # the pages are lent, and nobody knows that yet
                    eventually(lambda: operation.answer is not None)  # noqa: B023
                for _ in range(turns % 3):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await (await task).__aexit__(None, None, None)
                except asyncio.CancelledError:
                    cancelled += 1
                assert not client._operations._kept
                leases, lines = node.store._state.leases, node.store._state.readers._lines
                assert not leases.stores
                assert not leases.loads
                assert not any(lines[::LINE_WORDS]), "announced still"
            assert cancelled >= 3

        run(f"unix://{node.config.socket}", work)


class TestTurns:
    def test_the_ninth_waits_and_leaves_nothing_when_it_is_cancelled(self, url, gate) -> None:
        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            lent = await pages.borrow(hashes(4))
            into = np.zeros((MOST_BEGUN, PAGE), np.uint8)
            held = [await held_up(gate, pages, into[place : place + 1]) for place in range(MOST_BEGUN)]
            came: list[int] = []

            async def turn(number: int) -> None:
                await pages.lookup(hashes(1))
                came.append(number)

            waiting = [asyncio.create_task(turn(number)) for number in range(5)]
            await asyncio.sleep(0)
            waiting[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting.pop(1)
            client.timeout = 0.01
            with pytest.raises(DeadlineError, match=f"{MOST_BEGUN} operations were under way"):
                await client.status()
            client.timeout = FAR_AWAY
            assert await lent.complete() == 4, "what ends something does not wait for its turn"
            assert not came
            gate.open.set()
            assert await asyncio.gather(*held) == [1] * MOST_BEGUN
            await asyncio.gather(*waiting)
            assert sorted(came) == [0, 2, 3, 4]
            assert client._operations._beginnings._value == MOST_BEGUN

        run(url, work)

    def test_what_gets_no_turn_to_end_is_given_up_all_the_same(self, start_node) -> None:
        node = start_node(disk_limit=0)
        leases = node.store._state.leases

        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            await pages.store(hashes(1), payload(1))
            for begin in (lambda: pages.prepare_store(hashes(1, 5)), lambda: pages.prepare_load(hashes(1))):
                begun = await begin()
                for _ in range(MOST_ENDING):
                    await client._operations._endings.acquire()
                begun._timeout = 1.0
                with pytest.raises(DeadlineError):
                    async with begun:
                        pass
                for operation in tuple(client._operations._under_way):
                    await asyncio.shield(operation.over)
                assert not client._operations._endings._value, "it waited for a turn"
                assert not client._operations._kept
                for _ in range(MOST_ENDING):
                    client._operations._endings.release()
                assert not leases.stores
                assert not leases.loads
                assert not any(node.store._state.readers._lines[::LINE_WORDS])

        run(f"unix://{node.config.socket}", work)

    def test_they_come_in_order(self) -> None:
        async def main() -> None:
            operations = kvstore.aio.operations.Operations("nobody")
            gates = [threading.Event() for _ in range(MOST_BEGUN + 4)]
            begun: list[int] = []

            def do(number: int) -> None:
                begun.append(number)
                assert gates[number].wait(60.0)

            tasks = [asyncio.create_task(operations.run(partial(do, number), 60.0)) for number in range(len(gates))]
            for number in range(len(gates)):
                gates[number].set()
                await tasks[number]
            assert begun[MOST_BEGUN:] == [*range(MOST_BEGUN, len(gates))]
            await operations.close(lambda: None, 60.0)

        asyncio.run(main())

    def test_the_wait_for_a_turn_counts(self, url, gate) -> None:
        """``timeout`` is that of the whole method."""

        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            into = np.zeros((MOST_BEGUN, PAGE), np.uint8)
            held = [await held_up(gate, pages, into[place : place + 1]) for place in range(MOST_BEGUN)]
            session, left = pages.blocking._handle.session, []
            task = asyncio.create_task(client._operations.run(lambda: left.append(session.timeout), 60.0))
            await asyncio.wait([task], timeout=0.02)
            gate.open.set()
            await task
            assert 0.0 < left[0] <= 60.0 - 0.02, f"not {FAR_AWAY}"
            await asyncio.gather(*held)

        run(url, work)


class TestHungNode:
    """A node that does not answer, and a timeout that nobody waits for."""

    @pytest.fixture(autouse=True)
    def without_a_summary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The node must be asked, as an older one: with a summary of its disk these pages are a miss without a call."""
        monkeypatch.setattr(MappedSummary, "begin", lambda self: None)

    @pytest.mark.parametrize("scheme", ["unix", "kv", "grpc"])
    def test_a_cancellation_ends_the_wait_for_it(self, node_process, monkeypatch, scheme) -> None:
        if scheme == "grpc":
            monkeypatch.setattr(BulkPool, "lent", lambda self, deadline: contextlib.nullcontext())
        node = node_process()

        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            into = np.zeros((4, PAGE), np.uint8)
            begun: list[tuple[str, Callable[[], Coroutine[Any, Any, object]]]] = [
                ("status", client.status),
                ("lookup", lambda: pages.lookup(hashes(4, 1))),
                ("store", lambda: pages.store(hashes(4, 2), payload(4, 2))),
                ("load", lambda: pages.load(hashes(4, 3), into)),
                ("prepare_store", lambda: pages.prepare_store(hashes(4, 4))._made),
                ("prepare_load", lambda: pages.prepare_load(hashes(4))._made),
                ("flush", client.flush),
                ("namespace", lambda: client.namespace(kvstore.Layout(model="b", block_size=16, page_bytes=64))),
            ]
            reserved = await pages.prepare_store(hashes(4, 5))
            node.pause()
            try:
                for name, begin in begun:
                    task = asyncio.create_task(begin())
                    await asyncio.wait([task], timeout=0.02)
                    [operation] = client._operations._under_way
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert not client._operations._under_way, name
                    assert time.monotonic() < operation.work.deadline, f"{name} waited for its deadline"
                together = [asyncio.create_task(begin()) for _, begin in begun * 2]
                await asyncio.wait(together, timeout=0.02)
                for task in together:
                    task.cancel()
                assert all(
                    isinstance(each, asyncio.CancelledError)
                    for each in await asyncio.gather(*together, return_exceptions=True)
                )
                ending = asyncio.create_task(reserved.complete())
                await asyncio.wait([ending], timeout=0.02)
                ending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await ending
            finally:
                node.resume()
            for name in range(6, 12):
                assert (await pages.store(hashes(4, name), payload(4, name))).stored == 4
                assert await pages.load(hashes(4, name), into) == 4
                assert np.array_equal(into, payload(4, name))
            assert await pages.load(hashes(4), into) == 4
            assert np.array_equal(into, payload(4))

        run(node.url if scheme == "unix" else node.kv_url, work)

    @pytest.mark.parametrize("scheme", ["unix", "kv"])
    def test_closing_ends_what_is_under_way(self, node_process, scheme) -> None:
        node = node_process()

        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            into = np.zeros((4, PAGE), np.uint8)
            node.pause()
            try:
                tasks = [
                    asyncio.create_task(client.status()),
                    asyncio.create_task(pages.load(hashes(4, 3), into)),
                    asyncio.create_task(pages.store(hashes(4, 2), payload(4, 2))),
                ]
                await asyncio.wait(tasks, timeout=0.02)
                await client.close()
                for each in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(each, UnavailableError)
                with pytest.raises(UnavailableError, match="is closed"):
                    await client.status()
            finally:
                node.resume()

        run(node.url if scheme == "unix" else node.kv_url, work)

    @pytest.mark.parametrize("signals", [1, 2])
    def test_an_interrupt_ends_the_program(self, node_process, signals) -> None:
        node = node_process()
        program = f"""
import asyncio, numpy, kvstore.aio

async def main():
    async with kvstore.aio.connect({node.url!r}, timeout={FAR_AWAY}) as client:
        pages = await client.namespace(kvstore.Layout(model="awaited", block_size=16, page_bytes={PAGE}))
        print("connected", flush=True)
        input()
        hashes = kvstore.hash_blocks(range(64), 16)
        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(client.status())
                group.create_task(pages.load(hashes, bytearray(4 * {PAGE})))
            print("under way", flush=True)

asyncio.run(main())
"""
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        with subprocess.Popen(
            [sys.executable, "-X", "dev", "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "connected\n"
            node.pause()
            try:
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == "under way\n"
                for _ in range(signals):
                    child.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(0.05)
                _, said = child.communicate(timeout=60.0)
            finally:
                node.resume()
                child.kill()
        assert "KeyboardInterrupt" in said
        unwanted = ["was destroyed", "never awaited", "was not closed", "Exception ignored"]
        if signals == 1:  # the second one is raised wherever it comes, and asyncio says that of the task it hits
            unwanted.append("never retrieved")
        for line in unwanted:
            assert line not in said


class TestLoops:
    def test_a_client_is_one_loops(self, url) -> None:
        thread = LoopThread()
        try:
            client = thread.connect(url).awaited

            async def elsewhere() -> None:
                with pytest.raises(InvalidRequestError, match="another event loop's: connect one in each"):
                    await client.status()

            asyncio.run(elsewhere())
        finally:
            thread.stop()

        async def afterwards() -> None:
            assert (await client.status()).pid == os.getpid()
            await client.close()

        asyncio.run(afterwards())

    def test_a_loop_that_is_closed_under_an_operation_waits_for_its_end(self, url, gate) -> None:
        loop = asyncio.new_event_loop()
        into = np.zeros((1, PAGE), np.uint8)

        async def begin() -> tuple[kvstore.aio.AsyncClient, kvstore.aio.AsyncNamespace]:
            client = await kvstore.aio.connect(url, timeout=FAR_AWAY)
            pages = await client.namespace(SPACE)
            await pages.store(hashes(4), payload(4))
            return client, pages

        client, pages = loop.run_until_complete(begin())
        load = pages.load(hashes(1), into)
        task = loop.create_task(load)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(asyncio.sleep(0))
        gate.begun.acquire()
        loop.close()
        [operation] = client._operations._under_way

        def open_when_cut() -> None:
            while not operation.work.is_cut:
                pass
            gate.open.set()

        opening = threading.Thread(target=open_when_cut)
        opening.start()
        load.close()
        assert gate.open.is_set(), "it ended before the copy"
        into[:] = 7
        opening.join()

        async def afterwards() -> None:
            assert await pages.load(hashes(4), np.zeros((4, PAGE), np.uint8)) == 4
            assert (into == 7).all()
            await client.close()

        asyncio.run(afterwards())

    def test_nothing_is_left_of_one_that_is_closed(self, url, eventually) -> None:
        def threads() -> list[str]:
            return [each.name for each in threading.enumerate() if each.name.startswith("kvstore-aio")]

        async def main() -> None:
            client = await kvstore.aio.connect(url)
            pages = await client.namespace(SPACE)
            lent = await pages.borrow(hashes(2))
            await asyncio.gather(*(client.status() for _ in range(20)))
            assert threads()
            await client.close()
            await client.close()
            assert await lent.complete() == 0
            for call in (client.status, partial(pages.lookup, hashes(1)), partial(client.namespace, SPACE)):
                with pytest.raises(UnavailableError, match="is closed"):
                    await call()

        asyncio.run(main())
        eventually(lambda: not threads())

    def test_one_that_is_not_closed_says_so_and_keeps_no_threads(self, start_node, eventually) -> None:
        url = f"kv://127.0.0.1:{start_node().port}"
        gc.collect()  # of others

        async def main() -> None:
            client = await kvstore.aio.connect(url)
            await client.status()

        with pytest.warns(ResourceWarning, match=f"the client of {url} was not closed"):
            asyncio.run(main())
            gc.collect()
        eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("kvstore-aio")])

    @pytest.mark.parametrize("scheme", ["unix", "kv"])
    def test_a_forked_child_has_loop_threads_and_connections_of_its_own(self, start_node, scheme) -> None:
        node = start_node(disk_limit=0)

        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            into = np.zeros((4, PAGE), np.uint8)
            storing = await pages.prepare_store(hashes(4, 1))

            async def child() -> bool:
                with pytest.raises(UnavailableError, match="begun by process"):
                    await storing.complete()
                right = await pages.load(hashes(4), into) == 4 and np.array_equal(into, payload(4))
                await asyncio.gather(*(client.status() for _ in range(20)))
                await client.close()
                return right

            assert in_child(lambda: asyncio.run(child())) is True
            for page in storing.pages:
                assert page is not None
                page[:] = 7
            assert (await storing.complete()).stored == 4
            assert await pages.load(hashes(4), into) == 4

        run(f"unix://{node.config.socket}" if scheme == "unix" else f"kv://127.0.0.1:{node.port}", work)


class TestErrors:
    def test_an_operation_that_gets_no_thread_is_never_done(self, monkeypatch) -> None:
        """Though it lies in the queue of the threads that there are."""

        async def main() -> None:
            operations = kvstore.aio.operations.Operations("nobody")
            going, begun = threading.Event(), threading.Event()

            def hold() -> None:
                begun.set()
                assert going.wait(60.0)

            def no_more(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            held = asyncio.create_task(operations.run(hold, 60.0))
            await asyncio.to_thread(begun.wait)
            done: list[int] = []
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", no_more)
                with pytest.raises(ResourceError, match="no thread"):
                    await operations.run(partial(done.append, 1), 60.0)
            going.set()
            await held
            await operations.run(partial(done.append, 2), 60.0)
            assert done == [2]
            await operations.close(lambda: None, 60.0)

        asyncio.run(main())

    def test_arguments_are_refused_as_by_the_synchronous_client(self, url) -> None:
        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            with pytest.raises(InvalidRequestError, match="31 bytes"):
                await pages.lookup([bytes(31)])
            with pytest.raises(InvalidRequestError, match="has 1 bytes"):
                await pages.store(hashes(1), b"1")
            with pytest.raises(InvalidRequestError, match="can't be written to"):
                await pages.load(hashes(1), bytes(PAGE))
            with pytest.raises(InvalidRequestError):
                async with kvstore.aio.connect("http://nowhere"):
                    pass

        run(url, work)

    def test_an_error_keeps_nothing_of_the_callers(self, url) -> None:
        class Kept(bytearray):
            pass

        async def work(client: kvstore.aio.AsyncClient, pages: kvstore.aio.AsyncNamespace) -> None:
            import weakref

            buffer = Kept(PAGE)
            gone = weakref.ref(buffer)
            gc.disable()
            try:
                with contextlib.suppress(InvalidRequestError):
                    await pages.load([bytes(31)], buffer)
                del buffer
                await client.status()
                assert gone() is None
            finally:
                gc.enable()

        run(url, work)
