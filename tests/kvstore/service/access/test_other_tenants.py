"""What a tenant is answered for another's namespace is, byte for byte, what it is answered for one that nobody has.

Every method of every service is here, and every request of a bulk connection: one that is new must be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from bulk_peer import Peer, frame, payload_of
from google.protobuf import descriptor_pb2

import kvstore
from kvstore.hashing import checksum_of
from kvstore.namespaces.registry import KnownNamespace
from kvstore.node.node import Node
from kvstore.service.grpc.health_reflection import STANDARD_FILES
from kvstore.service.sockets.bulk import METHODS as BULK_METHODS
from kvstore.v1 import bulk_pb2, cache_pb2, events_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.frame import Kind
from kvstore.wire.local import CALLS as LOCAL_CALLS
from kvstore.wire.messages import LOAD_STREAM, STORE_STREAM

SECONDS = 50.0
PAGE = 5000
DATA = np.random.default_rng(0).integers(0, 256, (4, PAGE), dtype=np.uint8)
HASHES = [number.to_bytes(32, "big") for number in range(4)]
JOINED = b"".join(HASHES)
TOKENS = {"operator": "", "a": "tenant=a", "b": "tenant=b"}


def token_of(name: str) -> str:
    return f"{name}-token-of-some-length"


def layout_of(tenant: str) -> kvstore.Layout:
    return kvstore.Layout(model="tiny", block_size=16, page_bytes=PAGE, tenant=tenant)


THEIRS, OWN = layout_of("a").fingerprint, layout_of("b").fingerprint
PAGES = pb.PageList(fingerprint=THEIRS, hashes=JOINED)
OWN_PAGES = pb.PageList(fingerprint=OWN, hashes=bytes(32))
USED = pb.UseReport(uses=[pb.PageUse(fingerprint=THEIRS, hashes=JOINED, read=True, missed=2)])
STORE = pb.PrepareStoreRequest(pages=PAGES, ttl_ms=1000)
LIST = bytes([7 << 3 | 2, 0])
"""A request for the list of services."""


def at_once(pages: pb.PageList) -> list[bytes]:
    request = pb.PrepareStoreRequest(pages=pages, ttl_ms=1000)
    head = pb.StorePages(ticket=77, checksums=[checksum_of(page) for page in DATA], request=request)
    return [head.SerializeToString(), DATA.tobytes()]


def messages(*requests: Any) -> list[list[bytes]]:
    return [[request.SerializeToString()] for request in requests]


CALLS: dict[str, list[list[bytes]]] = {
    "/kvstore.v1.Cache/Attach": messages(pb.AttachRequest(lock_name="mine")),
    "/kvstore.v1.Cache/OpenNamespace": messages(
        pb.OpenNamespaceRequest(layout=layout_of("a").to_json()),
        pb.OpenNamespaceRequest(layout=layout_of("a").to_json(), durability="disk"),
    ),
    "/kvstore.v1.Cache/Lookup": messages(
        pb.LookupRequest(queries=[PAGES]),
        pb.LookupRequest(queries=[OWN_PAGES, PAGES]),
        pb.LookupRequest(queries=[PAGES] * 4097),
        pb.LookupRequest(queries=[pb.PageList(fingerprint=THEIRS, hashes=b"short")]),
    ),
    "/kvstore.v1.Cache/Explain": messages(PAGES, pb.PageList(fingerprint=THEIRS, hashes=b"short")),
    "/kvstore.v1.Cache/PrepareStore": messages(
        STORE,
        pb.PrepareStoreRequest(pages=pb.PageList(fingerprint=THEIRS), ahead=4, ttl_ms=1000),
        pb.PrepareStoreRequest(pages=PAGES, client=7, ttl_ms=1000),
        pb.PrepareStoreRequest(pages=PAGES, used=USED, ttl_ms=1000),
        pb.PrepareStoreRequest(pages=PAGES, parent=b"short", ttl_ms=1000),
        pb.PrepareStoreRequest(pages=pb.PageList(fingerprint=OWN), used=USED, ttl_ms=1000),
    ),
    "/kvstore.v1.Cache/CompleteStore": messages(
        pb.CompleteStoreRequest(ticket=77, publish=True),
        pb.CompleteStoreRequest(ticket=77, publish=True, pages=PAGES, outcomes=bytes(4)),
        pb.CompleteStoreRequest(ticket=77, publish=True, pages=PAGES, outcomes=bytes(3)),
        pb.CompleteStoreRequest(ticket=77, publish=True, pages=PAGES, outcomes=bytes(4), parent=b"short"),
        pb.CompleteStoreRequest(ticket=77, publish=True, pages=PAGES),
        pb.CompleteStoreRequest(ticket=77, client=7, pages=PAGES, outcomes=bytes(4), used=USED),
        pb.CompleteStoreRequest(ticket=77, used=USED),
    ),
    "/kvstore.v1.Cache/PrepareLoad": messages(
        pb.PrepareLoadRequest(pages=PAGES, ttl_ms=1000),
        pb.PrepareLoadRequest(pages=PAGES, ttl_ms=1000, client=7),
        pb.PrepareLoadRequest(pages=pb.PageList(fingerprint=OWN), ttl_ms=1000, used=USED),
    ),
    "/kvstore.v1.Cache/CompleteLoad": messages(
        pb.CompleteLoadRequest(ticket=77), pb.CompleteLoadRequest(ticket=77, client=7)
    ),
    "/kvstore.v1.Cache/Touch": messages(PAGES),
    "/kvstore.v1.Cache/ReportUse": messages(USED, pb.UseReport(uses=[USED.uses[0]] * 4097)),
    "/kvstore.v1.Cache/Evict": messages(PAGES),
    "/kvstore.v1.Cache/Clear": messages(pb.ClearRequest(fingerprint=THEIRS)),
    "/kvstore.v1.Cache/Pin": messages(pb.PinRequest(pages=PAGES, seconds=9), pb.PinRequest(pages=PAGES, seconds=0)),
    "/kvstore.v1.Cache/Unpin": messages(PAGES),
    "/kvstore.v1.Cache/Flush": messages(pb.FlushRequest()),
    "/kvstore.v1.Cache/Status": messages(pb.StatusRequest()),
    "/kvstore.v1.Bulk/Open": messages(bulk_pb2.OpenBulkRequest()),
    "/kvstore.v1.Bulk/Settle": messages(bulk_pb2.SettleRequest(ticket=78)),
    "/kvstore.v1.Events/Watch": messages(
        events_pb2.WatchRequest(fingerprints=[THEIRS]),
        events_pb2.WatchRequest(fingerprints=[OWN, THEIRS]),
        events_pb2.WatchRequest(fingerprints=[THEIRS] * 1025),
    ),
    LOAD_STREAM: messages(pb.LoadPages(pages=PAGES)),
    STORE_STREAM: [at_once(PAGES), at_once(PAGES)[:1]],
    "/grpc.health.v1.Health/Check": [[b""]],
    "/grpc.health.v1.Health/Watch": [[b"\x0a\x01x"]],
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": [[LIST]],
}
"""By path, what is sent: every way of naming the namespace."""
BULK_CALLS: dict[Kind, list[tuple[bytes, bytes]]] = {
    Kind.LOAD: [(pb.LoadPages(pages=PAGES).SerializeToString(), b"")],
    Kind.RESERVE: [
        (each.SerializeToString(), b"")
        for each in (STORE, pb.PrepareStoreRequest(pages=PAGES, parent=b"short", client=7, used=USED))
    ],
    Kind.PUT: [
        (pb.StorePages(ticket=77, request=STORE).SerializeToString(), payload_of(DATA)),
        (pb.StorePages(ticket=77).SerializeToString(), payload_of(DATA)),
        (pb.StorePages(ticket=77, request=STORE).SerializeToString(), b""),
    ],
}


def test_every_method_is_here():
    files = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in STANDARD_FILES]
    for each in (cache_pb2, bulk_pb2, events_pb2):
        files.append(descriptor_pb2.FileDescriptorProto())
        each.DESCRIPTOR.CopyToProto(files[-1])
    there = {
        f"/{file.package}.{service.name}/{method.name}"
        for file in files
        for service in file.service
        for method in service.method
    }
    assert set(CALLS) == there | {LOAD_STREAM, STORE_STREAM}
    assert set(BULK_CALLS) == set(BULK_METHODS)
    assert len(LOCAL_CALLS) == 5, "calls in the arena's folder are for who maps it, and no tenant does"


class Caller:
    """Tenant b, at a node."""

    def __init__(self, node: Node, channel: grpc.Channel) -> None:
        self.node = node
        self._channel = channel
        self.metadata = [("authorization", f"Bearer {token_of('b')}")]

    def answers(self, path: str) -> list[object]:
        return [self._answer(path, sent) for sent in CALLS[path]]

    def _answer(self, path: str, sent: list[bytes]) -> object:
        call = self._channel.stream_stream(path)(iter(sent), metadata=self.metadata, timeout=SECONDS)
        replies = []
        try:
            for reply in call:
                replies.append(settled(path, reply))
        except grpc.RpcError:
            pass
        return replies, call.code(), call.details(), call.trailing_metadata()

    def bulk_answers(self, kind: Kind) -> list[object]:
        answers = []
        for message, payload in BULK_CALLS[kind]:
            opened = self._channel.unary_unary("/kvstore.v1.Bulk/Open")(b"", metadata=self.metadata, timeout=SECONDS)
            token = bulk_pb2.OpenBulkReply.FromString(opened).token
            with Peer(self.node, frame(Kind.HELLO, token)) as peer:
                assert peer.receive()[0].kind is Kind.READY
                peer.send(frame(kind, message, payload=len(payload)) + payload)
                answers.append(peer.receive())
        return answers


def settled(path: str, reply: bytes) -> object:
    """A reply without what is another one each time."""
    if path.endswith("/Status"):
        status = pb.StatusReply.FromString(reply)
        status.time = status.uptime_seconds = 0.0
        for each in status.namespaces:
            each.age_seconds = each.idle_seconds = 0.0
        return status.SerializeToString(deterministic=True)
    if path.endswith("/Open"):
        given = bulk_pb2.OpenBulkReply.FromString(reply)
        return given.port, len(given.token), given.expires_ms
    return reply


@pytest.fixture
def node(start_node, tmp_path: Path) -> Node:
    file = tmp_path / "tokens"
    file.write_text("".join(f"{name}:{token_of(name)} {grant}\n" for name, grant in TOKENS.items()))
    file.chmod(0o600)
    return start_node(token_file=file)


@pytest.fixture
def caller(node) -> Iterator[Caller]:
    with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        yield Caller(node, channel)


@pytest.fixture
def opened_by(node, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Has a tenant open its namespace and store pages."""
    clients: list[kvstore.Client] = []

    def opened_by(tenant: str) -> Any:
        file = tmp_path / f"token-{tenant}"
        file.write_text(token_of(tenant))
        file.chmod(0o600)
        clients.append(kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=SECONDS, token_file=file))
        pages = clients[-1].namespace(layout_of(tenant))
        assert pages.store(HASHES, DATA).stored == 4
        node.store.flush()  # or what the status says would change by itself
        return pages

    yield opened_by
    for client in clients:
        client.close()


@pytest.mark.parametrize("what", [*CALLS, *BULK_CALLS])
def test_the_answer_does_not_depend_on_others(node, caller, opened_by, what):
    ask = caller.bulk_answers if isinstance(what, Kind) else caller.answers
    opened_by("b")
    before = ask(what)
    theirs = opened_by("a")
    statistics = node.store.statistics()
    assert ask(what) == before
    after = node.store.statistics()
    assert [each for each in after.namespaces if each.layout.tenant == "a"] == [
        each for each in statistics.namespaces if each.layout.tenant == "a"
    ]
    into = np.zeros_like(DATA)
    assert theirs.load(HASHES, into) == 4
    assert np.array_equal(into, DATA)
    theirs.clear()
    assert ask(what) == before


@pytest.mark.parametrize("what", [*CALLS, *BULK_CALLS])
def test_nothing_of_anothers_namespace_is_looked_at(node, caller, opened_by, what, monkeypatch):
    """Whether it is there is asked in one place alone, which decides that it is another's."""
    opened_by("b")
    opened_by("a")
    there, looked_at = node.store.namespaces.get, []
    monkeypatch.setattr(node.access, "_namespace", there)

    def get(fingerprint: bytes) -> KnownNamespace | None:
        looked_at.append(fingerprint)
        return there(fingerprint)

    monkeypatch.setattr(node.store.namespaces, "get", get)
    (caller.bulk_answers if isinstance(what, Kind) else caller.answers)(what)
    assert THEIRS not in looked_at
