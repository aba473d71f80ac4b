"""Scripts of this folder that run beside the nodes and do what they are told, through everything that happens."""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from deployment import PATIENCE, Hosts

DEADLINE = 5.0
"""Seconds: that of the page clients' calls."""
HANG = 3 * DEADLINE
"""Seconds after which a call hung beyond its deadline, however busy this machine is."""


class Relay:
    """A script of this folder that runs in a container and answers lines of JSON; it lives through everything."""

    script = ""

    def __init__(
        self, hosts: Hosts, service: str, url: str = "", *arguments: str, environment: Mapping[str, str] = {}
    ) -> None:
        url = url or hosts.socket_url(service)
        self._process = hosts.start(service, self.script, url, *arguments, environment=environment)
        self._lines: queue.Queue[str] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        self.stored = 0
        """Pages that it was told are stored, in all of its calls."""
        threading.Thread(target=self._read, daemon=True).start()
        self.where = f"{self.script} {service} {url}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self._lines.get(timeout=seconds))
        except queue.Empty:
            pytest.fail(f"{self.where}: a call hung for {seconds:g} s")
        return reply

    def call(self, **request: Any) -> dict[str, Any]:
        """One call. It must not hang; whether it failed is the caller's to judge."""
        with self._one_at_a_time:
            self.send(**request)
            reply = self.receive(HANG)
            assert not reply.get("wrong"), (self.where, request, reply)
            self.stored += reply.get("stored", 0)
            return reply


class EngineClient(Relay):
    """``engine_client.py`` in a container: one engine."""

    script = "engine_client.py"

    def __init__(self, hosts: Hosts, service: str, *arguments: str, environment: Mapping[str, str] = {}) -> None:
        super().__init__(hosts, service, "", *arguments, environment=environment)
        self.send(prompt=-1, plain=True)
        self.receive(2 * PATIENCE)  # torch takes its time to load

    def answer(self, prompt: int, **options: Any) -> dict[str, Any]:
        """Answer a prompt; it must be answered."""
        return self.call(prompt=prompt, **options)


class PageClient(Relay):
    """``page_client.py`` in a container: one client."""

    script = "page_client.py"

    def ok(self, **request: Any) -> dict[str, Any]:
        """One call, which must not fail."""
        reply = self.call(**request)
        assert "error" not in reply, (self.where, request, reply)
        return reply

    def store(self, prompt: str, pages: int = 8) -> dict[str, Any]:
        return self.ok(do="store", prompt=prompt, pages=pages)

    def load(self, prompt: str, pages: int = 8) -> dict[str, Any]:
        return self.ok(do="load", prompt=prompt, pages=pages)

    def counters(self, tier: str) -> Counter[str]:
        return Counter(self.ok(do="status")["tiers"][tier])
