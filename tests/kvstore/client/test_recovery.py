"""The node is killed and comes back; its clients go on without their user doing anything."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import DeadlineError, LimitExceededError, UnavailableError

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["unix", "kv"])
def scheme(request) -> str:
    return request.param


def url_of(node, scheme: str) -> str:
    return node.url if scheme == "unix" else node.kv_url


def retried(call):
    """The call's answer once the node can be reached again; a client may need a moment to notice."""

    def attempt() -> bool:
        try:
            attempt.answer = call()
        except UnavailableError:
            return False
        return True

    return attempt


def test_a_lazy_namespace_is_opened_when_it_is_used_and_the_node_is_there(
    node_process, layout, hashes, payload, eventually
):
    node = node_process(ready=False)
    with kvstore.connect(node.url) as client:
        pages = client.namespace(layout, lazy=True)
        assert pages.fingerprint == layout.fingerprint
        for call in (lambda: pages.batch_pages, lambda: pages.lookup(hashes(1)), lambda: pages.borrow(hashes(1))):
            with pytest.raises(UnavailableError):
                call()
        node.start()
        eventually(retried(lambda: pages.store(hashes(2), payload(2))))
        assert pages.lookup(hashes(3)).prefix == 2


class TestBetweenCalls:
    def test_pages_and_clients_outlive_a_killed_node(self, node_process, scheme, layout, hashes, payload, eventually):
        node = node_process(disk_limit="0")
        data = payload(8)
        with kvstore.connect(url_of(node, scheme)) as client:
            pages = client.namespace(layout)
            pages.store(hashes(8), data)
            instance = client.status().instance
            for _ in range(2):
                node.kill()
                into = np.zeros_like(data)
                if scheme == "unix":  # what is in the arena needs no node
                    assert pages.lookup(hashes(8)).prefix == 8
                    assert pages.load(hashes(8), into) == 8
                    assert np.array_equal(into, data)
                for call in (client.status, lambda: pages.touch(hashes(8)), lambda: pages.store(hashes(1), data[:1])):
                    with pytest.raises(UnavailableError):
                        call()
                node.start()
                assert ", 8 pages kept" in node.ready_line
                look = retried(lambda: pages.lookup(hashes(8)))
                eventually(look)
                assert look.answer.tiers == ("arena",) * 8
                into = np.zeros_like(data)
                assert pages.load(hashes(8), into) == 8
                assert np.array_equal(into, data)
            assert pages.store(hashes(9), payload(9)) == kvstore.StoreResult(stored=1, present=8)
            assert client.status().instance != instance

    def test_a_remade_arena_is_mapped_anew(self, node_process, scheme, layout, hashes, payload, eventually):
        """Another size is another arena: what was on disk is found again, and the client uses the new mapping."""
        node = node_process()
        data = payload(8)
        with kvstore.connect(url_of(node, scheme)) as client:
            pages = client.namespace(layout)
            pages.store(hashes(8), data)
            client.flush()
            batch = pages.batch_pages
            for size in ("1MiB", "32MiB"):
                node.kill()
                node.options["arena"] = size
                node.start()
                look = retried(lambda: pages.lookup(hashes(8)))
                eventually(look)
                assert look.answer.tiers == ("disk",) * 8
                into = np.zeros_like(data)
                assert pages.load(hashes(8), into) == 8
                assert np.array_equal(into, data)
                many = payload(2 * batch, seed=5)
                result = pages.store(hashes(2 * batch, name=77), many)
                assert result.stored + result.present + result.refused == 2 * batch
                assert result.stored + result.present >= 32, "batches of the old size are too large for the new arena"
                assert pages.batch_pages < batch or size == "32MiB"
                if scheme == "unix":
                    assert client.arena.nbytes == int(size.removesuffix("MiB")) << 20
                with pytest.raises(LimitExceededError, match=f"limit is {pages.batch_pages}"):
                    pages.prepare_store(hashes(pages.batch_pages + 1))

    def test_a_node_that_forgot_everything(self, node_process, scheme, layout, hashes, payload, eventually):
        node = node_process(disk_limit="0")
        with kvstore.connect(url_of(node, scheme)) as client:
            pages = client.namespace(layout)
            pages.store(hashes(8), payload(8))
            node.kill()
            for path in sorted(node.arena_folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            node.start()
            look = retried(lambda: pages.lookup(hashes(8)))
            eventually(look)
            assert look.answer.prefix == 0
            assert pages.store(hashes(8), payload(8)).stored == 8

    def test_a_node_whose_arena_moved(self, node_process, layout, hashes, payload, shm_folder, eventually):
        node = node_process()
        with kvstore.connect(node.url) as client:
            pages = client.namespace(layout)
            pages.store(hashes(8), payload(8))
            client.flush()
            node.kill()
            node.options["arena-dir"] = shm_folder / "elsewhere"
            node.start()
            stored = retried(lambda: pages.store(hashes(9), payload(9)))
            eventually(stored)
            assert stored.answer == kvstore.StoreResult(stored=1, present=8)
            into = np.zeros((9, 5000), np.uint8)
            assert pages.load(hashes(9), into) == 9
            assert np.array_equal(into, payload(9))
            status = client.status()
            assert status.arena_directory == str(shm_folder / "elsewhere")
            assert status.clients == 1, "the pages went through the new mapping"


class TestDuringCalls:
    def test_killed_between_prepare_and_complete_of_a_store(
        self, node_process, scheme, layout, hashes, payload, eventually
    ):
        node = node_process(disk_limit="0")
        with kvstore.connect(url_of(node, scheme)) as client:
            pages = client.namespace(layout)
            pages.store(hashes(2), payload(2))
            storing, given_up = pages.prepare_store(hashes(4, name=1)), pages.prepare_store(hashes(4, name=2))
            lost = pages.prepare_store(hashes(4, name=3))
            node.kill()
            with pytest.raises(UnavailableError):
                lost.complete()
            node.start()
            eventually(retried(client.status))
            for page in storing.pages:
                page[:] = 7
            assert storing.complete() == kvstore.StoreResult(refused=4)
            given_up.abort()
            for name in (1, 2, 3):
                assert pages.lookup(hashes(4, name=name)).prefix == 0
            # The slots of the earlier node's reservations are free again, and only those.
            eventually(lambda: client.status().tier("arena").used_bytes == 2 * 8192)
            assert pages.lookup(hashes(2)).prefix == 2
            assert pages.store(hashes(4, name=1), payload(4)).stored == 4

    def test_killed_between_prepare_and_complete_of_a_load(
        self, node_process, scheme, layout, hashes, payload, eventually
    ):
        node = node_process(disk_limit="0")
        data = payload(4)
        with kvstore.connect(url_of(node, scheme)) as client:
            pages = client.namespace(layout)
            pages.store(hashes(4), data)
            loading, late = pages.prepare_load(hashes(4)), pages.prepare_load(hashes(4))
            node.kill()
            expected = 0 if scheme == "unix" else 4  # streams: the copies were whole before
            assert loading.complete() == expected
            assert [page.tobytes() for page in late.pages] == [page.tobytes() for page in data], "it stays mapped"
            node.start()
            eventually(retried(client.status))
            assert late.complete() == expected
            into = np.zeros_like(data)
            assert pages.load(hashes(4), into) == 4
            assert np.array_equal(into, data)

    def test_a_slot_of_a_live_client_is_nobody_elses(self, node_process, layout, hashes, payload, eventually):
        """The node is restarted, and a client goes on writing into what the earlier node gave it."""
        node = node_process(arena="1MiB", disk_limit="0")
        with kvstore.connect(node.url) as slow, kvstore.connect(node.url) as fast:
            storing = slow.namespace(layout).prepare_store(hashes(16))
            node.kill()
            node.start()
            pages = fast.namespace(layout)
            for number in range(8):  # the whole arena, several times
                data = payload(32, seed=number)
                pages.store(hashes(32, name=number * 1000), data)
                for page in storing.pages:
                    page[:] = 0xEE
                into = np.zeros_like(data)
                loaded = pages.load(hashes(32, name=number * 1000), into)
                assert loaded
                assert np.array_equal(into[:loaded], data[:loaded]), "bytes of the slow client are in these pages"
            assert storing.complete().stored == 0
            full = retried(lambda: fast.status().tier("arena").used_bytes)
            eventually(lambda: full() and full.answer == fast.status().tier("arena").pages * 8192)

    def test_threads_go_on_while_the_node_is_killed_again_and_again(
        self, node_process, scheme, layout, hashes, payload, eventually
    ):
        node = node_process(disk_limit="0")
        stop = threading.Event()
        acknowledged: dict[int, list[int]] = {number: [] for number in range(3)}
        failures: list[BaseException] = []

        with kvstore.connect(url_of(node, scheme)) as client:
            pages = client.namespace(layout)

            def work(number: int) -> None:
                turn = 0
                while not stop.is_set():
                    turn = (turn + 1) % 25
                    name = number * 1000 + turn
                    try:
                        result = pages.store(hashes(4, name=name), payload(4, seed=name))
                        if not result.refused:
                            acknowledged[number].append(name)
                        into = np.zeros((4, 5000), np.uint8)
                        loaded = pages.load(hashes(4, name=name), into)
                        assert np.array_equal(into[:loaded], payload(4, seed=name)[:loaded])
                    except (UnavailableError, DeadlineError):
                        pass
                    except BaseException as error:
                        failures.append(error)
                        raise

            threads = [threading.Thread(target=work, args=(number,)) for number in acknowledged]
            for thread in threads:
                thread.start()
            for _ in range(4):
                before = {number: len(names) for number, names in acknowledged.items()}
                eventually(
                    lambda before=before: (
                        failures or all(len(acknowledged[number]) > count + 2 for number, count in before.items())
                    ),
                    "stores go on after a restart",
                )
                node.kill()
                node.start()
            stop.set()
            for thread in threads:
                thread.join()
            assert not failures
            eventually(retried(client.status))
            for name in {name for names in acknowledged.values() for name in names}:
                into = np.zeros((4, 5000), np.uint8)
                assert pages.load(hashes(4, name=name), into) == 4
                assert np.array_equal(into, payload(4, seed=name))
            eventually(lambda: client.status().tier("arena").used_bytes == client.status().tier("arena").pages * 8192)


CLIENT = """
import json, sys, time
import numpy as np
import kvstore

def answer(value):
    print(json.dumps(value), flush=True)

client = kvstore.connect(sys.argv[1], timeout=30.0)
pages = client.namespace(kvstore.Layout(model="tiny", block_size=16, page_bytes=5000))
pending = []
for line in sys.stdin:
    command, name, count = json.loads(line)
    hashes = kvstore.hash_blocks(np.arange(count * 16) % 50_000 + name, 16)
    data = np.full((count, 5000), name % 256, np.uint8)
    if command == "prepare":
        pending.append(pages.prepare_store(hashes))
        for page in pending[-1].pages[: count // 2]:
            page[:] = 0xAA
        answer(count)
    elif command == "complete":
        result = pending.pop().complete()
        answer([result.stored, result.present, result.refused])
    elif command == "hold":
        pending.append(pages.prepare_load(hashes))
        answer(len(pending[-1].pages))
    elif command == "store":
        result = pages.store(hashes, data)
        answer([result.stored, result.present, result.refused])
"""


class ClientProcess:
    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, command: str, name: int = 0, count: int = 0) -> None:
        self.process.stdin.write(json.dumps([command, name, count]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        line = self.process.stdout.readline()
        assert line, "the client ended"
        return json.loads(line)

    def tell(self, command: str, name: int = 0, count: int = 0) -> object:
        self.begin(command, name, count)
        return self.answer()

    def end(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture
def client_process():
    processes: list[ClientProcess] = []

    def start(url: str) -> ClientProcess:
        processes.append(ClientProcess(url))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


class TestOtherProcesses:
    @pytest.fixture(params=["unix", "kv"])
    def served(self, request, start_node):
        node = start_node()
        return node, f"unix://{node.config.socket}" if request.param == "unix" else f"kv://127.0.0.1:{node.port}"

    def test_two_processes_store_the_same_pages_at_once(self, served, client_process):
        node, url = served
        one, two = client_process(url), client_process(url)
        stored = present = 0
        for name in range(10):
            for process in (one, two):
                process.begin("store", name * 100, 50)
            answers = [process.answer() for process in (one, two)]
            assert all(sum(counts) == 50 and not counts[2] for counts in answers), answers
            stored += sum(counts[0] for counts in answers)
            present += sum(counts[1] for counts in answers)
        assert (stored, present) == (500, 500)
        statistics = node.store.statistics()
        assert statistics.arena_pages == 500
        assert statistics.arena_used_bytes == 500 * 8192, "one copy of each is kept"

    def test_a_process_that_dies_in_a_store_frees_its_slots_and_only_those(
        self, served, client_process, eventually, pass_deadlines
    ):
        node, url = served
        dying, living = client_process(url), client_process(url)
        assert living.tell("store", 1, 4) == [4, 0, 0]
        assert dying.tell("prepare", 3, 8) == 8
        assert dying.tell("hold", 1, 4) == 4
        dying.process.kill()
        if url.startswith("kv:"):  # nobody notices that it died
            pass_deadlines(node.store)
        assert living.tell("prepare", 2, 4) == 4
        eventually(lambda: node.store.statistics().arena_used_bytes == 8 * 8192)
        eventually(lambda: not node.store._state.leases.loads)
        assert living.tell("complete") == [4, 0, 0]
        assert living.tell("store", 3, 8) == [8, 0, 0]
        with node.store.write_back.writing:
            node.store.check_integrity()

    def test_a_stopped_process_past_its_deadline_publishes_nothing(
        self, served, client_process, eventually, pass_deadlines
    ):
        node, url = served
        stopped, living = client_process(url), client_process(url)
        assert stopped.tell("prepare", 3, 8) == 8
        stopped.process.send_signal(signal.SIGSTOP)
        pass_deadlines(node.store)
        eventually(lambda: node.store.statistics().counters["lapsed"] == 8)
        assert living.tell("store", 3, 8) == [8, 0, 0]
        # Mapped slots stay out of use as long as the stopped process may wake up and write; others are free at once.
        used = node.store.statistics().arena_used_bytes
        assert used == (16 if url.startswith("unix:") else 8) * 8192
        stopped.process.send_signal(signal.SIGCONT)
        assert stopped.tell("complete") == [0, 0, 8]
        eventually(lambda: node.store.statistics().arena_used_bytes == 8 * 8192)
        with node.store.write_back.writing:
            node.store.check_integrity()
