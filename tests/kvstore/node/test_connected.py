"""Who is connected: clients say what they are called, and a node's status names them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
from bulk_peer import Peer, frame
from certificates import Authority
from local_clients import LocalClient

import kvstore
import kvstore.aio
from kvstore.client_name import MOST_NAME, name_of_process
from kvstore.errors import InvalidRequestError
from kvstore.status import ClientStatus, ConnectedClient, by_client
from kvstore.v1 import bulk_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.bulk_pb2_grpc import BulkStub
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore.wire.frame import Kind

LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=5000)
PAGE = np.ones((1, 5000), np.uint8)
HASH = [bytes(32)]


def shm_url(node) -> str:
    return f"unix://{node.config.socket}"


def bulk_url(node) -> str:
    return f"kv://127.0.0.1:{node.port}"


def use(client: kvstore.Client) -> None:
    """Store a page: connections are made when they are needed."""
    client.namespace(LAYOUT).store(HASH, PAGE)


def named(node) -> list[tuple[str, str, str, int]]:
    with kvstore.connect(shm_url(node)) as client:
        return [each[:4] for each in by_client(client.status().connected)]


class TestNames:
    @pytest.mark.parametrize(("url", "way", "host"), [(shm_url, "shm", ""), (bulk_url, "bulk", "127.0.0.1")])
    def test_what_a_client_calls_itself_while_it_is_connected(self, start_node, eventually, url, way, host):
        node = start_node()
        with kvstore.connect(url(node), name="vLLM 1.2.3 worker rank 0") as client:
            assert named(node) == []
            use(client)
            assert named(node) == [("vLLM 1.2.3 worker rank 0", way, host, 1)]
            [told] = client.status().connected
            assert 0 <= told.seconds < 300
        eventually(lambda: named(node) == [])

    @pytest.mark.parametrize(("url", "way"), [(shm_url, "shm"), (bulk_url, "bulk")])
    def test_of_an_asyncio_client(self, start_node, url, way):
        node = start_node()

        async def told() -> list[tuple[str, str]]:
            async with kvstore.aio.connect(url(node), name="engine") as client:
                pages = await client.namespace(LAYOUT)
                await pages.store(HASH, PAGE)
                return [(each.name, each.way) for each in (await client.status()).connected]

        assert asyncio.run(told()) == [("engine", way)]

    def test_with_tls(self, start_node, tmp_path):
        authority = Authority(tmp_path)
        cert, key = authority.sign("node", "127.0.0.1")
        node = start_node(tls_cert=cert, tls_key=key)
        with kvstore.connect(f"kvs://127.0.0.1:{node.port}", ca=authority.ca, name="engine") as client:
            use(client)
            assert named(node) == [("engine", "bulk", "127.0.0.1", 1)]

    def test_an_embedded_store_has_nobody_connected(self, tmp_path):
        with kvstore.connect(f"embedded://{tmp_path}?arena=16MiB", name="engine") as client:
            use(client)
            assert client.status().connected == ()

    @pytest.mark.parametrize("url", [shm_url, bulk_url])
    def test_without_a_name_it_is_the_process(self, start_node, url):
        node = start_node()
        with kvstore.connect(url(node)) as client:
            use(client)
            [(name, *_)] = named(node)
        assert name == name_of_process() and name.endswith(f" {os.getpid()}")

    @pytest.mark.parametrize("given", [["-c", ""], ["-m", "engine"], ["script.py"]])
    def test_the_programs_name(self, given, tmp_path):
        ask = "from kvstore.client_name import name_of_process; print(name_of_process())"
        (tmp_path / "script.py").write_text(ask)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [ask if each == "" else each for each in given]
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "__main__.py").write_text(ask)
        with subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            printed = process.communicate(timeout=60)[0].strip()
        expected = {"-c": "python", "-m": "engine", "script.py": "script.py"}[given[0]]
        assert printed == f"{expected} {process.pid}"

    def test_a_name_that_cant_be_sent_is_refused(self):
        with pytest.raises(InvalidRequestError, match="UTF-8"):
            kvstore.connect("kv://localhost:1", name="a\udcff")

    def test_a_program_whose_name_is_no_utf8(self, start_node, monkeypatch):
        node = start_node()
        monkeypatch.setattr(sys, "argv", [os.fsdecode(b"/srv/caf\xe9.py")])
        with kvstore.connect(shm_url(node)) as client:
            use(client)
            [(name, *_)] = named(node)
        assert name == f"caf\\udce9.py {os.getpid()}"

    @pytest.mark.parametrize("argv", [[], [""]])
    def test_a_process_that_runs_no_program(self, argv, monkeypatch):
        monkeypatch.setattr(sys, "argv", argv)
        assert name_of_process() == f"python {os.getpid()}"

    def test_a_forked_child_is_called_by_its_own_process(self, start_node, node_process):
        node = node_process()
        with kvstore.connect(node.url) as client:
            use(client)
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                try:
                    use(client)
                    told = json.dumps([each.name for each in client.status().connected])
                    os.write(writing, told.encode())
                finally:
                    os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                names = json.loads(pipe.read())
            os.waitpid(child, 0)
        assert {name.rpartition(" ")[2] for name in names} == {str(os.getpid()), str(child)}

    def test_it_outlives_the_node(self, node_process):
        node = node_process()
        with kvstore.connect(node.url, name="engine 7") as client:
            use(client)
            node.kill()
            node.start()
            [told] = client.status().connected
            assert told.name == "engine 7" and told.seconds > client.status().uptime_seconds

    @pytest.mark.parametrize("url", ["unix:///nowhere/s", "kv://127.0.0.1:1", "embedded:///nowhere"])
    def test_one_that_is_too_long_or_no_text_is_refused(self, url):
        with pytest.raises(InvalidRequestError, match=r"name has 128 characters at most, 'xxx.* has 129"):
            kvstore.connect(url, name="x" * (MOST_NAME + 1))
        with pytest.raises(InvalidRequestError, match="name is text, got 7"):
            kvstore.connect(url, name=7)  # type: ignore[arg-type]

    def test_of_somebody_elses_client_the_node_cuts_it_and_shows_control_characters(self, start_node):
        """It takes whatever comes over the wire."""
        node, name = start_node(), "\x1b[2J\u202e" + "y" * 1000
        shown = "\\x1b[2J\\u202e" + "y" * (MOST_NAME - 5)
        client = LocalClient(node.config.arena_directory)
        with grpc.insecure_channel(shm_url(node).replace("//", "")) as channel:
            CacheStub(channel).Attach(pb.AttachRequest(lock_name=client.name, name=name), timeout=50)
            token = BulkStub(channel).Open(bulk_pb2.OpenBulkRequest(name=name), timeout=50).token
        assert named(node) == [(shown, "shm", "", 1)]
        client.die()
        with Peer(node, frame(Kind.HELLO, token)) as peer:
            assert peer.receive()[0].kind is Kind.READY
            assert (shown, "bulk", "127.0.0.1", 1) in named(node)


class TestManyConnections:
    def test_of_one_client_they_are_one_row(self, start_node):
        node = start_node()
        together = threading.Barrier(3)
        with kvstore.connect(bulk_url(node), name="engine") as client:
            pages = client.namespace(LAYOUT)

            def store(number: int) -> None:
                together.wait(50)
                with pages.prepare_store([bytes(31) + bytes([number])]) as pending:
                    together.wait(50)
                    pending.complete()

            threads = [threading.Thread(target=store, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(50)
            [(name, way, host, connections)] = named(node)
            assert (name, way, host, connections) == ("engine", "bulk", "127.0.0.1", node._bulk.connections)

    def test_rows(self):
        told = [
            ClientStatus("b", "shm", 3.0),
            ClientStatus("a", "bulk", 1.0, "10.0.0.1"),
            ClientStatus("a", "bulk", 5.0, "10.0.0.1"),
            ClientStatus("a", "bulk", 2.0, "10.0.0.2"),
        ]
        assert by_client(told) == [
            ConnectedClient("a", "bulk", "10.0.0.1", 2, 5.0),
            ConnectedClient("a", "bulk", "10.0.0.2", 1, 2.0),
            ConnectedClient("b", "shm", "", 1, 3.0),
        ]


class TestCommand:
    def status(self, node, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", "status", *arguments, node.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def test_names_are_shown(self, node_process):
        node = node_process()
        with kvstore.connect(node.url, name="vLLM 1.2.3 worker rank 0") as one, kvstore.connect(node.kv_url) as other:
            use(one)
            use(other)
            one.namespace(LAYOUT)
            assert (
                f"connected: {name_of_process()} (bulk from 127.0.0.1), vLLM 1.2.3 worker rank 0 (shm)\n"
                in self.status(node)
            )
            told = json.loads(self.status(node, "--json"))["connected"]
            assert [(each["name"], each["way"], each["host"]) for each in told] == [
                ("vLLM 1.2.3 worker rank 0", "shm", ""),
                (name_of_process(), "bulk", "127.0.0.1"),
            ]

    def test_nobody(self, node_process):
        assert "connected" not in self.status(node_process())


def test_a_tenant_is_not_told_of_others(start_node, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("op:the-token-of-the-operator\na:the-token-of-tenant-a tenant=a\n")
    tokens.chmod(0o600)
    mine = tmp_path / "mine"
    mine.write_text("the-token-of-tenant-a\n")
    mine.chmod(0o600)
    node = start_node(token_file=tokens)
    with kvstore.connect(shm_url(node), name="somebody's engine") as client:
        use(client)
        with kvstore.connect(bulk_url(node), token_file=mine) as tenant:
            assert tenant.status().connected == ()
        assert [each.name for each in client.status().connected] == ["somebody's engine"]


def test_an_older_client_has_no_name(start_node):
    node = start_node()
    client = LocalClient(node.config.arena_directory)
    with grpc.insecure_channel(shm_url(node).replace("//", "")) as channel:
        CacheStub(channel).Attach(pb.AttachRequest(lock_name=client.name), timeout=50)
    assert named(node) == [("", "shm", "", 1)]
    client.die()
