"""Engines and clients at work while something breaks, and what must hold then."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from deployment import NODES, Hosts, wait_until
from relays import EngineClient, PageClient

_PACE = 0.2
"""Seconds between two rounds of traffic: speed is not what is tested, and the processors are wanted elsewhere."""


class Traffic:
    """Engines answer, and clients store and load, on both hosts again and again, while something breaks.

    No call hangs, no byte and no token is wrong. No call fails either, and what was just stored is there, but for a
    host whose own node is what breaks.

    Args:
        clients: of the hosts.
        engines: of the hosts.
        right: answers of the engines.
        name: of the clients' prompts.
        breaking: the hosts whose nodes break.
    """

    def __init__(
        self,
        clients: Sequence[PageClient],
        engines: Sequence[EngineClient],
        right: Sequence[list[int]],
        name: str,
        breaking: Sequence[int],
    ) -> None:
        self._clients = clients
        self._engines = engines
        self._right = right
        self._name = name
        self._breaking = breaking
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self.rounds = [0] * len(clients)
        self.replies: list[list[dict[str, Any]]] = [[] for _ in clients]
        self._threads = [threading.Thread(target=self._run, args=(host,)) for host in range(len(clients))]

    def _run(self, host: int) -> None:
        try:
            while not self._stop.wait(_PACE):
                self._round(host, self.rounds[host])
                self.rounds[host] += 1
        except BaseException as error:  # noqa: BLE001 - told where the test waits
            self._failure = error

    def _round(self, host: int, number: int) -> None:
        prompt = number % len(self._right)
        answer = self._engines[host].answer(prompt)
        assert answer["tokens"] == self._right[prompt], (self._engines[host].where, prompt, answer)
        own = f"{self._name}/{host}/{number}"
        other = (host + 1) % len(self._clients)
        theirs = f"{self._name}/{other}/{max(0, self.rounds[other] - 2)}"  # stored a moment ago
        for do, prompt in (("store", own), ("load", own), ("load", theirs)):
            reply = self._clients[host].call(do=do, prompt=prompt, pages=4)
            self.replies[host].append(reply)
            if host in self._breaking:
                assert reply.get("error") in (None, "UnavailableError", "DeadlineError"), reply
            else:
                assert "error" not in reply, (self._clients[host].where, do, reply)
                assert prompt != own or reply.get("stored", 4) == reply.get("loaded", 4) == 4, (do, reply)

    def more(self, rounds: int, host: int | None = None) -> None:
        """Wait for so many further rounds: of one host, or of each."""
        hosts = range(len(self._clients)) if host is None else [host]
        ends = {each: self.rounds[each] + rounds for each in hosts}
        wait_until(
            lambda: self._failure or all(self.rounds[each] >= end for each, end in ends.items()), f"{rounds} rounds"
        )
        self._raise()

    def total(self, host: int, field: str) -> int:
        """Sum over a host's replies."""
        return sum(reply.get(field, 0) for reply in self.replies[host])

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for client, replies in zip(self._clients, self.replies, strict=True):
            failed = sum("error" in reply for reply in replies)
            longest = max((reply["seconds"] for reply in replies), default=0.0)
            print(f"{client.where}: {len(replies)} calls, {failed} failed, the longest {longest:.1f} s", flush=True)
        if error is None:
            self._raise()


def check_metrics(hosts: Hosts, node: str) -> None:
    """Each counter on ``/metrics`` is what the node says of itself, and no tier is above its limit."""
    before, text, after = hosts.status(node), hosts.scrape(node), hosts.status(node)
    found = re.findall(r'^kvstore_pages_total{event="(\w+)",tier="(\w+)"} (\S+)$', text, re.MULTILINE)
    for event, tier, value in found:
        assert before[tier][event] <= float(value) <= after[tier][event], (node, tier, event)
    assert {(event, tier) for event, tier, _ in found} >= {
        (event, tier)
        for tier in ("arena", "disk", "redis")
        for event in ("asked", "hit", "missed", "stored", "corrupt")
    }
    used, limit = (
        dict(re.findall(rf'^kvstore_tier_{what}_bytes{{tier="(\w+)"}} (\S+)$', text, re.MULTILINE))
        for what in ("used", "limit")
    )
    assert used.keys() == limit.keys() == before.keys()
    assert all(float(used[tier]) <= float(limit[tier]) for tier in used), (node, used, limit)


def check_back_to_normal(
    hosts: Hosts, clients: Sequence[PageClient], name: str, measured: Sequence[str] = NODES
) -> None:
    """Wait until each node shares new pages with the other one, and every service is healthy, with no help.

    The metrics of the nodes ``measured`` must be true then.
    """
    for host, client in enumerate(clients):
        other = clients[(host + 1) % len(clients)]
        tries = iter(range(1 << 20))

        def shared(host: int = host, client: PageClient = client, other: PageClient = other) -> bool:
            prompt = f"{name}/normal/{host}/{next(tries)}"  # noqa: B023 - used up before the next turn
            if client.call(do="store", prompt=prompt, pages=4).get("stored") != 4:
                return False
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                if other.call(do="lookup", prompt=prompt, pages=4).get("prefix") == 4:
                    return other.load(prompt, 4)["tiers"] == {"redis": 4}
            return False

        wait_until(shared, f"new pages of host {host + 1} are found by the other one")
    for service in ("redis", *NODES):
        wait_until(lambda service=service: hosts.is_healthy(service), f"{service} is healthy")
    for node in measured:
        check_metrics(hosts, node)
