"""The standard health and reflection services, as clients that were built elsewhere see them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import grpc
import pytest
from google.protobuf import descriptor_pb2

import kvstore.node.grpc_server
import kvstore.service.grpc.health_reflection
from kvstore.v1 import cache_pb2
from kvstore.v1.cache_pb2_grpc import CacheStub

SECONDS = 50.0
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
"""HealthCheckResponse as bytes: field 1, an enum."""


def text(field: int, value: str) -> bytes:
    """A string field as it lies in a message."""
    return bytes([field << 3 | 2, len(value)]) + value.encode()


def field_of(message: bytes, number: int) -> list[bytes]:
    """The length-delimited fields of this number in a message of such fields and varints."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        length = varint()
        if tag & 7 == 2:
            if tag >> 3 == number:
                found.append(message[at : at + length])
            at += length
    return found


class TestHealth:
    @pytest.mark.parametrize("service", ["", "kvstore.v1.Cache", "kvstore.v1.Pages"])
    def test_the_node_and_its_services_serve(self, wire, service):
        check = wire.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(text(1, service) if service else b"", timeout=SECONDS) == SERVING
        watch = wire.channel.unary_stream("/grpc.health.v1.Health/Watch")(text(1, service), timeout=SECONDS)
        assert next(watch) == SERVING
        watch.cancel()

    def test_another_service_is_unknown(self, wire):
        check = wire.channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError, match="no service 'other'") as caught:
            check(text(1, "other"), timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = wire.channel.unary_stream("/grpc.health.v1.Health/Watch")
        assert next(watch(text(1, "other"), timeout=SECONDS)) == SERVICE_UNKNOWN

    def test_watchers_hear_that_the_node_stops(self, wire):
        watches = [wire.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=SECONDS) for _ in range(3)]
        assert [next(watch) for watch in watches] == [SERVING] * 3
        assert wire.node.stop()
        assert [list(watch) for watch in watches] == [[NOT_SERVING]] * 3

    def test_watchers_do_not_keep_the_node_from_answering(self, wire, eventually):
        watch = wire.channel.unary_stream("/grpc.health.v1.Health/Watch")
        most = kvstore.service.grpc.health_reflection.MOST_WATCHES
        watches = []
        for _ in range(most):  # one behind the other: few may be waited for until their request has come
            watches.append(watch(b"", timeout=SECONDS))
            assert next(watches[-1]) == SERVING
        with pytest.raises(grpc.RpcError, match=f"{most} health watches are open, the limit is {most}") as caught:
            next(watch(b"", timeout=SECONDS))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert CacheStub(wire.channel).Status(cache_pb2.StatusRequest(), timeout=SECONDS).pid
        watches.pop().cancel()

        def another_one() -> bool:
            fresh = watch(b"", timeout=SECONDS)
            try:
                watches.append(fresh)
                return next(fresh) == SERVING
            except grpc.RpcError:
                return False

        eventually(another_one)
        for each in watches:
            each.cancel()


WATCHER = """
import sys, time
import grpc
watch = grpc.insecure_channel(sys.argv[1]).unary_stream("/grpc.health.v1.Health/Watch")(b"")
print(next(watch), flush=True)
for answer in watch:
    pass
"""


def test_a_peer_that_is_gone_without_a_word_keeps_no_slot(start_node, connect, eventually, monkeypatch):
    """As when its host loses its power: nothing closes the connection."""
    monkeypatch.setattr(kvstore.node.grpc_server, "_KEEPALIVE_MS", 500)
    # Not so short that who lives is too late on a busy machine.
    monkeypatch.setattr(kvstore.node.grpc_server, "_ALIVE_MS", 5000)
    monkeypatch.setattr(kvstore.service.grpc.health_reflection, "MOST_WATCHES", 1)
    wire = connect(start_node())
    watch = wire.channel.unary_stream("/grpc.health.v1.Health/Watch")

    def there_is_room() -> bool:
        mine = watch(b"", timeout=SECONDS)
        try:
            return next(mine) == SERVING
        except grpc.RpcError:
            return False
        finally:
            mine.cancel()

    command = [sys.executable, "-c", WATCHER, f"127.0.0.1:{wire.node.port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as gone:
        assert gone.stdout is not None
        try:
            assert gone.stdout.readline()
            assert not there_is_room()
            gone.send_signal(signal.SIGSTOP)
            eventually(there_is_room)
        finally:
            gone.kill()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
class TestReflection:
    def ask(self, wire, version: str, *requests: bytes) -> list[bytes]:
        method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        return list(wire.channel.stream_stream(method)(iter(requests), timeout=SECONDS))

    def test_services_are_listed(self, wire, version):
        [reply] = self.ask(wire, version, text(7, "*"))
        [listed] = field_of(reply, 6)
        names = {field_of(service, 1)[0].decode() for service in field_of(listed, 1)}
        assert {"kvstore.v1.Cache", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= names

    @pytest.mark.parametrize(
        "symbol", ["kvstore.v1.Cache", "kvstore.v1.Cache.Lookup", "kvstore.v1.PageList", "kvstore.v1.PageTier"]
    )
    def test_the_file_of_a_symbol(self, wire, version, symbol):
        [reply] = self.ask(wire, version, text(4, symbol))
        [described] = field_of(reply, 4)
        [file] = field_of(described, 1)
        assert file == cache_pb2.DESCRIPTOR.serialized_pb
        services = descriptor_pb2.FileDescriptorProto.FromString(file).service
        assert [method.name for method in services[0].method] == [
            method.name for method in cache_pb2.DESCRIPTOR.services_by_name["Cache"].methods
        ]

    def test_files_by_name_and_everything_on_one_stream(self, wire, version):
        requests = [text(3, "kvstore/v1/cache.proto"), text(3, "grpc/health/v1/health.proto"), text(7, "")]
        first, second, third = self.ask(wire, version, *requests)
        assert field_of(field_of(first, 4)[0], 1) == [cache_pb2.DESCRIPTOR.serialized_pb]
        health = descriptor_pb2.FileDescriptorProto.FromString(field_of(field_of(second, 4)[0], 1)[0])
        assert [method.name for method in health.service[0].method] == ["Check", "Watch"]
        assert field_of(third, 6)
        assert field_of(first, 2) == requests[:1], "the request comes back with its answer"

    @pytest.mark.parametrize(
        "request_",
        [text(4, "kvstore.v1.Nothing"), text(4, ""), text(3, "no/such.proto"), text(4, "kvstore.v1.Cache.No")],
    )
    def test_what_is_not_here_is_not_found(self, wire, version, request_):
        [reply] = self.ask(wire, version, request_)
        [error] = field_of(reply, 7)
        assert error.startswith(b"\x08\x05"), "error_code 5 is NOT_FOUND"
        assert field_of(error, 2)[0]

    @pytest.mark.parametrize("request_", [text(6, "kvstore.v1.PageList"), b"\x2a\x00", b""])
    def test_what_is_not_offered_says_so(self, wire, version, request_):
        [reply] = self.ask(wire, version, request_)
        assert field_of(reply, 7)[0].startswith(b"\x08\x0c"), "error_code 12 is UNIMPLEMENTED"


def test_idle_reflection_streams_do_not_keep_the_node_from_stopping(start_node, connect):
    wire = connect(start_node(drain_seconds=8.0))
    method = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    waiting = threading.Event()

    def requests():
        yield text(7, "")
        waiting.wait(SECONDS)

    stream = wire.channel.stream_stream(method)(requests(), timeout=SECONDS)
    next(stream)
    assert wire.node.stop(), "everything was written back in time"
    waiting.set()
