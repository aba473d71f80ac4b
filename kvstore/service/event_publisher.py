"""Publishes page events over ZeroMQ in vLLM's format, for routers that send a prompt where its prefix is.

A message has three frames: topic, number (8 bytes, big-endian, one more each time), batch. Topics are
``kv@HOST@NAMESPACE``, so that a subscriber can choose by prefix; numbers count all topics. A subscriber's queue is
bounded: who reads too slowly, or was there before the node started again, sees a gap in the numbers, and asks the
replay endpoint for the batches from a number on, as of vLLM. It answers with those that are remembered, and an empty
one with the number -1 behind them. Where the number was forgotten, or is of an earlier start (0 always is),
``AllBlocksCleared`` and what is there now come before them. An answer without an end has gaps: ask again.

Without keys ZeroMQ asks nobody who they are, so pages of tenants are left out, but for those tenants that are named.
With keys (:mod:`kvstore.events.curve_keys`) those alone get anything whose keys are known.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.errors import ConfigError, ResourceError
from kvstore.events.curve_keys import CurveKeys
from kvstore.events.ring import PageEvent
from kvstore.events.vllm_events import CLEARED, block_event, encode
from kvstore.namespaces.registry import KnownNamespace
from kvstore.security.grants import EVERY_TENANT
from kvstore.store.store import Store
from kvstore.store.watch import Start

if TYPE_CHECKING:
    import zmq

MOST_QUEUED = 1000
"""Most messages that wait for one subscriber: up to 35 KB each."""
REPLAY_BYTES = 16 << 20
"""Most bytes of batches that can be asked for again."""
_LOOK_MS = 250
"""How long a request for a replay is waited for before it is looked whether all of this ends."""
_LONGEST_REST = 1.0
"""Seconds at most; a replay is followed by a rest as long as itself, so that those who ask without end don't take a
processor."""
_MOST_WALKS = 3
"""Of one replay over what is there: so often it is begun anew when more was published meanwhile than is remembered."""
_END = (-1).to_bytes(8, "big", signed=True)
_REQUEST_BYTES = 8
_LONGEST_FRAME = 1024
"""Of those who ask for a replay, ZeroMQ's own greeting included."""
_LONGEST_TOPIC = 1 << 16
"""Of those who subscribe, ZeroMQ's own greeting included."""
_HANDSHAKE_MS = 5000
"""How long ZeroMQ's greeting may take."""
_SEND_MS = 1000
"""How long somebody who asked for a replay may leave it unread."""
_MOST_SAID = 256
"""Of most tenants the log says that they are left out."""
_log = logging.getLogger("kvstore.events.publisher")  # not one of those that callers can make write: never limited


class Message(NamedTuple):
    """One batch as it was sent."""

    number: int
    topic: bytes
    batch: bytes


class EventPublisher:
    """Publishes what a store tells until it is stopped.

    Args:
        store: that is told of.
        endpoint: to listen on for subscribers, ``tcp://127.0.0.1:5557`` or ``ipc:///path``.
        replay: to listen on for those who missed something; empty: nowhere.
        tenants: whose pages are told of, beside those of layouts that name no tenant; ``EVERY_TENANT`` among them: all.
        keys: file of the endpoints' secret key, and folder of the public keys of those who may connect; None: whoever
            reaches them may.

    Raises:
        ConfigError: pyzmq is not installed, or a key can't be used.
        ResourceError: an endpoint can't be had.
    """

    def __init__(
        self,
        store: Store,
        endpoint: str,
        replay: str = "",
        tenants: Collection[str] = (),
        keys: tuple[Path, Path] | None = None,
    ) -> None:
        try:
            import zmq  # only who publishes needs it
        except ImportError as error:
            raise ConfigError("events needs pyzmq: install kvstore-offload[events]") from error
        self._zmq = zmq
        self._store = store
        self._tenants = tenants
        self._left_out: set[str] = set()
        """Tenants of which the log says that they are."""
        self._host = socket.gethostname()
        self._next = int(time.time() * 1e6)
        """From the time on, so that whoever knows numbers of an earlier start sees a gap."""
        self._guard = threading.Lock()
        """Of what was sent, which two threads look at."""
        self._sent: deque[Message] = deque()
        self._sent_bytes = 0
        self._seen: dict[bytes, KnownNamespace] = {}
        self._stopping = threading.Event()
        self._context = zmq.Context(io_threads=1)
        self._replayer: zmq.Socket[bytes] | None = None
        self._keys: CurveKeys | None = None
        try:
            self._keys = CurveKeys(self._context, *keys) if keys is not None else None
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.MAXMSGSIZE, _LONGEST_TOPIC)
            self.endpoint = self._listen(self._publisher, endpoint, MOST_QUEUED)
            if replay:
                self._replayer = self._context.socket(zmq.ROUTER)
                self._replayer.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replayer.setsockopt(zmq.SNDTIMEO, _SEND_MS)
                self._replayer.setsockopt(zmq.MAXMSGSIZE, _LONGEST_FRAME)
                self.replay = self._listen(self._replayer, replay, MOST_QUEUED)
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._replaying = threading.Thread(target=self._answer_replays, name="kvstore-replays", daemon=True)
        self._thread.start()
        if self._replayer is not None:
            self._replaying.start()

    def stop(self) -> None:
        """Publish no more, and close the endpoints."""
        self._stopping.set()
        self._thread.join()
        if self._replayer is not None:
            self._replaying.join()
        self._close()

    def read_keys(self) -> None:
        """Read again whose keys are good, for who connects from now on.

        Raises:
            ConfigError: they can't be read; those of before stay.
        """
        if self._keys is not None:
            self._keys.read_clients()

    def _close(self) -> None:
        if self._keys is not None:
            self._keys.stop()
        self._context.destroy(linger=0)

    def _listen(self, listener: zmq.Socket[bytes], endpoint: str, queued: int) -> str:
        listener.setsockopt(self._zmq.LINGER, 0)
        listener.setsockopt(self._zmq.SNDHWM, queued)
        listener.setsockopt(self._zmq.IPV6, int("[" in endpoint))
        listener.setsockopt(self._zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if self._keys is not None:
            self._keys.guard(listener)
        old = os.umask(0o177)  # of an ipc endpoint
        try:
            listener.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ResourceError(f"can't listen on {endpoint} for events: {error.strerror or error}") from error
        finally:
            os.umask(old)
        return listener.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except Exception:  # noqa: BLE001 - subscribers learn by a fresh start that something went wrong
                _log.exception("events: starting over")
                self._stopping.wait(1.0)

    def _follow(self) -> None:
        for told in self._store.follow():
            if self._stopping.is_set():
                return
            if isinstance(told, Start):
                if told.missed:
                    _log.warning("events: %d were not published in time; starting over", told.missed)
                for topic in self._topics():
                    self._publish(topic, [CLEARED])
            elif not isinstance(told, Iterable):
                continue
            else:
                for topic, events in self._batches(told):
                    self._publish(topic, events)

    def _publish(self, topic: bytes, events: list[dict[str, Any]]) -> None:
        batch = encode(time.time(), events)
        with self._guard:  # remembered before it is sent: who begins to listen in between finds it in a replay
            message = Message(self._next, topic, batch)
            self._next += 1
            self._sent.append(message)
            self._sent_bytes += len(batch)
            while self._sent_bytes > REPLAY_BYTES:
                self._sent_bytes -= len(self._sent.popleft().batch)
        self._publisher.send_multipart((topic, message.number.to_bytes(8, "big"), batch))

    def _batches(self, told: Iterable[PageEvent]) -> Iterator[tuple[bytes, list[dict[str, Any]]]]:
        """A batch for each run of events of one namespace."""
        for fingerprint, events in groupby(told, lambda event: event.fingerprint):
            known = self._known(fingerprint)
            if known is not None and self._tells_of(known.layout.tenant):
                yield self._topic(known), [block_event(event, known.layout) for event in events]

    def _known(self, fingerprint: bytes) -> KnownNamespace | None:
        """A namespace, also behind its end: its pages leave then."""
        known = self._store.namespaces.get(fingerprint)
        if known is None:
            return self._seen.get(fingerprint)
        if self._seen.get(fingerprint) is not known:
            self._seen = {each.fingerprint: each for each in self._store.namespaces.known()}
        return known

    def _topics(self) -> list[bytes]:
        return [self._topic(known) for known in self._store.namespaces.known() if self._tells_of(known.layout.tenant)]

    def _tells_of(self, tenant: str) -> bool:
        if not tenant or tenant in self._tenants or EVERY_TENANT in self._tenants:
            return True
        if tenant not in self._left_out and len(self._left_out) < _MOST_SAID:
            self._left_out.add(tenant)
            _log.info("events: pages of tenant %r are not published; events_tenants says whose are", tenant)
        return False

    def _topic(self, known: KnownNamespace) -> bytes:
        return f"kv@{self._host}@{known.name}".encode()

    # -- who missed something ----------------------------------------------------------------------------------------

    def _answer_replays(self) -> None:
        """In a thread of its own: however many ask, and however slowly they read, the stream goes on."""
        assert self._replayer is not None
        while not self._stopping.is_set():
            try:
                if self._replayer.poll(_LOOK_MS):
                    began = time.monotonic()
                    self._answer(self._replayer, self._replayer.recv_multipart())
                    self._stopping.wait(min(time.monotonic() - began, _LONGEST_REST))
            except Exception:  # noqa: BLE001 - others ask, too
                _log.exception("events: a replay failed")
                self._stopping.wait(_LONGEST_REST)

    def _answer(self, replayer: zmq.Socket[bytes], frames: list[bytes]) -> None:
        match frames:
            case [peer, b"", start] if len(start) == _REQUEST_BYTES:
                try:
                    for topic, number, batch in self._replay(int.from_bytes(start, "big")):
                        if self._stopping.is_set():
                            return
                        replayer.send_multipart((peer, b"", topic, number, batch))
                except self._zmq.ZMQError as error:  # it went away, or does not read
                    _log.debug("events: a replay was given up: %s", error)
            case _:
                _log.debug("events: no request for a replay: %d frames", len(frames))

    def _replay(self, start: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """What was sent from a number on, with its end. Without an end when what is remembered was outrun again and
        again: who asked must ask once more."""
        void: set[bytes] = set()
        for _ in range(_MOST_WALKS):
            with self._guard:
                sent = self._since(start)
                start = start if sent is not None else self._next
            if sent is None:
                number = (start - 1).to_bytes(8, "big")
                void.update(self._topics())
                for topic in sorted(void):
                    yield topic, number, encode(time.time(), [CLEARED])
                for piece in self._store.contents():
                    for topic, events in self._batches(piece):
                        void.add(topic)
                        yield topic, number, encode(time.time(), events)
                with self._guard:  # behind what is there: so what changed meanwhile is among these
                    sent = self._since(start)
            if sent is not None:
                for message in sent:
                    yield message.topic, message.number.to_bytes(8, "big"), message.batch
                yield b"", _END, b""
                return
        _log.debug("events: a replay was given up: more was published meanwhile than is remembered")

    def _since(self, start: int) -> list[Message] | None:
        """What was sent from a number on; None: some of it is forgotten. The caller has the guard."""
        if start < (self._sent[0].number if self._sent else self._next):
            return None
        return [message for message in self._sent if message.number >= start]
