"""What `kvstore proxy --responses` costs a request that nobody asked before, and what a hit takes.

Three proxies stand before the same instances, one without responses, one with them, and one that looks for similar
prompts as well, by the lexical embedding; each request goes to all, one behind the other and in turns first, so that
whatever else the machine does befalls all. Instances answer at once. The machine's load is printed with the figures.

    python benchmarks/responses.py --requests 2000 [--redis redis://127.0.0.1:6379]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/fixtures"))

from openai_instance import OpenAIInstance  # noqa: E402
from proxy_process import ProxyProcess  # noqa: E402


class Client:
    """A connection that is kept."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)

    def seconds(self, fields: dict[str, Any], hit: bool = False) -> float:
        began = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", json.dumps(fields))
        response = self._connection.getresponse()
        response.read()
        took = time.perf_counter() - began
        assert response.status == 200
        assert (response.getheader("X-KVStore-Cache") is not None) == hit
        return took


def shown(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99))
    return f"{name:32} {p50:10.3f} {p99:10.3f}"


def asked(start: int, number: int) -> dict[str, Any]:
    """A chat that nobody asked before: another number, so that no guard lets another one answer it."""
    text = f"What does order {start + number} consist of, in a few words? " + "word " * 200
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 6}


def measure(requests: int, redis: str | None, folder: Path) -> None:
    instances = [OpenAIInstance("p"), OpenAIInstance("d")]
    proxies: list[ProxyProcess] = []
    try:
        for each in instances:
            each.behave("finished")
        where = redis or folder / "r.sqlite"
        key = folder / "key"
        key.write_text(64 * "a")
        key.chmod(0o600)
        flags = {"responses": where, "responses_key_file": key, "responses_deadline": 1000}
        proxies += [ProxyProcess(instances[:1], instances[1:], folder / "log", None)]
        proxies += [ProxyProcess(instances[:1], instances[1:], folder / "log", None, **flags)]
        flags |= {"responses": f"{where}?db=1" if redis else folder / "similar.sqlite"}
        similar = {"responses_similar": 2, "responses_compare": "short"}
        proxies += [ProxyProcess(instances[:1], instances[1:], folder / "log", None, **flags, **similar)]
        without, with_responses, with_similar = map(Client, proxies)
        off: list[float] = []
        misses: list[float] = []
        searched: list[float] = []
        hits: list[float] = []
        start = time.time_ns()
        for number in range(-50, requests):
            fields = asked(start, number)
            order = ((off, without), (misses, with_responses), (searched, with_similar))
            for times, client in (*order[number % 3 :], *order[: number % 3]):
                took = client.seconds(fields)
                if number >= 0:  # those before warm up
                    times.append(took)
        stored = 'kept_total{outcome="stored"}'
        while proxies[1].metric(stored, "kvstore_responses_") < requests + 50:
            time.sleep(0.1)
        hits += [with_responses.seconds(asked(start, number), hit=True) for number in range(requests)]
    finally:
        for each in (*proxies, *instances):
            each.kill()
    print(f"{requests} requests, {'Redis' if redis else 'SQLite'}, load {os.getloadavg()[0]:.1f}; milliseconds")
    print(f"{'':32} {'p50':>10} {'p99':>10}")
    for name, times in (("without responses", off), ("miss", misses), ("miss, similar", searched), ("hit", hits)):
        print(shown(name, times))
    for name, times in (("miss", misses), ("miss, similar", searched)):
        print(shown(f"{name}, more than without", [miss - plain for miss, plain in zip(times, off, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--redis", help="URL of a server that may be written to (default: an SQLite file)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            measure(options.requests, options.redis, Path(folder))
        except subprocess.SubprocessError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
