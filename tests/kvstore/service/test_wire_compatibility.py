"""A client of the first proto beside today's node: nodes are upgraded while engines of the release before run."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash
from google.protobuf import descriptor_pb2
from old_client import OldClient, old_files

import kvstore
from kvstore.layout import Layout
from kvstore.page_codes import PageTier
from kvstore.store.store import Store
from kvstore.v1 import bulk_pb2, cache_pb2

PAGE = 5000
LAYOUT = '{"block_size": 16, "model": "old", "page_bytes": 5000}'
DATA = np.random.default_rng(7).integers(0, 256, (4, PAGE), dtype=np.uint8)
HASHES = b"".join(number.to_bytes(32, "big") for number in range(4))
SUMS = [xxhash.xxh3_64_intdigest(page) for page in DATA]
ARENA = 1


@pytest.fixture
def node(start_node):
    return start_node()


@pytest.fixture
def client(node) -> Iterator[OldClient]:
    with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        yield OldClient(channel)


def open_namespace(client: OldClient):
    opened = client.call("OpenNamespace", "OpenNamespaceRequest", layout=LAYOUT)
    return client.make("PageList", fingerprint=opened.fingerprint, hashes=HASHES)


def tiers(client: OldClient, pages) -> list[int]:
    [found] = client.call("Lookup", "LookupRequest", queries=[pages]).tiers
    return list(found)


def test_every_message_field_value_and_call_is_still_what_it_was():
    """Fields may come; none goes, and none changes its name, number, type or label."""
    now = {}
    for module in (cache_pb2, bulk_pb2):
        file = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        now[file.name] = file
    assert [file.name for file in old_files()] == ["kvstore/v1/bulk.proto", "kvstore/v1/cache.proto"]
    for old in old_files():
        check_messages(old.message_type, now[old.name].message_type)
        check_enums(old.enum_type, now[old.name].enum_type)
        services = {service.name: {each.name: each for each in service.method} for service in now[old.name].service}
        for service in old.service:
            for method in service.method:
                assert services[service.name][method.name] == method


def check_messages(old, new) -> None:
    messages = {message.name: message for message in new}
    for message in old:
        fields = {field.number: field for field in messages[message.name].field}
        for field in message.field:
            same = fields[field.number]
            assert (field.name, field.type, field.label, field.type_name) == (
                same.name,
                same.type,
                same.label,
                same.type_name,
            ), f"{message.name}.{field.name}"
        check_messages(message.nested_type, messages[message.name].nested_type)
        check_enums(message.enum_type, messages[message.name].enum_type)


def check_enums(old, new) -> None:
    enums = {enum.name: {value.name: value.number for value in enum.value} for enum in new}
    for enum in old:
        for value in enum.value:
            assert enums[enum.name][value.name] == value.number


@pytest.mark.parametrize("sums_first", [True, False])
def test_pages_come_and_go_by_the_payload_streams(client, sums_first):
    pages = open_namespace(client)
    assert tiers(client, pages) == [0] * 4
    reserved = client.call("PrepareStore", "PrepareStoreRequest", pages=pages, ttl_ms=20_000)
    assert reserved.outcomes == bytes(4)
    header = client.make("StorePages", ticket=reserved.ticket, checksums=SUMS if sums_first else [])
    behind = [] if sums_first else [client.make("StorePages", checksums=SUMS).SerializeToString()]
    counts = client.store(header.SerializeToString(), DATA.tobytes(), *behind)
    assert (counts.stored, counts.present, counts.refused) == (4, 0, 0)
    assert tiers(client, pages) == [ARENA] * 4
    again = client.call("PrepareStore", "PrepareStoreRequest", pages=pages, ttl_ms=20_000)
    assert (again.ticket, again.outcomes) == (0, bytes([1] * 4))
    run, *payload = client.load(pages)
    told = client.message("PageRun").FromString(run)
    assert (list(told.tiers), list(told.checksums)) == ([ARENA] * 4, SUMS)
    assert b"".join(payload) == DATA.tobytes()


def test_the_other_calls_answer_as_they_did(client, node):
    pages = open_namespace(client)
    ticket = client.call("PrepareStore", "PrepareStoreRequest", pages=pages, ttl_ms=20_000).ticket
    client.store(client.make("StorePages", ticket=ticket, checksums=SUMS).SerializeToString(), DATA.tobytes())
    assert client.call("Flush", "FlushRequest").pages >= 0
    assert client.call("Touch", "PageList", fingerprint=pages.fingerprint, hashes=HASHES).pages == 4
    use = client.make("PageUse", fingerprint=pages.fingerprint, hashes=HASHES, read=True, missed=1)
    assert client.call("ReportUse", "UseReport", uses=[use]).pages == 4
    held = client.call("PrepareLoad", "PrepareLoadRequest", pages=pages, ttl_ms=20_000)
    assert (list(held.tiers), len(held.offsets)) == ([ARENA] * 4, 4)
    assert client.call("CompleteLoad", "CompleteLoadRequest", ticket=held.ticket).valid
    assert client.call("Pin", "PinRequest", pages=pages, seconds=60).pages == 4
    status = client.call("Status", "StatusRequest")
    assert (status.pid, status.instance) == (os.getpid(), node.instance)
    [namespace] = status.namespaces
    assert (namespace.page_bytes, namespace.arena_pages, namespace.pinned_pages) == (PAGE, 4, 4)
    assert Layout.from_json(namespace.layout) == Layout.from_json(LAYOUT)
    assert {tier.name: tier.counters["stored"] for tier in status.tiers} == {"arena": 4, "disk": 4}
    assert client.call("Unpin", "PageList", fingerprint=pages.fingerprint, hashes=HASHES).pages == 4
    assert client.call("Evict", "PageList", fingerprint=pages.fingerprint, hashes=HASHES[:64]).pages == 2
    assert client.call("Clear", "ClearRequest", fingerprint=pages.fingerprint).pages == 2
    with pytest.raises(grpc.RpcError) as caught:
        tiers(client, pages)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert ("kvstore-reason", "UnknownNamespaceError") in list(caught.value.trailing_metadata())


def test_pages_come_and_go_through_the_mapped_arena(node):
    with grpc.insecure_channel(f"unix:{node.config.socket}") as channel:
        client = OldClient(channel)
        opened = client.call("OpenNamespace", "OpenNamespaceRequest", layout=LAYOUT)
        pages = client.make("PageList", fingerprint=opened.fingerprint, hashes=HASHES)
        lock = f"new-{secrets.token_hex(16)}"
        descriptor = os.open(f"{opened.arena_directory}/clients/{lock}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        attached = client.call("Attach", "AttachRequest", lock_name=lock)
        request = {"pages": pages, "client": attached.client, "ttl_ms": 20_000}
        reserved = client.call("PrepareStore", "PrepareStoreRequest", **request)
        with (Path(opened.arena_directory) / "pages").open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            for offset, page in zip(reserved.offsets, DATA, strict=True):
                arena[offset : offset + PAGE] = page.tobytes()
            done = {"ticket": reserved.ticket, "publish": True, "client": attached.client}
            assert client.call("CompleteStore", "CompleteStoreRequest", **done).stored == 4
            held = client.call("PrepareLoad", "PrepareLoadRequest", **request)
            for offset, page in zip(held.offsets, DATA, strict=True):
                assert arena[offset : offset + PAGE] == page.tobytes()
        done = {"ticket": held.ticket, "client": attached.client}
        assert client.call("CompleteLoad", "CompleteLoadRequest", **done).valid
        os.close(descriptor)


def frame(kind: int, message: bytes = b"", payload: int = 0) -> bytes:
    """As the first release wrote it: magic, kind, milliseconds, two lengths, checksum of all that and the message."""
    fields = (
        b"KVB1" + bytes([kind, 0, 0, 0]) + (20_000).to_bytes(4, "little") + len(message).to_bytes(4, "little")
    ) + payload.to_bytes(8, "little")
    return fields + xxhash.xxh3_64_intdigest(fields + message).to_bytes(8, "little") + message


def answer(stream: socket.socket) -> tuple[int, bytes, bytes]:
    """Kind, message and payload of a frame."""

    def read(length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = stream.recv(length - len(data))
            assert piece, "the node closed the connection"
            data += piece
        return data

    header = read(32)
    assert header[:4] == b"KVB1"
    message = read(int.from_bytes(header[12:16], "little"))
    return header[4], message, read(int.from_bytes(header[16:24], "little"))


def test_pages_come_and_go_by_a_bulk_connection(client):
    pages = open_namespace(client)
    told = client.call("Open", "OpenBulkRequest")
    body = b"".join(page.tobytes() + total.to_bytes(8, "little") for page, total in zip(DATA, SUMS, strict=True))
    with socket.create_connection(("127.0.0.1", told.port), 20.0) as stream:
        stream.sendall(frame(1, told.token))
        assert answer(stream)[0] == 65
        request = client.make("PrepareStoreRequest", pages=pages, ttl_ms=20_000)
        stream.sendall(frame(3, request.SerializeToString()))
        kind, message, _ = answer(stream)
        reserved = client.message("PrepareStoreReply").FromString(message)
        assert (kind, reserved.outcomes) == (67, bytes(4))
        put = client.make("StorePages", ticket=reserved.ticket).SerializeToString()
        stream.sendall(frame(4, put, len(body)) + body)
        kind, message, _ = answer(stream)
        assert (kind, client.message("StoreCounts").FromString(message).stored) == (68, 4)
        stream.sendall(frame(2, client.make("LoadPages", pages=pages).SerializeToString()))
        kind, message, payload = answer(stream)
        assert (kind, list(client.message("PageRun").FromString(message).tiers)) == (66, [ARENA] * 4)
        assert payload == body
    settled = client.call("Settle", "SettleRequest", ticket=reserved.ticket)
    assert (settled.known, settled.stored) == (True, 4)


def test_an_older_client_is_told_of_object_storage_as_of_redis(client, monkeypatch):
    """By numbers that it knows: one of a later tier would be no tier to it."""
    pages = open_namespace(client)

    def everywhere(store, queries):
        return [bytes([PageTier.OBJECTS, PageTier.DISK, PageTier.ABSENT, PageTier.OBJECTS]) for _ in queries]

    monkeypatch.setattr(Store, "lookup", everywhere)
    assert tiers(client, pages) == [PageTier.REDIS, PageTier.DISK, PageTier.ABSENT, PageTier.REDIS]


def test_a_client_of_today_is_told_what_it_is(node, monkeypatch):
    monkeypatch.setattr(Store, "lookup", lambda store, queries: [bytes([PageTier.OBJECTS]) * 4 for _ in queries])
    with kvstore.connect(f"kv://127.0.0.1:{node.port}") as today:
        namespace = today.namespace(Layout(model="old", block_size=16, page_bytes=PAGE))
        hashes = [HASHES[at : at + 32] for at in range(0, len(HASHES), 32)]
        assert set(namespace.lookup(hashes).tiers) == {"objects"}
