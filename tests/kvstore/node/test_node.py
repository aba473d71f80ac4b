"""A node as a whole: what it owns, how it stops, and what is left when it can't start."""

from __future__ import annotations

import errno
import gc
import os
import socket
import stat
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import grpc
import numpy as np
import pytest

import kvstore
import kvstore.node.node
from kvstore.errors import InUseError, ResourceError, UnavailableError
from kvstore.service.grpc.health_reflection import NOT_SERVING
from kvstore.v1 import cache_pb2 as pb

LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=5000)
SECONDS = 50.0


def hashes_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def payload_of(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 5000), dtype=np.uint8)


def raising(*arguments: object, **named: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def open_files() -> Counter[str]:
    """What this process has open: files of the node, but not what gRPC keeps for the next server."""
    found = Counter[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found[str(entry.readlink())] += 1
    return Counter({name: count for name, count in found.items() if name.startswith("/")})


def url_of(node: kvstore.node.node.Node) -> str:
    return f"unix://{node.config.socket}"


class TestOwning:
    def test_everything_is_private(self, start_node, short_folder):
        node = start_node(socket=short_folder / "made" / "s")
        modes = {
            path: stat.S_IMODE(path.stat().st_mode)
            for path in [node.config.socket, node.config.socket.parent, node.config.arena_directory, node.config.disk]
        }
        assert list(modes.values()) == [0o600, 0o700, 0o700, 0o700], modes
        for path in node.config.arena_directory.iterdir():
            assert not path.stat().st_mode & 0o077, path

    def test_the_umask_is_left_as_it_was(self, start_node):
        old = os.umask(0o027)
        try:
            start_node()
            assert os.umask(0o027) == 0o027
        finally:
            os.umask(old)

    def test_one_node_a_socket(self, start_node, shm_folder):
        node = start_node()
        with pytest.raises(InUseError, match=rf"socket {node.config.socket} is served by process {os.getpid()}"):
            start_node(arena_dir=shm_folder / "b", disk_limit=0)
        with kvstore.connect(url_of(node)) as client:
            assert client.status().pid == os.getpid(), "the first one goes on"

    def test_one_node_an_arena_and_one_a_disk(self, start_node, short_folder, shm_folder):
        node = start_node()
        with pytest.raises(InUseError, match=rf"{node.config.arena_directory} is in use by process {os.getpid()}"):
            start_node(socket=short_folder / "b", disk_limit=0)
        with pytest.raises(InUseError, match=rf"{node.config.disk}.* process {os.getpid()}"):
            start_node(socket=short_folder / "b", arena_dir=shm_folder / "b")
        start_node(socket=short_folder / "b", arena_dir=shm_folder / "b", disk_limit=0)

    def test_a_port_that_is_taken(self, start_node, short_folder, shm_folder):
        first = start_node()
        settings = {"socket": short_folder / "b", "arena_dir": shm_folder / "b", "disk": short_folder / "bd"}
        with pytest.raises(ResourceError, match=f"127.0.0.1:{first.port}"):
            start_node(listen=str(first.port), **settings)
        second = start_node(listen="0", **settings)
        assert second.port not in (0, first.port)

    def test_an_address_that_this_machine_does_not_have(self, start_node):
        with pytest.raises(ResourceError, match=r"can't listen on 203\.0\.113\.7:80: Cannot assign"):
            start_node(listen="203.0.113.7:80", insecure=True)

    def test_a_failed_start_leaves_nothing_in_use(self, start_node):
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ResourceError):
            start_node(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        node = start_node()
        with kvstore.connect(url_of(node)) as client:
            assert client.status().clients == 0

    @pytest.mark.parametrize(
        "part",
        [
            "node.open_store",
            "node.Maintenance",
            "node.DescriptorBudget",
            "node.PagesHandler",
            "node.CacheServicer",
            "node.EventsServicer",
            "web.WebServer",
        ],
    )
    def test_a_start_that_fails_midway_gives_everything_back(self, start_node, monkeypatch, eventually, part):
        with monkeypatch.context() as broken:
            broken.setattr(f"kvstore.node.{part}", raising)
            files, threads = open_files(), set(threading.enumerate())
            with pytest.raises(OSError, match="Too many open files"):
                start_node(metrics="0")
            eventually(lambda: not [each for each in set(threading.enumerate()) - threads if "kvstore" in each.name])
            gc.collect()  # a mapping ends with the last array over it
            assert open_files() - files == Counter()
        with kvstore.connect(url_of(start_node())) as client:
            assert client.status().clients == 0

    def test_the_socket_of_a_killed_node_is_replaced(self, node_process, start_node):
        dead = node_process()
        dead.kill()
        assert dead.socket.is_socket()
        node = start_node(socket=dead.socket, arena_dir=dead.arena_folder, disk=dead.disk)
        with kvstore.connect(url_of(node)) as client:
            assert client.status().pid == os.getpid()

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_what_is_no_socket_is_left_alone(self, start_node, short_folder, kind):
        path = short_folder / "s"
        path.write_text("precious") if kind == "file" else path.mkdir()
        with pytest.raises(ResourceError, match="exists and is no socket; it is left alone"):
            start_node()
        assert path.is_dir() or path.read_text() == "precious"

    def test_ipv6(self, start_node):
        try:
            node = start_node(listen="[::1]:0")
        except ResourceError as error:
            pytest.skip(f"no IPv6 here: {error}")
        with kvstore.connect(f"kv://[::1]:{node.port}") as client:
            assert client.status().pid == os.getpid()

    def test_no_tcp_unless_asked(self, start_node):
        assert start_node(listen="").port == 0


class TestStopping:
    def test_pages_are_on_disk_afterwards(self, start_node):
        node = start_node()
        with kvstore.connect(url_of(node)) as client:
            client.namespace(LAYOUT).store(hashes_of(200), payload_of(200))
            assert node.stop()
            with pytest.raises(UnavailableError):
                client.status()
        assert not node.config.socket.exists()
        for name in ("pages", "headers"):
            (node.config.arena_directory / name).unlink()
        again = start_node()
        with kvstore.connect(url_of(again)) as client:
            pages = client.namespace(LAYOUT)
            assert pages.lookup(hashes_of(200)).tiers == ("disk",) * 200
            into = np.zeros((200, 5000), np.uint8)
            assert pages.load(hashes_of(200), into) == 200
            assert np.array_equal(into, payload_of(200))

    def test_calls_under_way_end_first(self, start_node, monkeypatch, eventually):
        node = start_node()
        under_way, go_on = threading.Event(), threading.Event()
        original = node.store.prepare_load

        def slow(*arguments: object) -> object:
            under_way.set()
            assert go_on.wait(SECONDS)
            return original(*arguments)

        with kvstore.connect(f"kv://127.0.0.1:{node.port}") as client:
            pages = client.namespace(LAYOUT)
            pages.store(hashes_of(4), payload_of(4))
            monkeypatch.setattr(node.store, "prepare_load", slow)
            loaded, clean = [], []
            into = np.zeros((4, 5000), np.uint8)
            loading = threading.Thread(target=lambda: loaded.append(pages.load(hashes_of(4), into)))
            loading.start()
            assert under_way.wait(SECONDS)
            stopping = threading.Thread(target=lambda: clean.append(node.stop()))
            stopping.start()
            eventually(lambda: node._health._status == NOT_SERVING)  # the first thing that stopping does
            go_on.set()
            loading.join()
            stopping.join()
        assert (loaded, clean) == ([4], [True])
        assert np.array_equal(into, payload_of(4))

    def test_a_peer_that_stands_still_does_not_keep_pages_from_the_disk(self, start_node):
        node = start_node(arena=64 << 20, drain_seconds=8.0)  # half of them for the peer, half for the disk
        node._maintenance.stop()  # nothing is written back before the node stops
        large = kvstore.Layout(model="large", block_size=16, page_bytes=2 << 20)
        # Else the peer's end may take all of it in, however little the peer reads.
        small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
        with kvstore.connect(f"kv://127.0.0.1:{node.port}") as client:
            pages = client.namespace(large)
            data = np.random.default_rng(1).integers(0, 256, (4, 2 << 20), dtype=np.uint8)
            pages.store(hashes_of(4), data)
            with grpc.insecure_channel(f"127.0.0.1:{node.port}", small_window) as channel:
                request = pb.LoadPages(pages=pb.PageList(fingerprint=pages.fingerprint, hashes=b"".join(hashes_of(4))))
                stream = channel.unary_stream("/kvstore.v1.Pages/Load")(request.SerializeToString(), timeout=SECONDS)
                assert next(stream)
                assert node.stop(), "clean: everything was written back in time"
                with pytest.raises(grpc.RpcError):
                    list(stream)
        (node.config.arena_directory / "pages").unlink()
        again = start_node(arena=64 << 20)
        with kvstore.connect(url_of(again)) as client:
            assert client.namespace(large).lookup(hashes_of(4)).tiers == ("disk",) * 4

    def test_a_disk_that_hangs_is_not_waited_for(self, start_node, monkeypatch):
        node = start_node(drain_seconds=0.4)
        hang = threading.Event()
        with kvstore.connect(url_of(node)) as client:
            client.namespace(LAYOUT).store(hashes_of(4), payload_of(4))
            node.store.flush()
        monkeypatch.setattr(node.store.lower_tiers.own[0], "flush", lambda: hang.wait(SECONDS))
        assert not node.stop(), "it says that not everything is safe"
        hang.set()
        for thread in threading.enumerate():
            if thread.name == "kvstore-close":
                thread.join(SECONDS)

    def test_stopping_twice_is_stopping_once(self, start_node):
        node = start_node()
        assert node.stop()
        fd = os.open("/dev/null", os.O_RDONLY)
        assert node.stop()
        os.close(fd)  # a second close of the lock would have taken this

    def test_the_next_node_can_start_at_once(self, start_node):
        for kept in (0, 4, 4):
            node = start_node()
            assert node.store.kept_pages == kept
            with kvstore.connect(url_of(node)) as client:
                client.namespace(LAYOUT).store(hashes_of(4), payload_of(4))
            assert node.stop()

    def test_threads_end_with_their_node(self, start_node, eventually):
        before = {thread for thread in threading.enumerate() if thread.name.startswith("kvstore")}
        node = start_node()
        with kvstore.connect(url_of(node)) as client:
            client.status()
        node.stop()
        eventually(lambda: {each for each in threading.enumerate() if each.name.startswith("kvstore")} <= before)


def test_a_socket_of_some_other_program_is_left_alone(start_node, short_folder):
    path = short_folder / "foreign"
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        with pytest.raises(InUseError, match="no kvstore node"):
            start_node(socket=path)
        assert path.is_socket()


def test_a_stop_that_could_not_write_everything_back_says_so(start_node, monkeypatch: pytest.MonkeyPatch):
    node = start_node()
    known = node.store.open_namespace(kvstore.Layout(model="m", block_size=16, page_bytes=64))
    monkeypatch.setattr(node.store.lower_tiers.own[0], "write", lambda pages: [False] * len(pages))
    reserved = node.store.prepare_store(0, known.fingerprint, [b"h" * 32], 10.0, direct=True)
    assert node.store.complete_store(0, reserved.lease, publish=True).stored == 1
    assert not node.stop()
