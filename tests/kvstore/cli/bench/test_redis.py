"""``kvstore bench redis`` as people run it, with little to move."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from kvstore.cli.bench.redis_baseline import own_server
from kvstore.cli.main import EXIT_FAILED, EXIT_USAGE, main

FEW = ["--rounds", "1", "--size", "8MiB"]

pytestmark = pytest.mark.skipif(
    not (shutil.which("redis-server") or shutil.which("valkey-server")), reason="redis-server is missing"
)


@pytest.fixture
def url() -> Iterator[str]:
    with own_server() as urls:
        yield urls[1]


def test_json_has_both_ways_and_all_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "redis", *FEW, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in answer["speed"]] == ["unix"] * 5 + ["redis"] * 5
    for row in answer["speed"]:
        assert all(row[name] > 0 for name in row if name.endswith(("gbps", "bare", "ms")))
        for name in ("store_cpu", "bare_store_cpu", "load_cpu", "bare_load_cpu"):
            assert row[name]["client_ms"] > 0 and row[name]["server_ms"] > 0
    assert {row["page_bytes"] for row in answer["speed"]} >= {64 << 10, 2 << 20}


def test_a_server_that_is_given_is_left_as_it_was(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    with Redis.from_url(url) as client:
        client.set("mine", b"1")
        assert main(["bench", "redis", "--redis", url, *FEW, "--plot", str(plot)]) == 0
        assert plot.read_text().count("<polyline") == 2
        out = capsys.readouterr().out
        assert "of bare" in out
        assert "processor time for 8 MiB: ms of the client + of the server" in out
        assert client.keys("*") == [b"mine"]


def test_a_server_with_pages_in_it_is_not_touched(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Redis.from_url(url) as client:
        client.set("kvstore:buckets", b"7")
        assert main(["bench", "redis", "--redis", url, *FEW]) == EXIT_USAGE
        assert "there are pages of kvstore in it" in capsys.readouterr().err
        assert client.keys("*") == [b"kvstore:buckets"]


@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (["--redis", "redis+cluster://127.0.0.1:1"], "one server is measured", EXIT_USAGE),
        (["--redis", "redis://127.0.0.1:1"], "can't be reached", EXIT_FAILED),
        (["--redis", "http://there"], "unknown scheme", EXIT_USAGE),
        (["--rounds", "0"], "--rounds is 0", EXIT_USAGE),
        (["--size", "1MiB"], "--size is 1 MiB", EXIT_USAGE),
    ],
)
def test_what_can_not_be_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str, code: int
) -> None:
    assert main(["bench", "redis", *flags]) == code
    answer = capsys.readouterr()
    assert words in answer.err
    assert answer.err.startswith("kvstore bench redis: ")
    assert answer.err.count("\n") == 1


def test_a_server_that_is_full_ends_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Redis.from_url(url) as client:
        client.config_set("maxmemory", 4 << 20)
        assert main(["bench", "redis", "--redis", url, *FEW]) == EXIT_FAILED
        assert "does not take what is stored" in capsys.readouterr().err
        assert client.keys("*") == []
