"""The process at the other end of raw TCP and plain gRPC streams, which paths between hosts are measured beside.

No framing, no index, no checksums: the bytes of one call from one process's memory into the other's.
Prints one line with both ports, and ends with its standard input.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvstore.wire.messages import fill, raw_messages

Bytes = npt.NDArray[np.uint8]
REQUEST = struct.Struct("<?QQ")
"""Whether it is a store; where in the memory, and how many bytes."""
LOAD, STORE = "/bench.Plain/Load", "/bench.Plain/Store"


def main(size: int) -> None:
    """Serve ``size`` bytes of memory."""
    memory = _shared_memory(size)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, memory), daemon=True).start()
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[_Handler(memory)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(listener.getsockname()[1], port, flush=True)
    sys.stdin.read()


def _shared_memory(size: int) -> Bytes:
    """The kind of memory that an arena is: other memory has larger pages, and copies faster."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    memory[:] = 1
    return memory


def _accept(listener: socket.socket, memory: Bytes) -> None:
    while True:
        connected, _ = listener.accept()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connected, memory.data), daemon=True).start()


def _answer(connected: socket.socket, memory: memoryview) -> None:
    while request := connected.recv(REQUEST.size, socket.MSG_WAITALL):
        store, at, length = REQUEST.unpack(request)
        if store:
            receive(connected, memory[at : at + length])
            connected.sendall(b"!")
        else:
            connected.sendall(memory[at : at + length])


def receive(connected: socket.socket, into: memoryview) -> None:
    """Receive so many bytes into place."""
    while into:
        into = into[connected.recv_into(into) :]


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._load: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(self._send)
        self._store: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._receive)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return {LOAD: self._load, STORE: self._store}.get(handler_call_details.method)

    def _send(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        _, at, length = REQUEST.unpack(request)
        yield from raw_messages([self._memory[at : at + length]])

    def _receive(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        _, at, length = REQUEST.unpack(next(messages))
        fill([self._memory[at : at + length]], messages)
        return b"!"


if __name__ == "__main__":
    main(int(sys.argv[1]))
