"""A node that can't be reached: the error says why, and what to do, whatever the URL's scheme."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from forked import in_child
from node_process import NodeProcess
from ports import free_port

import kvstore
from kvstore.client.credentials import Credentials
from kvstore.client.paths.bulk.pool import BulkPool
from kvstore.client.paths.control import Connection
from kvstore.client.paths.reachability import PortLooks, look_at_socket
from kvstore.errors import DeadlineError, UnavailableError
from kvstore.node.node import Node

NOBODY = 65534


def failure(url: str, timeout: float = 20.0, **files: Path) -> UnavailableError | DeadlineError:
    with kvstore.connect(url, timeout=timeout, **files) as client:
        with pytest.raises((UnavailableError, DeadlineError)) as caught:
            client.status()
        assert not client.answered
    assert str(caught.value).endswith(f"; {caught.value.advice}")
    return caught.value


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class TestSocket:
    def test_none_is_there(self, short_folder: Path) -> None:
        path = short_folder / "none"
        said = str(failure(f"unix://{path}"))
        assert said.startswith(
            f"unix://{path} can't be reached: {path} is not there: no node runs on this socket; start"
        )

    def test_nobody_listens(self, node_process: Callable[..., NodeProcess]) -> None:
        node = node_process()
        node.kill()
        error = failure(node.url)
        assert f"nobody listens on {node.socket}: the node is not running; start it" in str(error)

    def test_a_file_that_is_no_socket(self, short_folder: Path) -> None:
        (short_folder / "file").touch()
        assert "is no socket; name the node's socket" in str(failure(f"unix://{short_folder}/file"))

    def test_a_node_that_hangs_is_named(self, node_process: Callable[..., NodeProcess]) -> None:
        node = node_process()
        node.pause()
        error = failure(node.url, timeout=1.0)
        assert isinstance(error, DeadlineError)
        assert f"the node does not answer (pid {node.pid}, hung or overloaded)" in str(error)
        assert f"kill -CONT {node.pid}" in error.advice
        assert "kvstore serve" not in str(error)

    def test_so_many_wait_already_that_nobody_can_be_asked_who_it_is(self, short_folder: Path) -> None:
        path = short_folder / "s"
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                try:
                    waiting.connect(str(path))
                except BlockingIOError:
                    break
            found = look_at_socket(path, late=False)
        assert found is not None
        assert found.what == "the node does not answer (hung or overloaded)"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
    def test_another_users(self, node_process: Callable[..., NodeProcess], short_folder: Path) -> None:
        node = node_process()

        def as_nobody() -> str:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setgroups([])
            os.setresuid(NOBODY, NOBODY, NOBODY)
            return str(look_at_socket(node.socket, late=False))

        said = in_child(as_nobody)
        assert (
            f"user nobody does not get to {node.socket}: {short_folder} is user root's and group root's, mode 0700"
            in said
        )
        assert said.endswith("; run as the node's user, or give both a group: `kvstore serve --group NAME`")
        short_folder.chmod(0o755)
        said = in_child(as_nobody)
        assert f"{node.socket} is user root's and group root's, mode 0600; this is user nobody; run as" in said

    def test_a_node_that_has_answered_is_not_looked_at_again(self, node_process: Callable[..., NodeProcess]) -> None:
        """A client that is in use knows its node: what it waits for then is its deadline, and no more."""
        node = node_process()
        with kvstore.connect(node.url, timeout=1.0) as client:
            client.status()
            assert client.answered
            node.pause()
            with pytest.raises(DeadlineError) as caught:
                client.status()
        assert str(caught.value) == f"{node.url} did not answer in time"


class TestPort:
    def test_tls_to_a_port_without(self, start_node: Callable[..., Node], authority: Authority) -> None:
        port = start_node().port
        error = failure(f"kvs://127.0.0.1:{port}", ca=authority.ca)
        assert f"127.0.0.1:{port} speaks no TLS; write kv://127.0.0.1:{port}, or give the node a certificate" in str(
            error
        )

    def test_no_tls_to_a_port_with(self, start_node: Callable[..., Node], authority: Authority) -> None:
        cert, key = authority.sign("node", "127.0.0.1")
        port = start_node(tls_cert=cert, tls_key=key).port
        error = failure(f"kv://127.0.0.1:{port}")
        assert str(error).endswith(f": 127.0.0.1:{port} speaks TLS; write kvs://127.0.0.1:{port}")

    def test_a_certificate_that_is_not_accepted_is_no_lack_of_tls(
        self, start_node: Callable[..., Node], authority: Authority, tmp_path: Path
    ) -> None:
        cert, key = authority.sign("node", "127.0.0.1")
        url = f"kvs://127.0.0.1:{start_node(tls_cert=cert, tls_key=key).port}"
        with (
            kvstore.connect(url, timeout=20.0, ca=Authority(tmp_path, "other").ca) as client,
            pytest.raises(UnavailableError, match="handshake failed") as caught,
        ):
            client.status()
        assert not caught.value.advice

    def test_nobody_listens(self) -> None:
        port = free_port()
        for scheme in ("kv", "kvs"):
            said = str(failure(f"{scheme}://127.0.0.1:{port}"))
            assert f"nobody listens on 127.0.0.1:{port}" in said
            assert f"kvstore serve --listen ADDRESS:{port}" in said

    def test_a_port_that_says_nothing_is_not_waited_for_long(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            began = time.monotonic()
            looks = PortLooks()
            assert looks.look("127.0.0.1", silent.getsockname()[1], tls=True, seconds=60.0) is None
            assert looks.look("127.0.0.1", silent.getsockname()[1], tls=True, seconds=0.0) is None
            assert time.monotonic() - began < 30


class NameServer:
    """One that hangs until it is released, or until a test has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.answered = threading.Semaphore(0), threading.Event()
        self.asking: list[threading.Thread] = []
        self._released = threading.Event()
        resolve = socket.getaddrinfo

        def hang(*arguments: Any, **named: Any) -> Any:
            self.asking.append(threading.current_thread())
            self.asked.release()
            self._released.wait(20)
            self.answered.set()
            return resolve(*arguments, **named)

        monkeypatch.setattr(socket, "getaddrinfo", hang)

    def release(self) -> None:
        self._released.set()
        for each in self.asking:
            if each is not threading.current_thread():
                each.join(60)
                assert not each.is_alive()


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(monkeypatch)
    yield server
    server.release()


class TestNameServerThatHangs:
    def test_a_call_ends_meanwhile_and_one_thread_asks(
        self, name_server: NameServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.client.paths.control._LOOK_SECONDS", 0.0)
        with kvstore.connect(f"kv://localhost:{free_port()}", timeout=1.0) as client:
            for _ in range(3):
                with pytest.raises(UnavailableError):
                    client.status()
                assert not name_server.answered.is_set()
        assert len(name_server.asking) == 1

    def test_a_cancelled_task_ends_meanwhile(self, name_server: NameServer) -> None:
        async def cancel() -> None:
            async with kvstore.aio.connect(f"kv://localhost:{free_port()}", timeout=5.0) as client:
                task = asyncio.create_task(client.status())
                assert await asyncio.to_thread(name_server.asked.acquire, timeout=60)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not name_server.answered.is_set()

        asyncio.run(cancel())

    def test_a_late_answer_is_used_for_nothing(self, name_server: NameServer) -> None:
        looks = PortLooks()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert looks.look("127.0.0.1", port, tls=False, seconds=0.01) is None
            before = set(Path("/proc/self/fd").iterdir())
            name_server.release()
            assert set(Path("/proc/self/fd").iterdir()) <= before
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
        found = looks.look("127.0.0.1", port, tls=False, seconds=60.0)
        assert found is not None
        assert found.what.startswith(f"nobody listens on 127.0.0.1:{port}")

    def test_a_forked_child_looks_for_itself(self, name_server: NameServer) -> None:
        looks, port = PortLooks(), free_port()
        assert looks.look("127.0.0.1", port, tls=False, seconds=0.01) is None

        def again() -> str:
            name_server.asking.clear()
            name_server.release()
            return str(looks.look("127.0.0.1", port, tls=False, seconds=60.0))

        assert in_child(again).startswith("nobody listens on")


class TestBulkPort:
    """Both ports of a node speak the same; what stands before one of them may not."""

    def said(self, connection: Connection, pool: BulkPool, caplog: pytest.LogCaptureFixture) -> str:
        with pool.lent(time.monotonic() + 20.0) as requests:
            assert requests is None
        pool.close()
        connection.close()
        [record] = [each for each in caplog.records if "pages go through gRPC" in each.getMessage()]
        return record.getMessage()

    def test_tls_to_a_port_without(
        self, start_node: Callable[..., Node], authority: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        node = start_node()
        connection = Connection(f"127.0.0.1:{node.port}", "the node")
        pool = BulkPool(connection, "127.0.0.1", Credentials(ca=authority.ca).context())
        said = self.said(connection, pool, caplog)
        assert f"no bulk connection: 127.0.0.1:{node.bulk_port} ends the connection when it is greeted in TLS" in said
        assert f"it speaks none (then write kv://127.0.0.1:{node.bulk_port})" in said

    def test_no_tls_to_a_port_with(
        self, start_node: Callable[..., Node], authority: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        cert, key = authority.sign("node", "127.0.0.1")
        node = start_node(tls_cert=cert, tls_key=key)
        credentials = Credentials(ca=authority.ca)
        connection = Connection(f"127.0.0.1:{node.port}", "the node", credentials.channel_credentials())
        said = self.said(connection, BulkPool(connection, "127.0.0.1"), caplog)
        assert f"no bulk connection: 127.0.0.1:{node.bulk_port} speaks TLS; write kvs://" in said
