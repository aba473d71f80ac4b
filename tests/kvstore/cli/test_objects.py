"""``kvstore objects policy``, ``check --objects``, ``bench objects`` and ``doctor``, against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from made_pages import make_page
from s3_server import URL, S3Server, running_s3

from kvstore.cli.doctor.objects import check_objects
from kvstore.cli.main import main
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError

pytest.importorskip("obstore", reason="the extra `objects` is not installed")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with running_s3(monkeypatch) as running:
        yield running


def test_a_policy_deletes_what_is_old_below_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["objects", "policy", "s3://bucket/fleet/a", "--days", "30"]) == 0
    (rule,) = json.loads(capsys.readouterr().out)["Rules"]
    assert rule["Filter"] == {"Prefix": "fleet/a/"}
    assert rule["Expiration"] == {"Days": 30}


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@bucket/fleet", "s3://bucket/fleet?secret=SECRET", "bucket", "s3://"])
def test_what_is_no_bucket_is_refused_without_repeating_secrets(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["objects", "policy", url]) == 2
    assert "SECRET" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match="objects") as refused:
        NodeConfig(objects=url)
    assert "SECRET" not in str(refused.value)


def test_a_bucket_is_checked_pack_by_pack(server: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    from kvstore.tiers.objects import ObjectTier

    tier = ObjectTier(URL, 64 << 20, deadline=20.0)
    for number in range(2):
        assert all(tier.write([make_page(10 * number + n, 5_000) for n in range(3)]))
    tier.close()
    assert main(["check", "--objects", URL]) == 0
    assert "2 packs with 6 pages: 0 damaged, 0 that nobody is told of" in capsys.readouterr().out
    name = server.names("fleet/packs/")[0]
    body = bytearray(server.objects[name].body)
    body[8192] ^= 1
    server.put(name, bytes(body))
    assert main(["check", "--objects", URL, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["damaged"] == 1
    assert sum(pack["damaged_pages"] for pack in told["packs"]) == 1


def test_doctor_tries_the_bucket(server: S3Server) -> None:
    config = NodeConfig(objects=URL)
    (verdict,) = check_objects(config)
    assert verdict.level == "ok"
    assert not server.names()
    server.faults.status = 403
    (verdict,) = check_objects(config)
    assert verdict.level == "fail"
    assert "403" in verdict.text
    assert "AKTEST" not in verdict.text + verdict.advice


def test_the_benchmark_finds_all_that_it_wrote_and_leaves_nothing(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "objects", URL, "--bytes", "4MiB", "--page", "256KiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["written"] == told["found"] == told["pages"] == 16
    assert not server.names("fleet/bench-")


@pytest.mark.parametrize(("status", "told"), [(404, "404"), (403, "403")])
def test_a_bucket_that_can_not_be_written_is_said_in_a_line(
    server: S3Server, capsys: pytest.CaptureFixture[str], status: int, told: str
) -> None:
    server.faults.status = status
    assert main(["bench", "objects", URL, "--bytes", "1MiB", "--page", "256KiB", "--json"]) == 1
    said = capsys.readouterr().err
    assert f"{URL} can't be measured" in said
    assert told in said
    assert "AKTEST" not in said
