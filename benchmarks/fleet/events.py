"""Page events of a fleet that one router process takes in over ZeroMQ, into an index by prefix: pages a second.

    python benchmarks/fleet/events.py [--nodes 1000] [--publishers 2] [--pages 16 32 128] [--total 4000000] [--json]

A few processes publish the streams of all nodes, each on an endpoint of its own, in the messages that nodes send: made
by the node's own ring and encoder, before the clock runs. A message tells that a prompt's pages came, and that as many
left for them. The router process subscribes to all endpoints, decodes, and keeps the index of `kvstore plan`'s router
by prefix. Nothing is dropped, so in the end the index has exactly what the nodes have: this is checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import zmq

from kvstore.cli.plan.routers import PrefixRouter
from kvstore.events.ring import EventRing
from kvstore.events.vllm_events import block_event, encode
from kvstore.layout import Layout

KEPT = 4
"""Prompts that each node has: when one more comes, the oldest leaves."""
PATIENCE_MS = 60_000
LAYOUT = Layout(model="events", block_size=64, page_bytes=2 << 20)


class EventIndex:
    """A router's end: which node has which page, by what nodes publish.

    Args:
        nodes: how many.
    """

    def __init__(self, nodes: int) -> None:
        self.router = PrefixRouter(nodes, lambda node: 0.0, 1)
        self.numbers: dict[bytes, int] = {}
        """By topic, the number of its node."""
        self.next: dict[bytes, int] = {}
        """By topic, the number of its next message."""
        self.pages = self.messages = self.bytes = self.lost = 0

    def take_in(self, topic: bytes, number: bytes, batch: bytes) -> None:
        """One message."""
        node = self.numbers.setdefault(topic, len(self.numbers))
        this = int.from_bytes(number, "big")
        self.lost += this - self.next.get(topic, this)
        self.next[topic] = this + 1
        self.messages += 1
        self.bytes += len(batch)
        for event in msgpack.unpackb(batch)[1]:
            if event["type"] == "AllBlocksCleared":
                continue  # these streams begin with nothing
            hashes = event["block_hashes"]
            self.pages += len(hashes)
            if event["type"] == "BlockStored":
                self.router.came(node, hashes)
            else:
                self.router.left(node, hashes)

    def holders(self) -> int:
        """Pages, each counted for each node that has it (four at most)."""
        return sum(len(nodes) for nodes in self.router.pages().values())


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run found."""

    nodes: int
    event_pages: int
    pages: int
    messages: int
    megabytes: float
    lost: int
    held: int
    """Pages in the index in the end."""
    seconds: float
    """From the word to begin to the last message."""
    processor_seconds: float
    """Of the router process, with ZeroMQ's own thread."""

    @property
    def rate(self) -> float:
        """Pages a second."""
        return self.pages / self.seconds


def stream(node: int, messages: int, pages: int) -> Iterator[bytes]:
    """A node's messages: in each a prompt comes, and the oldest leaves behind the first few."""
    draw = random.Random(node)
    ring = EventRing()
    reader = ring.reader()
    here: deque[list[bytes]] = deque()
    fingerprint = LAYOUT.fingerprint
    for _ in range(messages):
        noise = draw.randbytes(32 * pages)
        keys = [fingerprint + noise[at : at + 32] for at in range(0, len(noise), 32)]
        if len(here) == KEPT:
            ring.removed("arena", here.popleft())
        ring.stored("arena", [(keys[0], b""), *((key, before) for before, key in pairwise(keys))])
        here.append(keys)
        events, _ = reader.read(1 << 16, 0.0)
        yield encode(time.time(), [block_event(event, LAYOUT) for event in events])


def publish(pipe: Connection, nodes: Sequence[int], messages: int, pages: int) -> None:
    """Be some nodes: say where they listen, wait for a subscriber of each, and on a word send everything."""
    more_files()
    context = zmq.Context()
    sockets = []
    for _ in nodes:
        one = context.socket(zmq.XPUB)  # a PUB that tells of its subscribers
        one.setsockopt(zmq.SNDHWM, 0)  # all of it is in memory anyway
        one.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        one.bind("tcp://127.0.0.1:*")
        sockets.append(one)
    made = [list(stream(node, messages, pages)) for node in nodes]
    pipe.send([one.getsockopt_string(zmq.LAST_ENDPOINT) for one in sockets])
    for one in sockets:
        one.recv()
    pipe.send("subscribed")
    pipe.recv()
    for number in range(messages):
        for node, one, batches in zip(nodes, sockets, made, strict=True):
            topic = f"kv@node-{node}@events".encode()
            one.send_multipart((topic, number.to_bytes(8, "big"), batches[number]))
    pipe.recv()
    context.destroy(linger=0)


def more_files() -> None:
    """As many sockets as the system allows: there are more than 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def measure(nodes: int, publishers: int, pages: int, total: int) -> Taken:
    """One run: at least ``total`` pages are told of, in events of ``pages``."""
    more_files()
    messages = KEPT + -(-max(1, total - KEPT * nodes * pages) // (2 * pages * nodes))
    spawning = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for first in range(publishers):
        mine, theirs = spawning.Pipe()
        own = list(range(first, nodes, publishers))
        process = spawning.Process(target=publish, args=(theirs, own, messages, pages), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    context = zmq.Context()
    socket: Any = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.subscribe(b"")
        for pipe in pipes:
            for endpoint in pipe.recv():
                socket.connect(endpoint)
        for pipe in pipes:
            pipe.recv()
        index = EventIndex(nodes)
        for pipe in pipes:
            pipe.send("begin")
        began, used = time.perf_counter(), time.process_time()
        for _ in range(nodes * messages):
            index.take_in(*socket.recv_multipart())
        seconds, processor = time.perf_counter() - began, time.process_time() - used
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join()
    finally:
        context.destroy(linger=0)
        for process in processes:
            process.kill()
    held = index.holders()
    if index.lost or held != nodes * KEPT * pages:
        there = nodes * KEPT * pages
        raise SystemExit(f"the index has {held:,} pages, the nodes have {there:,}; {index.lost} messages were lost")
    megabytes = index.bytes / 1e6
    return Taken(nodes, pages, index.pages, index.messages, megabytes, index.lost, held, seconds, processor)


def main() -> None:
    """Parse the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", metavar="N", type=int, default=1000)
    parser.add_argument("--publishers", metavar="N", type=int, default=2, help="processes that are the nodes")
    parser.add_argument("--pages", metavar="N", type=int, nargs="+", default=[16, 32, 128], help="of an event")
    parser.add_argument("--total", metavar="N", type=int, default=4_000_000, help="pages to be told of, in each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [measure(options.nodes, options.publishers, pages, options.total) for pages in options.pages]
    if options.json:
        print(json.dumps([asdict(each) | {"rate": each.rate} for each in found], indent=2))
        return
    print("| nodes | pages an event | pages | messages | MB | pages a second | MB/s | processor a page |")
    print("|---|---|---|---|---|---|---|---|")
    for each in found:
        print(
            f"| {each.nodes:,} | {each.event_pages} | {each.pages:,} | {each.messages:,} | {each.megabytes:.0f} |"
            f" {each.rate:,.0f} | {each.megabytes / each.seconds:.0f} |"
            f" {1e6 * each.processor_seconds / each.pages:.2f} µs |"
        )


if __name__ == "__main__":
    main()
