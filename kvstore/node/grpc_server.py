"""A node's gRPC server: how many calls and connections it takes, and how long a silent one may stay."""

from __future__ import annotations

from concurrent import futures

import grpc

from kvstore.service.access.connection_guard import most_unauthenticated
from kvstore.service.grpc.events import MOST_WATCHERS
from kvstore.service.grpc.health_reflection import MOST_CHECKS, MOST_REFLECTIONS, MOST_WATCHES
from kvstore.service.grpc.pages import MOST_STREAMS
from kvstore.wire.messages import MOST_REQUEST_BYTES

_CONTROL_CALLS = 16
"""Control calls answered at once. One that promotes pages from disk keeps its thread while it reads."""
HANDLERS = _CONTROL_CALLS + MOST_STREAMS + MOST_WATCHES + MOST_CHECKS + MOST_REFLECTIONS + MOST_WATCHERS
"""Threads, started when needed: as many as the long calls can keep, and those for the control calls."""
_HANDSHAKE_MS = 5_000
"""How long a connection may take to say what it is."""
_IDLE_MS = 600_000
"""A connection without a call is closed; clients open another one when they need it."""
_KEEPALIVE_MS, _ALIVE_MS = 30_000, 10_000
"""How often a connection that is quiet is asked whether anybody is there, and how long for: a host that lost its power
closes nothing, and its watches would keep their slots for hours. Clients answer by themselves, and ask nothing."""
_STREAMS = 200
"""Calls at once of one connection, more than are worked on at once. A client waits with more by itself."""
_WAITING_CALLS = 256
"""Calls that may wait for a handler; more are refused with RESOURCE_EXHAUSTED."""


def make_server(
    threads: futures.ThreadPoolExecutor,
    handlers: list[grpc.GenericRpcHandler],
    interceptors: list[grpc.ServerInterceptor],
    connections: int,
) -> grpc.Server:
    """A server that listens nowhere yet.

    Args:
        threads: ``HANDLERS`` of them.
        connections: most that may stay. Twice as many unauthenticated ones as may stay are accepted besides, so that
            whoever comes to stay is, between two looks at them; more are closed before they say anything.
    """
    return grpc.server(
        threads,
        handlers=handlers,
        interceptors=interceptors,
        maximum_concurrent_rpcs=HANDLERS + _WAITING_CALLS,
        options=[
            # Two nodes must never share a port by accident.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
            # What comes before anybody here waits for it: 64 KiB of a stream, which measuring the connection's
            # bandwidth would make megabytes, of each of thousands of streams, whoever opened them.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.max_allowed_incoming_connections", connections + 2 * most_unauthenticated(connections)),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _ALIVE_MS),
            ("grpc.http2.ping_timeout_ms", _ALIVE_MS),  # a minute otherwise, whatever the option above says
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),  # or a stream that says nothing gets two of them in all
        ],
    )
