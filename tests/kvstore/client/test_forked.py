"""An embedded store belongs to the process that opened it: what its forked children do with it does nothing."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import answer_of, descriptors_below, in_child, start_child

import kvstore
from kvstore.errors import InUseError, UnavailableError

PAGE = 4096
LAYOUT = kvstore.Layout(model="forked", block_size=16, page_bytes=PAGE)
FORKS = int(os.environ.get("FORKS", "24"))


def hashes(first: int, count: int = 1) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(first, first + count)]


def payload(first: int, count: int = 1) -> np.ndarray:
    """What pages must hold, by their keys."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return np.repeat(numbers * np.uint64(0x9E3779B97F4A7C15), PAGE // 8).view(np.uint8).reshape(count, PAGE)


def store(pages: kvstore.Namespace, first: int, count: int = 1) -> kvstore.StoreResult:
    return pages.store(hashes(first, count), payload(first, count))


def wrong(pages: kvstore.Namespace, first: int, count: int = 1) -> tuple[int, int]:
    """Of pages that are loaded one by one, how many came, and how many of these are wrong."""
    came = bad = 0
    for number in range(first, first + count):
        into = np.zeros((1, PAGE), np.uint8)
        if pages.load(hashes(number), into):
            came += 1
            bad += not np.array_equal(into, payload(number))
    return came, bad


def url(folder: Path, arena: Path, **options: str) -> str:
    settings = {"arena": "2MiB", "disk_limit": "16MiB", "arena_dir": str(arena)} | options
    return f"embedded://{folder}?" + "&".join(f"{key}={value}" for key, value in settings.items())


@pytest.fixture
def folder(short_folder: Path) -> Path:
    return short_folder / "e"


@pytest.fixture
def arena(shm_folder: Path) -> Path:
    return shm_folder / "e"


@pytest.fixture
def client(folder: Path, arena: Path) -> Iterator[kvstore.Client]:
    with kvstore.connect(url(folder, arena)) as client:
        yield client


@pytest.fixture
def pages(client: kvstore.Client) -> kvstore.Namespace:
    return client.namespace(LAYOUT)


@pytest.fixture
def untouched(client: kvstore.Client, folder: Path, arena: Path) -> Callable[[], str]:
    """A digest of all that the parent has: it changes when somebody changes anything."""
    held = client._session.control._store

    def digest() -> str:
        said = hashlib.sha256()
        for path in sorted((*folder.rglob("*"), *arena.rglob("*"))):
            said.update(os.fsencode(path))
            if path.is_file():
                said.update(path.read_bytes())
        with held.write_back.writing:
            held.check_integrity()
        return said.hexdigest()

    return digest


_CALLS: dict[str, Callable[[kvstore.Client, kvstore.Namespace], Any]] = {
    "Client.namespace": lambda client, pages: client.namespace(LAYOUT),
    "Client.lookup": lambda client, pages: client.lookup([(pages, hashes(0, 4))]),
    "Client.flush": lambda client, pages: client.flush(),
    "Client.status": lambda client, pages: client.status(),
    "Client.explain": lambda client, pages: client.explain(pages.fingerprint, hashes(0, 4)),
    "Namespace.lookup": lambda client, pages: pages.lookup(hashes(0, 4)),
    "Namespace.store": lambda client, pages: store(pages, 100, 4),
    "Namespace.load": lambda client, pages: wrong(pages, 0, 4),
    "Namespace.prepare_store": lambda client, pages: pages.prepare_store(hashes(100, 4)),
    "Namespace.prepare_load": lambda client, pages: pages.prepare_load(hashes(0, 4)),
    "Namespace.borrow": lambda client, pages: pages.borrow(hashes(0, 4)),
    "Namespace.prefetch": lambda client, pages: pages.prefetch(hashes(0, 4)),
    "Namespace.touch": lambda client, pages: pages.touch(hashes(0, 4)),
    "Namespace.evict": lambda client, pages: pages.evict(hashes(0, 4)),
    "Namespace.pin": lambda client, pages: pages.pin(hashes(0, 4), 60),
    "Namespace.unpin": lambda client, pages: pages.unpin(hashes(0, 4)),
    "Namespace.clear": lambda client, pages: pages.clear(),
}
_NO_CALLS: dict[str, tuple[Callable[[kvstore.Client, kvstore.Namespace], Any], Any]] = {
    "Client.timeout": (lambda client, pages: client.timeout, 30.0),
    "Client.answered": (lambda client, pages: client.answered, True),
    "Client.arena": (lambda client, pages: client.arena, None),
    "Client.arena_units": (lambda client, pages: client.arena_units, None),
    "Client.lookup_here": (lambda client, pages: client.lookup_here([(pages, hashes(0, 4))]), None),
    "Client.close": (lambda client, pages: client.close(), None),
    "Namespace.count_lookup": (lambda client, pages: pages.count_lookup(4, {"arena": 4}), None),
    "Namespace.batch_pages": (lambda client, pages: pages.batch_pages, 128),
    "Namespace.statistics": (lambda client, pages: pages.statistics().stored, 8),
}


def test_every_public_method_is_tried_in_a_child() -> None:
    public = {
        f"{kind.__name__}.{name}"
        for kind in (kvstore.Client, kvstore.Namespace)
        for name in vars(kind)
        if not name.startswith("_")
    }
    assert public == _CALLS.keys() | _NO_CALLS.keys()


@pytest.mark.parametrize("name", _CALLS)
def test_a_childs_call_is_an_error_that_says_so(client, pages, untouched, name: str) -> None:
    store(pages, 0, 8)
    client.flush()
    before = untouched()
    error = in_child(lambda: _CALLS[name](client, pages))
    assert isinstance(error, UnavailableError)
    assert f"process {os.getpid()}, from which this one was forked" in str(error)
    assert untouched() == before
    assert wrong(pages, 0, 8) == (8, 0)


@pytest.mark.parametrize("name", _NO_CALLS)
def test_what_is_no_call_does_nothing_in_a_child(client, pages, untouched, name: str) -> None:
    store(pages, 0, 8)
    client.flush()
    before = untouched()
    call, expected = _NO_CALLS[name]
    assert in_child(lambda: call(client, pages)) == expected
    assert untouched() == before
    assert store(pages, 8, 4).stored == 4
    assert wrong(pages, 0, 12) == (12, 0)


def test_a_namespace_that_was_not_opened_yet_is_not_opened_by_a_child(client, untouched) -> None:
    lazy = client.namespace(kvstore.Layout(model="other", block_size=16, page_bytes=PAGE), lazy=True)
    before = untouched()
    assert isinstance(in_child(lambda: lazy.lookup(hashes(0))), UnavailableError)
    assert untouched() == before


def test_what_a_child_does_with_pending_pages_is_nothing(client, pages, untouched) -> None:
    """They were prepared by the parent, who goes on with them."""
    store(pages, 0, 4)
    client.flush()
    storing, loading = pages.prepare_store(hashes(4, 4)), pages.prepare_load(hashes(0, 4))
    for slot, page in zip(storing.pages, payload(4, 4), strict=True):
        slot[:] = page
    before = untouched()

    def spoil() -> tuple[int, str]:
        for slot in storing.pages:
            slot[:] = 255
        good = loading.complete()
        with pytest.raises(UnavailableError, match="was forked") as refused:
            storing.complete()
        return good, str(refused.value)

    def give_up() -> None:
        with storing, loading:
            pass

    assert in_child(spoil)[0] == 0, "what it has copied is to be thrown away"
    assert in_child(give_up) is None
    assert untouched() == before
    assert loading.complete() == 4
    assert storing.complete().stored == 4
    assert wrong(pages, 0, 8) == (8, 0)


def test_a_child_has_no_descriptor_and_no_mapping_of_it(client, pages, folder, arena) -> None:
    """What it has would outlive its parent: locks, memory, deleted segments."""
    store(pages, 0, 4)
    client.flush()
    view, below = client.arena, (str(folder), str(arena))
    assert len(descriptors_below(*below)) >= 6
    assert in_child(lambda: descriptors_below(*below)) == []
    assert in_child(lambda: int(view.sum())) == 0, "a view of the arena can be read, and is nobody's"
    assert view.any()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_descendants_may_have_stores_of_their_own(client, pages, short_folder, shm_folder, depth: int) -> None:
    """The parent's is in use meanwhile, as they are told; afterwards everybody finds what they stored."""
    store(pages, 0, 4)
    mine, parent = client.url, os.getpid()

    def live(left: int) -> list[tuple[int, int]]:
        inside = in_child(lambda: live(left - 1)) if left else []
        name = f"own{left}"
        with kvstore.connect(url(short_folder / name, shm_folder / name)) as own:
            space = own.namespace(LAYOUT)
            assert store(space, 50, 20).stored == 20
            own.flush()
            inside.append(wrong(space, 50, 20))
        with pytest.raises(InUseError, match=f"process {parent}"):
            kvstore.connect(mine)
        with pytest.raises(UnavailableError, match="forked"):
            store(pages, 20, 4)
        return inside

    assert in_child(lambda: live(depth - 1)) == [(20, 0)] * depth
    assert store(pages, 4, 4).stored == 4
    assert wrong(pages, 0, 8) == (8, 0)


def _of_multiprocessing(pages: kvstore.Namespace) -> str:
    try:
        store(pages, 60, 60)
    except UnavailableError as error:
        return str(error)
    return "stored"


_inherited: list[kvstore.Namespace] = []


def _with_inherited(number: int) -> str:
    return _of_multiprocessing(_inherited[0])


def test_children_of_multiprocessing(client, pages) -> None:
    """What it starts by a fork has the parent's client without anybody giving it."""
    store(pages, 0, 60)
    _inherited[:] = [pages]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        told = pool.map_async(_with_inherited, range(8))
        assert store(pages, 60, 60).stored == 60
        assert all("forked" in each for each in told.get(60))
    _inherited.clear()
    assert wrong(pages, 0, 120) == (120, 0)


def test_a_child_that_ends_as_python_does_takes_nothing_along(folder, arena) -> None:
    """Garbage collection, atexit and the interpreter's end, in the child and then in the parent."""
    script = f"""
        import atexit, gc, os, sys
        import numpy as np, kvstore
        client = kvstore.connect({url(folder, arena)!r})
        pages = client.namespace(kvstore.Layout(model="forked", block_size=16, page_bytes={PAGE}))
        pending = pages.prepare_store([b"y" * 32])
        pages.store([b"x" * 32], np.full({PAGE}, 7, np.uint8))
        atexit.register(client.close)
        if not os.fork():
            del pages, pending
            gc.collect()
            sys.exit(0)
        assert os.wait()[1] == 0
        into = np.zeros({PAGE}, np.uint8)
        assert pages.load([b"x" * 32], into) == 1 and (into == 7).all()
        for slot in pending.pages: slot[:] = 9
        assert pending.complete().stored == 1
        store = client._session.control._store
        with store.write_back.writing:  # or the write-back's own holds would be counted
            store.check_integrity()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    with kvstore.connect(url(folder, arena)) as again:
        assert again.namespace(LAYOUT).lookup([b"x" * 32]).prefix == 1


def test_the_folder_of_a_killed_parent_opens_while_its_children_live(folder, arena) -> None:
    script = f"""
        import os, time
        import numpy as np, kvstore
        client = kvstore.connect({url(folder, arena)!r})
        pages = client.namespace(kvstore.Layout(model="forked", block_size=16, page_bytes={PAGE}))
        pages.store([b"x" * 32], np.full({PAGE}, 7, np.uint8))
        if not os.fork():
            os.fork()
            os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    try:
        with pytest.raises(InUseError, match=f"process {parent.pid}"):
            kvstore.connect(url(folder, arena))
        parent.kill()
        parent.wait()
        with kvstore.connect(url(folder, arena)) as again:
            into = np.zeros(PAGE, np.uint8)
            assert again.namespace(LAYOUT).load([b"x" * 32], into) == 1
            assert (into == 7).all()
        for child in children:
            os.kill(child, 0)  # they are still there
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.stdout.close()


@pytest.mark.parametrize("what", ["guard", "session", "namespace", "store", "writing"])
def test_a_lock_that_another_thread_held_holds_no_child(client, pages, what: str) -> None:
    """Its holder does not exist there."""
    store(pages, 0, 4)
    embedded = client._session.control
    lock = {
        "guard": embedded._guard,
        "session": client._session._lock,
        "namespace": pages._moved._lock,
        "store": embedded._store._state.lock,
        "writing": embedded._store.write_back.writing,
    }[what]
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            assert go_on.wait(60)

    def use() -> int:
        refused = 0
        for call in _CALLS.values():
            try:
                call(client, pages)
            except UnavailableError:
                refused += 1
        for call, _ in _NO_CALLS.values():
            call(client, pages)
        embedded._store.close()
        del call
        gc.collect()
        return refused

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        assert in_child(use) == len(_CALLS)
    finally:
        go_on.set()
        thread.join()
    assert wrong(pages, 0, 4) == (4, 0)


@pytest.mark.torn
def test_children_that_store_and_load_beside_their_parent(client, pages, short_folder, shm_folder) -> None:
    """While threads of the parent store, load, flush, and open and close another store; FORKS says how often."""
    stop = threading.Event()
    failures: list[str] = []
    last, compared = [0], [0]

    def keep(work: Callable[[int], None]) -> threading.Thread:
        def run() -> None:
            try:
                number = 0
                while not stop.wait(0.01):  # the thread that forks has its turn
                    work(number)
                    number += 1
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(repr(error))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def storing(number: int) -> None:
        first = 4 * number
        store(pages, first, 4)
        last[0] = first

    def loading(number: int) -> None:
        came, bad = wrong(pages, max(0, last[0] - 40), 20)
        compared[0] += came
        assert not bad

    def flushing(number: int) -> None:
        client.flush()

    def opening(number: int) -> None:
        with kvstore.connect(url(short_folder / "other", shm_folder / "other")) as other:
            space = other.namespace(LAYOUT)
            store(space, 0, 20)
            assert not wrong(space, 0, 20)[1]

    def child(number: int) -> str:
        told = [in_child(lambda: _of_multiprocessing(pages))] if number % 16 == 1 else []
        told.append(_of_multiprocessing(pages))
        with pytest.raises(UnavailableError):
            wrong(pages, 0, 4)
        if number % 8 == 0:
            name = f"own{number % 3}"
            with kvstore.connect(url(short_folder / name, shm_folder / name)) as own:
                space = own.namespace(LAYOUT)
                store(space, 1000 * number, 30)
                own.flush()
                assert not wrong(space, 0, 30)[1]
                assert wrong(space, 1000 * number, 30) == (30, 0)
            gc.collect()
        client.close()
        assert all("forked" in each for each in told), told
        return "fine"

    threads = [keep(work) for work in (storing, loading, flushing, opening)]
    try:
        for number in range(0, FORKS, 2):
            pair = [start_child(lambda number=each: child(number)) for each in (number, number + 1)]
            for each in pair:
                answer = answer_of(*each)
                assert answer == "fine", answer
            assert not failures, failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    everything = last[0] + 4
    with client._session.control._store.write_back.writing:
        client._session.control._store.check_integrity()
    came, bad = wrong(pages, 0, everything)
    print(f"{FORKS} children beside {everything} pages stored and {compared[0] + came} loaded, {bad} of them wrong")
    assert (came > 0, bad) == (True, 0)
    client.close()
    with kvstore.connect(client.url) as again:
        came, bad = wrong(again.namespace(LAYOUT), 0, everything)
        assert (came > 0, bad) == (True, 0)
