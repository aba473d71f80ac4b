"""What a node says of a lower tier that does not serve: the same at every place where somebody looks."""

from __future__ import annotations

import errno
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty_files import FaultyFiles
from redis_servers import RedisServer

import kvstore
from kvstore.cli import main as cli
from kvstore.node.node import Node
from kvstore.status import TierHealth, TierState

LAYOUT = kvstore.Layout(model="tiny", dtype="bfloat16", block_size=16, page_bytes=5000)
TOKEN = "0123456789abcdef"


@pytest.fixture
def server(short_folder: Path) -> Iterator[RedisServer]:
    running = RedisServer(short_folder / "redis")
    yield running
    running.close()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFiles]:
    faulty = FaultyFiles(monkeypatch)
    yield faulty
    faulty.let_go()


def url_of(node: Node) -> str:
    return f"unix://{node.config.socket}"


def get(node: Node, path: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{node.metrics_port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def health_of(client: kvstore.Client, tier: str) -> TierHealth:
    return client.status().tier(tier).health


class Places:
    """Everything that shows a tier's health."""

    def __init__(self, node: Node, tier: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._node, self._tier, self._capsys = node, tier, capsys

    def command(self, *words: str) -> tuple[int, str]:
        code = cli.main([*words, "--url", url_of(self._node)])
        return code, self._capsys.readouterr().out

    def shows(self, state: str, reason: str) -> None:
        """At each place: this state, and why."""
        line = f"{self._tier}: {state} for "
        for command in (["status"], ["top", "--interval", "0.2", "--count", "1"]):
            [said] = [each for each in self.command(*command)[1].splitlines() if each.startswith(line)]
            assert said.endswith(f": {reason}"), said
        for command in (["status", "--json"], ["top", "--interval", "0.2", "--count", "1", "--json"]):
            tiers = json.loads(self.command(*command)[1])["tiers"]
            tier = tiers[self._tier] if isinstance(tiers, dict) else tiers[-1]
            assert (tier["health"]["state"], tier["health"]["reason"]) == (state, reason)
        code, said = self.command("doctor", "--json")
        [finding] = [each for each in json.loads(said)["findings"] if each["subject"] == f"{self._tier} tier"]
        assert finding["level"] == ("fail" if state == "down" else "warn")
        assert (code == 1) is (state == "down")
        assert f"{state} for " in finding["text"]
        assert reason in finding["text"]
        assert finding["advice"]
        well, told = get(self._node, "/health").splitlines()
        assert well == "ok"
        assert told.startswith(line)
        assert told.endswith(reason)
        tier = self._of_console()
        assert (tier["state"], tier["reason"]) == (state, reason)
        assert self._states() == {"ok": 0, "degraded": 0, "down": 0} | {state: 1}

    def show_that_it_serves(self) -> None:
        assert f"{self._tier}: " not in self.command("status")[1]
        code, said = self.command("doctor", "--json")
        assert code == 0, said
        assert get(self._node, "/health") == "ok\n"
        assert self._of_console()["state"] == "ok"
        assert self._states() == {"ok": 1, "degraded": 0, "down": 0}

    def _of_console(self) -> dict[str, str]:
        tiers = json.loads(get(self._node, "/console/data"))["tiers"]
        return next(each for each in tiers if each["name"] == self._tier)

    def _states(self) -> dict[str, int]:
        lines = [each for each in get(self._node, "/metrics").splitlines() if each.startswith("kvstore_tier_state{")]
        mine = [each for each in lines if f'tier="{self._tier}"' in each]
        return {each.partition('state="')[2].partition('"')[0]: int(float(each.split()[-1])) for each in mine}


def test_redis_that_goes_away_and_comes_back(
    start_node: Callable[..., Node],
    server: RedisServer,
    capsys: pytest.CaptureFixture[str],
    eventually: Callable[..., None],
) -> None:
    node = start_node(redis=server.url, redis_limit=64 << 20, metrics="127.0.0.1:0")
    places = Places(node, "redis", capsys)
    with kvstore.connect(url_of(node)) as client:
        eventually(lambda: health_of(client, "redis").state == TierState.OK)
        places.show_that_it_serves()
        began = health_of(client, "redis").since
        server.kill()
        eventually(lambda: health_of(client, "redis").state == TierState.DOWN)
        assert health_of(client, "redis").since >= began
        assert client.status().tier("arena").health.state == TierState.OK
        places.shows("down", f"127.0.0.1:{server.port} refused the connection")
        ended = health_of(client, "redis").since
        server.start()
        eventually(lambda: health_of(client, "redis").state == TierState.OK)
        assert health_of(client, "redis").since > ended
        places.show_that_it_serves()


def test_redis_that_is_full_takes_no_pages(
    start_node: Callable[..., Node], server: RedisServer, eventually: Callable[..., None]
) -> None:
    node = start_node(redis=server.url, redis_limit=64 << 20)
    with kvstore.connect(url_of(node)) as client:
        namespace = client.namespace(LAYOUT)
        eventually(lambda: health_of(client, "redis").state == TierState.OK)
        server.client.config_set("maxmemory", 1)
        stored = 0

        def is_degraded() -> bool:
            nonlocal stored
            stored += 1
            namespace.store(kvstore.hash_blocks([stored] * 16, 16), [np.zeros(5000, np.uint8)])
            return health_of(client, "redis").state == TierState.DEGRADED

        eventually(is_degraded)
        assert "takes no pages: 127.0.0.1:" in health_of(client, "redis").reason
        assert "OOM" in health_of(client, "redis").reason


def test_a_password_is_not_told(
    start_node: Callable[..., Node], server: RedisServer, eventually: Callable[..., None]
) -> None:
    server.client.config_set("requirepass", "right")
    node = start_node(redis=f"redis://:wr0ng-secret@127.0.0.1:{server.port}", redis_limit=64 << 20)
    with kvstore.connect(url_of(node)) as client:
        eventually(lambda: health_of(client, "redis").state == TierState.DOWN)
        reason = health_of(client, "redis").reason
        assert "invalid username-password pair" in reason
        assert "secret" not in reason
    server.client.close()


def test_a_disk_that_refuses_writes(
    start_node: Callable[..., Node],
    files: FaultyFiles,
    capsys: pytest.CaptureFixture[str],
    eventually: Callable[..., None],
) -> None:
    node = start_node(metrics="127.0.0.1:0")
    places = Places(node, "disk", capsys)
    with kvstore.connect(url_of(node)) as client:
        places.show_that_it_serves()
        files.fail(errno.EROFS, "open", "write")
        client.namespace(LAYOUT).store(kvstore.hash_blocks(list(range(16)), 16), [np.zeros(5000, np.uint8)])
        eventually(lambda: health_of(client, "disk").state == TierState.DEGRADED)
        places.shows("degraded", "writes fail, so it takes no page: Read-only file system")
        files.heal()
        eventually(lambda: health_of(client, "disk").state == TierState.OK)
        assert get(node, "/health") == "ok\n"


def test_a_spent_day_is_told(start_node: Callable[..., Node], eventually: Callable[..., None]) -> None:
    node = start_node(disk_write_limit=1 << 20)
    with kvstore.connect(url_of(node)) as client:
        hashes = kvstore.hash_blocks(list(range(16 * 400)), 16)
        client.namespace(LAYOUT).store(hashes, [np.zeros(5000, np.uint8)] * len(hashes))
        eventually(lambda: health_of(client, "disk").state == TierState.DEGRADED)
        said = "it takes no page before 00:00 UTC: the day's 1 MiB (disk_write_limit) are written"
        assert health_of(client, "disk").reason == said


def test_strangers_are_told_of_no_tier(
    start_node: Callable[..., Node], server: RedisServer, short_folder: Path, eventually: Callable[..., None]
) -> None:
    tokens = short_folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"ops:{TOKEN}\nsearch:{TOKEN[::-1]} tenant=search\n")
    node = start_node(redis=server.url, redis_limit=64 << 20, metrics="127.0.0.1:0", token_file=tokens)
    with kvstore.connect(url_of(node), token_file=tokens) as client:
        server.kill()
        eventually(lambda: health_of(client, "redis").state == TierState.DOWN)
    assert get(node, "/health") == get(node, "/health", TOKEN[::-1]) == "ok\n"
    assert "\nredis: down" in get(node, "/health", TOKEN)
