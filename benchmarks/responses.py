"""What `kvstore proxy --responses` costs a request that nobody asked before, and what a hit takes.

Two proxies stand before the same instances, one with responses and one without; each pair of requests goes to both, one
behind the other and in turns first, so that whatever else the machine does befalls both. Instances answer at once.

    python benchmarks/responses.py --requests 2000 [--redis redis://127.0.0.1:6379]
"""

from __future__ import annotations

import argparse
import http.client
import json
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
        self._connection.request("POST", "/v1/completions", json.dumps(fields))
        response = self._connection.getresponse()
        response.read()
        took = time.perf_counter() - began
        assert response.status == 200
        assert (response.getheader("X-KVStore-Cache") is not None) == hit
        return took


def shown(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99))
    return f"{name:24} {p50:10.3f} {p99:10.3f}"


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
        without, with_responses = map(Client, proxies)
        off: list[float] = []
        misses: list[float] = []
        hits: list[float] = []
        start = time.time_ns()
        for number in range(-50, requests):
            fields = {"prompt": f"{start} {number} " + "word " * 200, "temperature": 0, "max_tokens": 6}
            for times, client in ((off, without), (misses, with_responses))[:: 1 if number % 2 else -1]:
                took = client.seconds(fields)
                if number >= 0:  # those before warm up
                    times.append(took)
        stored = 'kept_total{outcome="stored"}'
        while proxies[1].metric(stored, "kvstore_responses_") < requests + 50:
            time.sleep(0.1)
        for number in range(requests):
            fields = {"prompt": f"{start} {number} " + "word " * 200, "temperature": 0, "max_tokens": 6}
            hits.append(with_responses.seconds(fields, hit=True))
    finally:
        for each in (*proxies, *instances):
            each.kill()
    print(f"{requests} requests, {'Redis' if redis else 'SQLite'}, milliseconds   p50        p99")
    for name, times in (("without responses", off), ("miss", misses), ("hit", hits)):
        print(shown(name, times))
    print(shown("miss, more than without", [miss - plain for miss, plain in zip(misses, off, strict=True)]))


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
