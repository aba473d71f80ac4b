"""The control calls as any gRPC client makes them: who may, what is refused, and how errors cross the wire."""

from __future__ import annotations

import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import kvstore
import kvstore.node.grpc_server
import kvstore.node.node
from kvstore import errors
from kvstore.layout import MAX_NAME_BYTES
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.messages import code_of, reason_of

SECONDS = 50.0

OVER_THE_WIRE = {
    errors.InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
    errors.LayoutMismatchError: (grpc.StatusCode.FAILED_PRECONDITION, errors.LayoutMismatchError),
    errors.LimitExceededError: (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.LimitExceededError),
    errors.ConfigError: (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
    errors.UnavailableError: (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
    errors.DeadlineError: (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
    errors.UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, errors.UnauthenticatedError),
    errors.PermissionDeniedError: (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError),
    errors.ResourceError: (grpc.StatusCode.INTERNAL, errors.ResourceError),
    # What no call of a client can cause is the node's own trouble.
    errors.InUseError: (grpc.StatusCode.INTERNAL, errors.UnavailableError),
    errors.FormatError: (grpc.StatusCode.INTERNAL, errors.UnavailableError),
    errors.KVStoreError: (grpc.StatusCode.INTERNAL, errors.UnavailableError),
    # These two are answered by the client itself: it opens the namespace, or attaches, again.
    errors.UnknownNamespaceError: (grpc.StatusCode.NOT_FOUND, errors.UnknownNamespaceError),
    errors.NotAttachedError: (grpc.StatusCode.FAILED_PRECONDITION, errors.NotAttachedError),
}


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


class Attached:
    """A client's lock file, as the attach protocol wants it."""

    def __init__(self, wire, name: str = "new-" + "0" * 32) -> None:
        self.name = name
        self.path = wire.node.store.arena.directory / "clients" / name
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self.client = wire.stub.Attach(pb.AttachRequest(lock_name=name), timeout=SECONDS).client

    def die(self) -> None:
        os.close(self.fd)


class TestErrors:
    def test_every_class_is_in_the_table(self):
        # The engine's side and the proxy's have errors of their own, which no node raises.
        theirs = ("kvstore.connector.", "kvstore.responses.")
        ours = {kind for kind in subclasses(errors.KVStoreError) if not kind.__module__.startswith(theirs)}
        assert ours == set(OVER_THE_WIRE)

    @pytest.mark.parametrize("kind", OVER_THE_WIRE, ids=lambda kind: kind.__name__)
    def test_an_error_crosses_the_wire(self, wire, monkeypatch, kind):
        code, arrives = OVER_THE_WIRE[kind]
        text = "page_bytes is 7 – the limit is 5 · “ü”\nand more"

        def fail(*arguments: object) -> None:
            raise kind(text)

        monkeypatch.setattr(wire.node.store, "statistics", fail)
        with pytest.raises(grpc.RpcError) as raw:
            wire.stub.Status(pb.StatusRequest(), timeout=SECONDS)
        assert raw.value.code() is code is code_of(kind(text))
        assert raw.value.details() == text
        assert dict(raw.value.trailing_metadata())["kvstore-reason"] == reason_of(kind(text))
        for url in (f"unix://{wire.node.config.socket}", f"kv://127.0.0.1:{wire.node.port}"):
            with kvstore.connect(url) as client, pytest.raises(errors.KVStoreError) as caught:
                client.status()
            assert type(caught.value) is arrives
            assert text in str(caught.value)
        monkeypatch.undo()

    def test_a_failure_that_nobody_thought_of_is_the_nodes(self, wire, monkeypatch, caplog):
        monkeypatch.setattr(wire.node.store, "statistics", lambda: 1 / 0)
        with kvstore.connect(f"kv://127.0.0.1:{wire.node.port}") as client:
            with pytest.raises(errors.UnavailableError, match=r"failed: .*division"):
                client.status()
            monkeypatch.undo()
            assert client.status().pid == os.getpid()
        assert "ZeroDivisionError" in caplog.text

    def test_more_calls_than_the_node_takes_find_it_unavailable(self, start_node, connect, monkeypatch, eventually):
        for module in (kvstore.node.node, kvstore.node.grpc_server):
            monkeypatch.setattr(module, "HANDLERS", 2)
        monkeypatch.setattr(kvstore.node.grpc_server, "_WAITING_CALLS", 0)
        wire = connect(start_node())
        watch = wire.channel.unary_stream("/grpc.health.v1.Health/Watch")
        watching = [watch(b"", timeout=SECONDS) for _ in range(2)]
        for each in watching:
            next(each)
        with kvstore.connect(f"kv://127.0.0.1:{wire.node.port}") as client:
            with pytest.raises(errors.UnavailableError, match="Concurrent RPC limit"):
                client.status()
            for each in watching:
                each.cancel()

            def answers() -> bool:
                try:
                    return client.status().pid == os.getpid()
                except errors.UnavailableError:
                    return False

            eventually(answers)

    def test_a_server_that_is_no_node(self, short_folder):
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with (
            kvstore.connect(f"kv://127.0.0.1:{port}") as client,
            pytest.raises(errors.FormatError, match="does not know this call"),
        ):
            client.status()
        server.stop(None).wait()

    def test_nobody_there(self, short_folder):
        for url in (f"unix://{short_folder}/none", "kv://127.0.0.1:1"):
            with (
                kvstore.connect(url) as client,
                pytest.raises(errors.UnavailableError, match=rf"{url} can't be reached"),
            ):
                client.status()


class TestAttach:
    def test_only_over_the_unix_socket(self, wire):
        with pytest.raises(grpc.RpcError, match=r"over the Unix socket only, not from ipv4:127.0.0.1") as caught:
            wire.stub.Attach(pb.AttachRequest(lock_name="new-" + "0" * 32), timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize(
        "name", ["", "none", "new-" + "1" * 32, "../node.lock", "1", "new-" + "0" * 31, "new-" + "0" * 32 + "\n", "ü"]
    )
    def test_only_with_a_locked_file_of_the_right_name(self, start_node, connect, name):
        wire = connect(start_node(), unix=True)
        (wire.node.store.arena.directory / "clients" / ("new-" + "1" * 32)).touch()
        with pytest.raises(grpc.RpcError, match="not a locked file") as caught:
            wire.stub.Attach(pb.AttachRequest(lock_name=name), timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert wire.stub.Status(pb.StatusRequest(), timeout=SECONDS).clients == 0

    @pytest.mark.parametrize("client", [1, 2**63, 2**64 - 1])
    def test_a_client_that_never_attached(self, wire, client):
        space = wire.open()
        calls = [
            lambda: wire.reserve(space, 1, client=client),
            lambda: wire.stub.CompleteStore(pb.CompleteStoreRequest(ticket=1, client=client), timeout=SECONDS),
            lambda: wire.stub.PrepareLoad(
                pb.PrepareLoadRequest(pages=wire.pages(space, 1), client=client), timeout=SECONDS
            ),
            lambda: wire.stub.CompleteLoad(pb.CompleteLoadRequest(ticket=1, client=client), timeout=SECONDS),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError, match="not attached") as caught:
                call()
            assert dict(caught.value.trailing_metadata())["kvstore-reason"] == "NotAttachedError"

    def test_a_dead_clients_slots_are_freed_and_only_those(self, start_node, connect, eventually):
        wire = connect(start_node(), unix=True)
        space = wire.open()
        dying, living = Attached(wire), Attached(wire, "new-" + "a" * 32)
        wire.reserve(space, 3, client=dying.client)
        theirs = wire.reserve(space, 2, client=living.client)
        assert wire.used_bytes() == 5 * 8192
        dying.die()
        eventually(lambda: wire.used_bytes() == 2 * 8192)
        done = wire.stub.CompleteStore(
            pb.CompleteStoreRequest(ticket=theirs.ticket, publish=True, client=living.client), timeout=SECONDS
        )
        assert (done.stored, done.present, done.refused) == (2, 0, 0)
        with pytest.raises(grpc.RpcError, match="not attached"):
            wire.reserve(space, 3, client=dying.client)
        living.die()
        eventually(lambda: wire.stub.Status(pb.StatusRequest(), timeout=SECONDS).clients == 0)


class TestLeases:
    def test_a_lease_is_its_owners(self, start_node, connect):
        wire = connect(start_node(), unix=True)
        space = wire.open()
        one, other = Attached(wire), Attached(wire, "new-" + "b" * 32)
        ticket = wire.reserve(space, 3, client=one.client).ticket
        for client in (other.client, 0):
            done = wire.stub.CompleteStore(
                pb.CompleteStoreRequest(ticket=ticket, publish=True, client=client), timeout=SECONDS
            )
            assert (done.stored, done.present, done.refused) == (0, 0, 0)
        done = wire.stub.CompleteStore(
            pb.CompleteStoreRequest(ticket=ticket, publish=True, client=one.client), timeout=SECONDS
        )
        assert done.stored == 3
        held = wire.stub.PrepareLoad(
            pb.PrepareLoadRequest(pages=wire.pages(space, 3), client=one.client, ttl_ms=20_000), timeout=SECONDS
        )
        assert held.tiers == b"\1\1\1"
        assert len(held.offsets) == 3
        for client, valid in ((other.client, False), (0, False), (one.client, True), (one.client, False)):
            request = pb.CompleteLoadRequest(ticket=held.ticket, client=client)
            assert wire.stub.CompleteLoad(request, timeout=SECONDS).valid is valid
        for each in (one, other):
            each.die()

    def test_nobody_publishes_from_afar_without_sending(self, wire):
        space = wire.open()
        ticket = wire.reserve(space, 3).ticket
        done = wire.stub.CompleteStore(pb.CompleteStoreRequest(ticket=ticket, publish=True), timeout=SECONDS)
        assert (done.stored, done.refused) == (0, 3)
        assert wire.found(space, 3) == [0, 0, 0]
        assert wire.used_bytes() == 0

    def test_no_time_is_no_reservation(self, wire, eventually):
        space = wire.open()
        wire.reserve(space, 3, ttl_ms=0)
        eventually(wire.at_rest)
        assert wire.used_bytes() == 0

    def test_half_of_the_arena_is_the_most_that_remote_clients_reserve(self, start_node, connect):
        wire = connect(start_node(arena=1 << 20))
        space = wire.open()
        outcomes = b""
        for first in range(0, 128, 32):
            reply = wire.stub.PrepareStore(
                pb.PrepareStoreRequest(pages=wire.pages(space, 32, first), ttl_ms=20_000), timeout=SECONDS
            )
            outcomes += reply.outcomes
        assert (outcomes.count(0), outcomes.count(2)) == (64, 64)
        assert outcomes.index(2) == 64, "the head of a prefix comes first"
        assert wire.used_bytes() == 512 << 10


class TestNamespaces:
    @pytest.mark.parametrize(
        ("layout", "words"),
        [
            ("", "not a JSON object"),
            ("[]", "not a JSON object"),
            ("[" * 100_000, "not a JSON object"),
            ("{}", "'block_size' is missing"),
            ({"model": ""}, "model must not be empty"),
            ({"model": 7}, "model must be a string, got 7"),
            ({"model": "x" * (MAX_NAME_BYTES + 1)}, f"{MAX_NAME_BYTES + 1} bytes, the limit is {MAX_NAME_BYTES}"),
            ({"page_bytes": 0}, "page_bytes must lie between 1 and"),
            ({"page_bytes": 1 << 31}, f"got {1 << 31}"),
            ({"page_bytes": 1e3}, "page_bytes must be an integer, got 1000.0"),
            ({"block_size": True}, "block_size must be an integer, got True"),
            ({"tp_rank": 1}, "tp 1 of 1"),
            ({"colour": "red"}, "unknown field 'colour'"),
            ({"page_bytes": 1 << 30}, "page_bytes is 1073741824"),
        ],
    )
    def test_a_layout_that_cannot_be_right(self, wire, layout, words):
        if isinstance(layout, dict):
            layout = json.dumps({"model": "m", "block_size": 16, "page_bytes": 64} | layout)
        with pytest.raises(grpc.RpcError) as caught:
            wire.stub.OpenNamespace(pb.OpenNamespaceRequest(layout=layout), timeout=SECONDS)
        assert words in caught.value.details()
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert not wire.node.store.namespaces.known()

    def test_calls_on_a_namespace_that_was_not_opened(self, wire):
        space = wire.open()
        for fingerprint in (b"", b"x" * 32, space[:-1], space + b"x"):
            pages = wire.pages(fingerprint, 2)
            calls = [
                lambda pages=pages: wire.stub.Lookup(pb.LookupRequest(queries=[pages]), timeout=SECONDS),
                lambda pages=pages: wire.stub.PrepareStore(pb.PrepareStoreRequest(pages=pages), timeout=SECONDS),
                lambda pages=pages: wire.stub.PrepareLoad(pb.PrepareLoadRequest(pages=pages), timeout=SECONDS),
                lambda pages=pages: wire.stub.Touch(pages, timeout=SECONDS),
                lambda pages=pages: wire.stub.Evict(pages, timeout=SECONDS),
                lambda pages=pages: wire.stub.Clear(pb.ClearRequest(fingerprint=pages.fingerprint), timeout=SECONDS),
            ]
            for call in calls:
                with pytest.raises(grpc.RpcError, match="open it first") as caught:
                    call()
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    def test_hashes_that_are_not_whole(self, wire):
        space = wire.open()
        broken = pb.PageList(fingerprint=space, hashes=b"x" * 33)
        calls = [
            lambda: wire.stub.Lookup(pb.LookupRequest(queries=[broken]), timeout=SECONDS),
            lambda: wire.stub.PrepareStore(pb.PrepareStoreRequest(pages=broken), timeout=SECONDS),
            lambda: wire.stub.PrepareLoad(pb.PrepareLoadRequest(pages=broken), timeout=SECONDS),
            lambda: wire.stub.Touch(broken, timeout=SECONDS),
            lambda: wire.stub.Evict(broken, timeout=SECONDS),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError, match="32 bytes each, the field has 33") as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    def test_limits_are_kept_by_the_node_too(self, wire):
        space = wire.open()
        batch = wire.stub.OpenNamespace(
            pb.OpenNamespaceRequest(layout=wire.node.store.namespaces.known()[0].layout.to_json()), timeout=SECONDS
        ).batch_pages
        too_many = wire.pages(space, batch + 1)
        half = wire.pages(space, 65_537)
        calls = {
            f"{batch + 1} pages in one batch, the limit is {batch}": [
                lambda: wire.stub.PrepareStore(pb.PrepareStoreRequest(pages=too_many), timeout=SECONDS),
                lambda: wire.stub.PrepareLoad(pb.PrepareLoadRequest(pages=too_many), timeout=SECONDS),
            ],
            "131074 pages, the limit is 131072": [
                lambda: wire.stub.Lookup(pb.LookupRequest(queries=[half, half]), timeout=SECONDS)
            ],
        }
        for words, group in calls.items():
            for call in group:
                with pytest.raises(grpc.RpcError, match=words) as caught:
                    call()
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert wire.used_bytes() == 0
