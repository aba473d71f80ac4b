"""Tenants: what a token's holder finds, may do, and can't tell of others; by every call, connection and page."""

from __future__ import annotations

import os
import secrets
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from bulk_peer import Peer, frame, payload_of

import kvstore
from kvstore.config.rules import TenantRule
from kvstore.errors import (
    ConfigError,
    LimitExceededError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownNamespaceError,
)
from kvstore.hashing import checksum_of
from kvstore.namespaces import registry as namespaces
from kvstore.node.node import Node
from kvstore.security.secret_files import read_tokens
from kvstore.service.access.methods import NEEDS
from kvstore.service.grpc.health_reflection import STANDARD_FILES
from kvstore.v1 import bulk_pb2, cache_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.bulk_pb2_grpc import BulkStub
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore.wire.frame import Kind
from kvstore.wire.messages import LOAD_STREAM, STORE_STREAM

SECONDS = 50.0
PAGE = 5000
TOKENS = {
    "operator": "",
    "monitor": "rights=read",
    "a": "tenant=a share=common",
    "b": "tenant=b share=common",
    "b-reader": "tenant=b rights=read",
    "b-writer": "tenant=b rights=read,write",
    "c": "tenant=c",
    "own": "tenant= rights=read,write",
}


def token_of(name: str) -> str:
    return f"{name}-token-of-some-length"


def hashes_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def layout_of(tenant: str) -> kvstore.Layout:
    return kvstore.Layout(model="tiny", block_size=16, page_bytes=PAGE, tenant=tenant)


DATA = np.random.default_rng(0).integers(0, 256, (4, PAGE), dtype=np.uint8)


@dataclass
class Tenants:
    node: Node
    file: Path

    def client(self, name: str, *, unix: bool = False) -> kvstore.Client:
        file = self.file.parent / f"token-{name}"
        file.write_text(token_of(name))
        file.chmod(0o600)
        url = f"unix://{self.node.config.socket}" if unix else f"kv://127.0.0.1:{self.node.port}"
        return kvstore.connect(url, timeout=SECONDS, token_file=file)

    def get(self, name: str, path: str) -> str:
        """A page of the metrics port."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.node.metrics_port}{path}")
        request.add_header("Authorization", f"Bearer {token_of(name)}")
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return reply.read().decode()

    def remove(self, name: str) -> None:
        """Take a token out of the file, and have the node read it again."""
        write_tokens(self.file, {key: value for key, value in TOKENS.items() if key != name})
        self.node.reload(self.node.config)


def write_tokens(file: Path, tokens: dict[str, str]) -> None:
    file.write_text("".join(f"{name}:{token_of(name)} {grant}\n" for name, grant in tokens.items()))
    file.chmod(0o600)


@pytest.fixture
def tenants(start_node, tmp_path) -> Tenants:
    file = tmp_path / "tokens"
    write_tokens(file, TOKENS)
    return Tenants(start_node(token_file=file, metrics="0"), file)


def at_once(pages: pb.PageList) -> bytes:
    """What begins a store whose pages come with it."""
    request = pb.PrepareStoreRequest(pages=pages, ttl_ms=1000)
    return pb.StorePages(ticket=secrets.randbits(63), request=request).SerializeToString()


def checksums_of(data: np.ndarray) -> bytes:
    return pb.StorePages(checksums=[checksum_of(page) for page in data]).SerializeToString()


class Caller:
    """Every call that there is, with one token."""

    def __init__(self, channel: grpc.Channel, name: str) -> None:
        self.how = {"metadata": [("authorization", f"Bearer {token_of(name)}")], "timeout": SECONDS}
        self.cache, self.bulk = CacheStub(channel), BulkStub(channel)
        self.load = channel.unary_stream(LOAD_STREAM, request_serializer=pb.LoadPages.SerializeToString)
        self.save = channel.stream_unary(STORE_STREAM)

    def of_namespace(self, fingerprint: bytes) -> dict[str, grpc.RpcError | object]:
        """What each call that names a namespace answers: its reply, or its error's code and text."""
        pages = pb.PageList(fingerprint=fingerprint, hashes=b"".join(hashes_of(4)))
        cache, how = self.cache, self.how
        calls = {
            "Lookup": lambda: cache.Lookup(pb.LookupRequest(queries=[pages]), **how),
            "PrepareStore": lambda: cache.PrepareStore(pb.PrepareStoreRequest(pages=pages, ttl_ms=1000), **how),
            "PrepareLoad": lambda: cache.PrepareLoad(pb.PrepareLoadRequest(pages=pages, ttl_ms=1000), **how),
            "Touch": lambda: cache.Touch(pages, **how),
            "Evict": lambda: cache.Evict(pages, **how),
            "Pin": lambda: cache.Pin(pb.PinRequest(pages=pages, seconds=60), **how),
            "Unpin": lambda: cache.Unpin(pages, **how),
            "Load": lambda: list(self.load(pb.LoadPages(pages=pages), **how)),
            "Store": lambda: self.save(iter([at_once(pages), DATA.tobytes(), checksums_of(DATA)]), **how),
            "ReportUse": lambda: cache.ReportUse(
                pb.UseReport(uses=[pb.PageUse(fingerprint=fingerprint, hashes=pages.hashes, read=True)]), **how
            ),
            "Clear": lambda: cache.Clear(pb.ClearRequest(fingerprint=fingerprint), **how),
        }
        return {name: self.answer(call) for name, call in calls.items()}

    @staticmethod
    def answer(call) -> object:
        try:
            return call()
        except grpc.RpcError as error:
            return error.code(), error.details()


@pytest.fixture
def caller(tenants):
    with grpc.insecure_channel(f"127.0.0.1:{tenants.node.port}") as channel:
        yield lambda name: Caller(channel, name)


class TestWhatIsThere:
    def test_another_tenants_namespace_is_one_that_does_not_exist(self, tenants, caller):
        """By every call that names one, the answer is word for word that for a namespace that nobody has."""
        with tenants.client("a") as client:
            pages = client.namespace(layout_of("a"))
            assert pages.store(hashes_of(4), DATA).stored == 4
            tenants.node.store.flush()
            before = tenants.node.store.statistics()
            nobodys = layout_of("nobody").fingerprint
            theirs, none = caller("b").of_namespace(pages.fingerprint), caller("b").of_namespace(nobodys)
            for name, answer in theirs.items():
                told = [
                    str(each).replace(which.hex()[:16], "…")
                    for each, which in ((answer, pages.fingerprint), (none[name], nobodys))
                ]
                assert told[0] == told[1], name
                assert name == "ReportUse" or "NOT_FOUND" in told[0], name
            assert tenants.node.store.statistics() == before
            into = np.zeros_like(DATA)
            assert pages.load(hashes_of(4), into) == 4
            assert np.array_equal(into, DATA)

    def test_nor_by_a_bulk_connection(self, tenants, caller):
        with tenants.client("a") as client:
            pages = client.namespace(layout_of("a"))
            pages.store(hashes_of(4), DATA)
        given = caller("b").bulk.Open(bulk_pb2.OpenBulkRequest(), **caller("b").how).token
        listed = pb.PageList(fingerprint=pages.fingerprint, hashes=hashes_of(1)[0])
        with Peer(tenants.node, frame(Kind.HELLO, given)) as peer:
            assert peer.receive()[0].kind is Kind.READY
            peer.load(listed)
            assert peer.failed().startswith("UnknownNamespaceError")
            peer.send(frame(Kind.RESERVE, pb.PrepareStoreRequest(pages=listed, ttl_ms=1000).SerializeToString()))
            assert peer.failed().startswith("UnknownNamespaceError")
            sent = payload_of(DATA[:1])
            peer.send(frame(Kind.PUT, at_once(listed), payload=len(sent)) + sent)
            assert peer.failed().startswith("UnknownNamespaceError")
            peer.put(12345, sent)  # the number is the key to its reservation; this one is none
            assert peer.receive()[0].kind is Kind.STORED
            whole = pb.StorePages(ticket=12345, request=pb.PrepareStoreRequest(pages=listed, ttl_ms=1000))
            body = payload_of(DATA[:1])
            peer.send(frame(Kind.PUT, whole.SerializeToString(), payload=len(body)) + body)
            assert peer.failed().startswith("UnknownNamespaceError")
        assert tenants.node.store.statistics().arena_pages == 4

    def test_nor_by_a_stream_that_reserves_for_itself(self, tenants, caller):
        with tenants.client("a") as client:
            pages = client.namespace(layout_of("a"))
        listed = pb.PageList(fingerprint=pages.fingerprint, hashes=hashes_of(1)[0])
        request = pb.PrepareStoreRequest(pages=listed, ttl_ms=1000)
        whole = pb.StorePages(ticket=12345, checksums=[checksum_of(DATA[0])], request=request).SerializeToString()
        code, _ = caller("b").answer(lambda: caller("b").save(iter([whole, DATA[0].tobytes()]), **caller("b").how))
        assert code is grpc.StatusCode.NOT_FOUND
        assert tenants.node.store.statistics().arena_pages == 0
        caller("a").save(iter([whole, DATA[0].tobytes()]), **caller("a").how)
        assert tenants.node.store.statistics().arena_pages == 1

    def test_tokens_for_bulk_connections_are_left_for_others(self, tenants, caller):
        tenants.node._bulk.tokens.seconds = 600.0
        a, b = caller("a"), caller("b")
        for _ in range(128):
            a.bulk.Open(bulk_pb2.OpenBulkRequest(), **a.how)
        code, text = a.answer(lambda: a.bulk.Open(bulk_pb2.OpenBulkRequest(), **a.how))
        assert (code, text[:8]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "128 toke")
        assert b.bulk.Open(bulk_pb2.OpenBulkRequest(), **b.how).token

    def test_two_tenants_have_the_same_model_and_other_pages(self, tenants):
        with tenants.client("a") as first, tenants.client("b") as second:
            ours, theirs = first.namespace(layout_of("a")), second.namespace(layout_of("b"))
            ours.store(hashes_of(4), DATA)
            assert theirs.lookup(hashes_of(4)).prefix == 0
            theirs.store(hashes_of(4), DATA[::-1].copy())
            into = np.zeros_like(DATA)
            assert ours.load(hashes_of(4), into) == 4
            assert np.array_equal(into, DATA)

    @pytest.mark.parametrize("tenant", ["b", "", "a2", "A", "nobody"])
    def test_a_layout_of_another_tenant_is_not_opened(self, tenants, tenant):
        with tenants.client("a") as client, pytest.raises(PermissionDeniedError, match="the token a is for tenant 'a'"):
            client.namespace(layout_of(tenant))
        assert not tenants.node.store.namespaces.known()

    def test_a_token_of_layouts_without_a_tenant_leaves_namespaces_for_others(self, tenants, monkeypatch):
        monkeypatch.setattr(namespaces, "MOST_NAMESPACES", 8)
        layouts = [kvstore.Layout(model=f"m{number}", block_size=16, page_bytes=PAGE) for number in range(4)]
        with tenants.client("own") as client, tenants.client("operator") as operator:
            for layout in layouts[:2]:
                client.namespace(layout)
            with pytest.raises(LimitExceededError, match="layouts without a tenant have 2 namespaces, the limit is 2"):
                client.namespace(layouts[2])
            operator.namespace(layouts[2])
            client.namespace(layouts[2])

    def test_who_may_not_write_opens_what_is_there_and_nothing_new(self, tenants):
        with tenants.client("b") as client, tenants.client("b-reader") as reader, tenants.client("monitor") as monitor:
            for each in (reader, monitor):
                with pytest.raises(PermissionDeniedError, match="a new one needs the right 'write'"):
                    each.namespace(layout_of("b"))
            assert not tenants.node.store.namespaces.known()
            client.namespace(layout_of("b")).store(hashes_of(4), DATA)
            for each in (reader, monitor):
                assert each.namespace(layout_of("b")).load(hashes_of(4), np.zeros_like(DATA)) == 4

    def test_a_shared_namespace_is_there_for_those_whose_tokens_share_it(self, tenants):
        with tenants.client("a") as first, tenants.client("b") as second, tenants.client("c") as third:
            first.namespace(layout_of("common")).store(hashes_of(4), DATA)
            into = np.zeros_like(DATA)
            assert second.namespace(layout_of("common")).load(hashes_of(4), into) == 4
            assert np.array_equal(into, DATA)
            with pytest.raises(PermissionDeniedError, match="token c is for tenant 'c'"):
                third.namespace(layout_of("common"))
            assert [each.name for each in third.status().namespaces] == []

    def test_a_token_of_every_tenant_sees_all(self, tenants):
        with tenants.client("operator") as operator, tenants.client("a") as client:
            client.namespace(layout_of("a")).store(hashes_of(4), DATA)
            operator.namespace(layout_of("b")).store(hashes_of(2), DATA[:2])
            status = operator.status()
            assert {each.arena_pages for each in status.namespaces} == {4, 2}
            assert status.tier("arena").counters["stored"] == 6
            assert operator.flush() >= 0
            assert operator.namespace(layout_of("a")).evict(hashes_of(4)) == 4

    def test_a_tenant_measures_its_own_pages_alone(self, tenants):
        with tenants.client("a") as client, tenants.client("b") as other:
            client.namespace(layout_of("a")).store(hashes_of(4), DATA)
            ours = other.namespace(layout_of("b"))
            before = other.status()
            client.namespace(layout_of("a")).load(hashes_of(4), np.zeros_like(DATA))
            client.namespace(layout_of("a")).evict(hashes_of(2))
            after = other.status()
            for status in (before, after):
                assert [each.fingerprint for each in status.namespaces] == [ours.fingerprint]
                assert [(tier.name, tier.used_bytes, tier.pages) for tier in status.tiers] == [("arena", 0, 0)]
                assert set(status.tier("arena").counters.values()) == {0}
                assert (status.clients, status.arena_directory, status.disk_directory) == (0, "", "")
            ours.store(hashes_of(3), DATA[:3])
            [arena] = other.status().tiers
            assert (arena.used_bytes, arena.pages) == (3 * 8192, 3)
            ours.load([*hashes_of(3), b"no" * 16], np.zeros_like(DATA))
            [arena] = other.status().tiers
            assert (arena.counters["stored"], arena.counters["asked"], arena.counters["hit"]) == (3, 4, 3)
            with pytest.raises(PermissionDeniedError, match="Flush needs a token of every tenant"):
                other.flush()

    def test_metrics_tell_a_tenant_of_its_own_namespaces_alone(self, tenants):
        with tenants.client("a") as client, tenants.client("b") as other:
            ours, theirs = client.namespace(layout_of("a")), other.namespace(layout_of("b"))
            ours.store(hashes_of(4), DATA)
            theirs.store(hashes_of(3), DATA[:3])
        texts = {name: tenants.get(name, "/metrics") for name in ("a", "b", "b-reader", "c", "monitor", "operator")}
        for name, text in texts.items():
            sees = {"a": "a", "b": "b", "b-reader": "b", "c": ""}.get(name, "ab")
            for tenant, space in (("a", ours), ("b", theirs)):
                assert (space.fingerprint.hex()[:12] in text) == (tenant in sees), name
            assert ("kvstore_call_seconds" in text) == (name in ("monitor", "operator"))
            assert ("process_cpu_seconds" in text) == (name in ("monitor", "operator"))
        assert 'kvstore_tier_pages{tier="arena"} 3.0' in texts["b"]
        assert 'kvstore_tier_pages{tier="arena"} 0.0' in texts["c"]
        assert 'kvstore_pages_total{event="stored",tier="arena"} 3.0' in texts["b"]
        with tenants.client("b") as other:
            assert other.namespace(layout_of("b")).clear() == 3
        counted = 'kvstore_pages_total{event="stored",tier="arena"} 3.0'
        assert (counted in tenants.get("b", "/metrics"), counted in tenants.get("c", "/metrics")) == (True, False)
        for path in ("/console", "/console/data"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                tenants.get("b", path)
            assert caught.value.code in (403, 404)
            caught.value.close()

    def test_what_is_said_of_others_use_is_passed_over(self, tenants, caller):
        """Also beside a call of one's own."""
        with tenants.client("a") as client:
            theirs = client.namespace(layout_of("a"))
            theirs.store(hashes_of(4), DATA)
        with tenants.client("b") as client:
            ours = client.namespace(layout_of("b"))
            ours.store(hashes_of(2), DATA[:2])
        b = caller("b")
        uses = [
            pb.PageUse(fingerprint=each, hashes=b"".join(hashes_of(2)), read=True)
            for each in (theirs.fingerprint, ours.fingerprint)
        ]
        asked = tenants.node.store.statistics().counters["asked"]
        assert b.cache.ReportUse(pb.UseReport(uses=uses), **b.how).pages == 2
        listed = pb.PageList(fingerprint=ours.fingerprint, hashes=hashes_of(1)[0])
        request = pb.PrepareLoadRequest(pages=listed, ttl_ms=1000, used=pb.UseReport(uses=uses))
        assert len(b.cache.PrepareLoad(request, **b.how).tiers) == 1
        assert tenants.node.store.statistics().counters["asked"] == asked + 2 + 2 + 1

    def test_lookups_are_counted_in_ones_own_namespaces_alone(self, tenants, caller):
        with tenants.client("a") as client:
            theirs = client.namespace(layout_of("a"))
        with tenants.client("b") as client:
            ours = client.namespace(layout_of("b"))
        b = caller("b")
        lookups = [
            pb.LookupCount(fingerprint=each, asked=50, arena=4) for each in (theirs.fingerprint, ours.fingerprint)
        ]
        b.cache.ReportUse(pb.UseReport(lookups=lookups), **b.how)
        listed = pb.PageList(fingerprint=ours.fingerprint, hashes=hashes_of(1)[0])
        request = pb.PrepareLoadRequest(pages=listed, ttl_ms=1000, used=pb.UseReport(lookups=lookups))
        b.cache.PrepareLoad(request, **b.how)
        code, text = b.answer(lambda: b.cache.ReportUse(pb.UseReport(lookups=lookups[1:] * 4097), **b.how))
        assert (code, text) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "4097 counts of lookups in one report, the limit is 4096",
        )
        assert tenants.node.store.statistics().total["looked_up"] == 100
        for tenant, counted in (("a", (0, 0)), ("b", (100, 8))):
            with tenants.client(tenant) as client:
                status = client.status()
                assert (status.lookups.asked, status.lookups.found) == counted

    def test_who_maps_the_arena_is_not_impersonated(self, tenants, caller):
        """A number of somebody's who shares the arena would make what lies in a free slot a page of one's own."""
        with kvstore.connect(f"unix://{tenants.node.config.socket}") as attached:
            attached.namespace(layout_of("a")).store(hashes_of(1), DATA[:1])
            [number] = tenants.node.store._state.clients.numbers()
            client = tenants.node.store._state._arena_tag() | number
            with tenants.client("b") as other:
                ours = other.namespace(layout_of("b"))
            b = caller("b")
            listed = pb.PageList(fingerprint=ours.fingerprint, hashes=hashes_of(1)[0])
            for call in (
                lambda: b.cache.PrepareStore(pb.PrepareStoreRequest(pages=listed, ttl_ms=999, client=client), **b.how),
                lambda: b.cache.CompleteStore(pb.CompleteStoreRequest(ticket=1, publish=True, client=client), **b.how),
                lambda: b.cache.PrepareLoad(pb.PrepareLoadRequest(pages=listed, ttl_ms=999, client=client), **b.how),
                lambda: b.cache.CompleteLoad(pb.CompleteLoadRequest(ticket=1, client=client), **b.how),
            ):
                code, text = b.answer(call)
                assert (code, text) == (
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "this client is not attached to the node's arena",
                )


READING = {"Lookup", "PrepareLoad", "Touch", "Load", "ReportUse"}
WRITING = {"PrepareStore", "Store", "Evict"}
ADMINISTRATION = {"Pin", "Unpin", "Clear"}


class TestRights:
    @pytest.mark.parametrize(
        ("name", "allowed"),
        [("b-reader", READING), ("b-writer", READING | WRITING), ("b", READING | WRITING | ADMINISTRATION)],
    )
    def test_what_each_right_is_for(self, tenants, caller, name, allowed):
        with tenants.client("b") as client:
            pages = client.namespace(layout_of("b"))
            pages.store(hashes_of(4), DATA)
        for call, answer in caller(name).of_namespace(pages.fingerprint).items():
            denied = isinstance(answer, tuple) and answer[0] is grpc.StatusCode.PERMISSION_DENIED
            assert denied == (call not in allowed), (call, answer)
            assert not isinstance(answer, tuple) or denied, (call, answer)
        assert bool(tenants.node.store.namespaces.known()) == ("Clear" not in allowed)

    def test_a_reader_reads_and_stores_nothing(self, tenants):
        with tenants.client("b") as client:
            client.namespace(layout_of("b")).store(hashes_of(4), DATA)
        with tenants.client("b-reader") as reader:
            pages = reader.namespace(layout_of("b"))
            into = np.zeros_like(DATA)
            assert pages.load(hashes_of(4), into) == 4
            assert np.array_equal(into, DATA)
            with pytest.raises(PermissionDeniedError, match="right 'write'"):
                pages.store([bytes(32)], DATA[:1])
            with pytest.raises(PermissionDeniedError, match="durability needs the right 'write'"):
                reader.namespace(layout_of("b"), durability="disk")

    def test_every_method_says_what_it_needs(self):
        """One that is forgotten is for operators alone; so is one that nobody has."""
        from google.protobuf import descriptor_pb2

        methods = {LOAD_STREAM, STORE_STREAM}
        for data in (cache_pb2.DESCRIPTOR.serialized_pb, bulk_pb2.DESCRIPTOR.serialized_pb, *STANDARD_FILES):
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            for service in file.service:
                methods |= {f"/{file.package}.{service.name}/{method.name}" for method in service.method}
        open_to_all = {method for method in methods if method.startswith("/grpc.health.")}
        assert methods - open_to_all <= set(NEEDS)

    def test_the_arena_is_mapped_by_those_alone_who_may_do_everything(self, tenants):
        """Over the Unix socket a tenant's token takes the payload streams, to its own pages alone."""
        for name, mapped in (("a", False), ("monitor", False), ("operator", True)):
            with tenants.client(name, unix=True) as client:
                if name == "monitor":
                    with pytest.raises(PermissionDeniedError):
                        client.namespace(layout_of("a")).store(hashes_of(4), DATA)
                else:
                    pages = client.namespace(layout_of("a"))
                    pages.store(hashes_of(4), DATA)
                    into = np.zeros_like(DATA)
                    assert pages.load(hashes_of(4), into) == 4
                    assert np.array_equal(into, DATA)
                assert (client.arena is not None) == mapped, name
        with kvstore.connect(f"unix://{tenants.node.config.socket}", timeout=SECONDS) as client:
            assert client.status().pid == os.getpid()  # its user needs no token
        file = tenants.file.with_name("wrong")
        file.write_text("some-other-token-of-some-length")
        file.chmod(0o600)
        with (
            kvstore.connect(f"unix://{tenants.node.config.socket}", timeout=SECONDS, token_file=file) as client,
            pytest.raises(UnauthenticatedError),
        ):
            client.status()

    def test_a_token_without_a_tenants_name_is_for_layouts_without_one(self, tenants):
        with tenants.client("own") as client:
            assert client.namespace(layout_of("")).store(hashes_of(4), DATA).stored == 4
            with pytest.raises(PermissionDeniedError, match="is for layouts without a tenant"):
                client.namespace(layout_of("a"))


class TestRotation:
    def test_a_token_that_is_removed_ends_what_it_opened(self, tenants):
        """By gRPC, and on a bulk connection that is open. What others do goes on."""
        with tenants.client("a") as client, tenants.client("b") as other:
            pages, theirs = client.namespace(layout_of("a")), other.namespace(layout_of("b"))
            pages.store(hashes_of(4), DATA)
            theirs.store(hashes_of(4), DATA)
            assert tenants.node._bulk.connections == 2
            tenants.remove("a")
            into = np.zeros_like(DATA)
            for _ in range(2):
                with pytest.raises(UnauthenticatedError):
                    pages.load(hashes_of(4), into)
            with pytest.raises(UnauthenticatedError):
                client.status()
            assert theirs.load(hashes_of(4), into) == 4

    def test_on_the_open_connection_itself(self, tenants, caller, eventually):
        with tenants.client("a") as client:
            pages = client.namespace(layout_of("a"))
            pages.store(hashes_of(1), DATA[:1])
        eventually(lambda: tenants.node._bulk.connections == 0)
        a = caller("a")
        listed = pb.PageList(fingerprint=pages.fingerprint, hashes=hashes_of(1)[0])
        given, late = (a.bulk.Open(bulk_pb2.OpenBulkRequest(), **a.how).token for _ in range(2))
        with Peer(tenants.node, frame(Kind.HELLO, given)) as peer:
            assert peer.receive()[0].kind is Kind.READY
            peer.load(listed)
            header, _ = peer.receive()
            assert header.kind is Kind.RUN
            peer.read(header.payload)
            tenants.remove("a")
            peer.load(listed)
            assert peer.failed().startswith("UnauthenticatedError")
            assert peer.is_closed()
        with Peer(tenants.node, frame(Kind.HELLO, late)) as peer:
            assert peer.failed().startswith("UnauthenticatedError")
        eventually(lambda: tenants.node._bulk.connections == 0)


def test_a_store_whose_pages_come_with_it_is_one_request(tenants, caller):
    with tenants.client("a") as client:
        pages = client.namespace(layout_of("a"))
    given = caller("a").bulk.Open(bulk_pb2.OpenBulkRequest(), **caller("a").how).token
    sent = payload_of(DATA[:1])
    tenants.node.limits._clock = lambda: 0.0  # nothing is given back meanwhile
    tenants.node.limits.replace([TenantRule(name="a", requests_per_second=4)])
    with Peer(tenants.node, frame(Kind.HELLO, given)) as peer:
        assert peer.receive()[0].kind is Kind.READY
        for _ in range(4):
            listed = pb.PageList(fingerprint=pages.fingerprint, hashes=hashes_of(1)[0])
            peer.send(frame(Kind.PUT, at_once(listed), payload=len(sent)) + sent)
            assert peer.receive()[0].kind is Kind.STORED
        peer.send(frame(Kind.PUT, at_once(listed), payload=len(sent)) + sent)
        assert peer.failed().startswith("LimitExceededError")


class TestReports:
    """Of what a client looked up and used: they leave its tenant's requests alone, and have a bound of their own."""

    @pytest.fixture
    def limited(self, tenants) -> Tenants:
        """Five requests and ten reports are left to the tenant a, and nothing is given back."""
        tenants.node.limits._clock = lambda: 0.0
        return tenants

    def test_they_take_no_requests(self, limited, eventually):
        with limited.client("a") as client:
            pages = client.namespace(layout_of("a"))
            pages.store(hashes_of(4), DATA)
            limited.node.limits.replace([TenantRule(name="a", requests_per_second=5)])
            for lookups in range(1, 6):
                assert pages.lookup(hashes_of(4)).prefix == 4
                eventually(lambda told=4 * lookups: limited.node.store.statistics().total["looked_up"] == told)
            assert not limited.node.limits.refused()
            with pytest.raises(LimitExceededError, match="limit of 5 requests a second"):
                pages.lookup(hashes_of(4))

    def test_they_can_not_be_a_flood(self, limited, caller):
        a = caller("a")
        limited.node.limits.replace([TenantRule(name="a", requests_per_second=5)])
        for _ in range(10):
            a.cache.ReportUse(pb.UseReport(), **a.how)
        with pytest.raises(grpc.RpcError, match="limit of 10 reports a second"):
            a.cache.ReportUse(pb.UseReport(), **a.how)
        assert limited.node.limits.refused() == {("a", "reports"): 1}
        a.cache.Status(pb.StatusRequest(), **a.how)


def test_a_token_is_refused_also_when_the_disk_cannot_be_made_smaller(tenants, monkeypatch):
    def fail(*given: object, **named: object) -> None:
        raise OSError(5, "Input/output error")

    node = tenants.node
    monkeypatch.setattr(node.store.lower_tiers.own[0]._reclaimer, "make_space", fail)
    write_tokens(tenants.file, {name: grant for name, grant in TOKENS.items() if name != "a"})
    limit = node.config.disk_limit // 2
    assert node.reload(replace(node.config, disk_limit=limit)) == (["disk_limit"], [])
    assert node.config.disk_limit == limit
    assert node.access.accept(f"Bearer {token_of('a')}") is None
    assert node.access.accept(f"Bearer {token_of('b')}") is not None


def test_a_token_is_refused_while_the_disk_hangs_and_the_node_can_stop(tenants):
    """Neither waits until the disk has become smaller."""
    node, stop = tenants.node, threading.Event()
    write_tokens(tenants.file, {name: grant for name, grant in TOKENS.items() if name != "a"})
    config = replace(node.config, disk_limit=node.config.disk_limit // 2)
    reloading = threading.Thread(target=node.reload, args=(config, stop.is_set), daemon=True)
    with node.store.lower_tiers.own[0]._log_lock:  # as whoever writes to it
        reloading.start()
        deadline = time.monotonic() + SECONDS
        while node.access.accept(f"Bearer {token_of('a')}") is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert reloading.is_alive()
        stop.set()
        reloading.join(SECONDS)
        assert not reloading.is_alive()


class TestTheFile:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("name:{} tenant=a b", "a token may be followed by tenant="),
            ("{} right=read", "a token may be followed by tenant="),
            ("{} rights=read,all", "'all' is not a right"),
            ("{} rights=", "'' is not a right"),
            ("{} tenant=a tenant=b", "tenant is given twice"),
            ("{} tenant=a/b", "tenant=a/b: a name has"),
            ("{} tenant=a share=*", r"share=\*: a name has"),
            ("{} share=common", "share is for tokens of one tenant"),
            ("a:{} tenant=a share=b\nb:{}x tenant=b", "share=b: that is a tenant"),
        ],
    )
    def test_lines_that_cannot_be_right(self, tmp_path, text, words):
        file = tmp_path / "tokens"
        file.write_text(text.format(token_of("some"), token_of("some")))
        file.chmod(0o600)
        with pytest.raises(ConfigError, match=words) as caught:
            read_tokens(file)
        assert token_of("some") not in str(caught.value)

    def test_a_plain_token_may_do_everything(self, tmp_path):
        file = tmp_path / "tokens"
        file.write_text(f"{token_of('plain')}\nnamed:{token_of('other')} # tenant=a\n")
        file.chmod(0o600)
        assert [grant.all_of_it for grant in read_tokens(file).values()] == [True, True]
        assert [grant.name for grant in read_tokens(file).values()] == ["line 1", "named"]


def test_foreign_and_absent_take_the_same_way(tenants):
    """Nothing of a foreign namespace is looked at, so that there is no time to measure: the store is not asked."""
    with tenants.client("a") as client:
        pages = client.namespace(layout_of("a"))
        pages.store(hashes_of(4), DATA)
    asked = []
    store = tenants.node.store
    for name in ("lookup", "prepare_load", "prepare_store", "touch", "evict", "pin", "unpin", "clear"):
        setattr(store, name, lambda *given, name=name, **named: asked.append(name))
    with grpc.insecure_channel(f"127.0.0.1:{tenants.node.port}") as channel:
        for fingerprint in (pages.fingerprint, layout_of("nobody").fingerprint):
            Caller(channel, "b").of_namespace(fingerprint)
    assert asked == []
    with pytest.raises(UnknownNamespaceError):
        b = tenants.node.access.accept(f"Bearer {token_of('b')}")
        tenants.node.access.check_pages(b, pages.fingerprint, "read")


@pytest.mark.parametrize(("name", "labels"), [("b-reader", ("first",)), ("b-writer", ("first", "second"))])
def test_who_may_only_read_brings_no_label(tenants, name, labels):
    """It could bring another rule."""
    with tenants.client("b") as owner, tenants.client(name) as caller:
        pages = owner.namespace(layout_of("b"), label="first")
        assert pages.store(hashes_of(1), DATA[:1]).stored == 1
        assert caller.namespace(layout_of("b"), label="second").lookup(hashes_of(1)).prefix == 1
        assert [each.labels for each in owner.status().namespaces] == [labels]
