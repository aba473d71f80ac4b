"""`kvstore config show`, SIGHUP, and `kvstore top`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from node_process import ROOT, NodeProcess

import kvstore
from kvstore.cli import main as cli
from kvstore.cli import serve as serve_command
from kvstore.errors import ConfigError, UnauthenticatedError

OLD, NEW = "a-token-of-some-length", "another-token-of-some-length"

HANGING_DISK = """
import sys, threading
from kvstore.cli.main import main
from kvstore.tiers.disk.tier import DiskTier

def hang(tier, limit_bytes):
    print("makes room", file=sys.stderr, flush=True)
    threading.Event().wait()

DiskTier.set_limit = hang
sys.exit(main(sys.argv[1:]))
"""


class TestConfigShow:
    def test_each_value_has_its_origin(self, tmp_path: Path, monkeypatch, capsys) -> None:
        file = tmp_path / "kvstore.toml"
        file.write_text('arena = "2GiB"\ndisk_limit = "3GiB"\nredis_limit = "4GiB"\n')
        monkeypatch.setenv("KVSTORE_DISK_LIMIT", "5GiB")
        monkeypatch.setenv("KVSTORE_REDIS_LIMIT", "6GiB")
        assert cli.main(["config", "show", "--config", str(file), "--redis-limit", "7GiB", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["arena"] == {"value": 2 << 30, "origin": str(file)}
        assert shown["disk_limit"] == {"value": 5 << 30, "origin": "KVSTORE_DISK_LIMIT"}
        assert shown["redis_limit"] == {"value": 7 << 30, "origin": "--redis-limit"}
        assert shown["listen"] == {"value": None, "origin": "default"}
        assert shown["insecure"] == {"value": False, "origin": "default"}

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("redis://me:a@se:cret@10.0.0.5:6379/1", "redis://me:***@10.0.0.5:6379/1"),
            ("rediss://:secret@cache", "rediss://:***@cache"),
            (
                "redis+sentinel://a:1,b:2/it?sentinel_password=secret&db=1",
                "redis+sentinel://a:1,b:2/it?sentinel_password=***&db=1",
            ),
            ("redis://10.0.0.5:6379/1", "redis://10.0.0.5:6379/1"),
        ],
    )
    def test_no_password_is_printed(self, url: str, shown: str, capsys) -> None:
        assert cli.main(["config", "show", "--redis", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["redis"]["value"] == shown

    def test_a_table(self, capsys) -> None:
        assert cli.main(["config", "show", "--arena", "1GiB"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["arena", "1", "GiB", "--arena"] in lines

    @pytest.mark.parametrize(
        ("flags", "words"),
        [(["--arena", "much"], "arena"), (["--listen", "0.0.0.0:1"], "TLS"), (["--tls-key", "x"], "tls_cert")],
    )
    def test_what_serve_would_refuse(self, flags: list[str], words: str, capsys) -> None:
        assert cli.main(["config", "show", *flags]) == cli.EXIT_USAGE
        said = capsys.readouterr()
        assert words in said.err
        assert not said.out


class TestHangup:
    @pytest.fixture
    def tokens(self, tmp_path: Path) -> Path:
        tokens = tmp_path / "tokens"
        tokens.write_text(OLD + "\n")
        tokens.chmod(0o600)
        return tokens

    @staticmethod
    def may_call(node: NodeProcess, folder: Path, token: str, monkeypatch) -> bool:
        file = folder / "mine"
        file.write_text(token)
        file.chmod(0o600)
        with kvstore.connect(node.kv_url, token_file=file, timeout=20.0) as client:
            try:
                client.status()
            except UnauthenticatedError:
                return False
        return True

    def test_tokens_are_rotated_while_it_runs(
        self, node_process: Callable[..., NodeProcess], tmp_path: Path, tokens: Path, eventually, monkeypatch
    ) -> None:
        node = node_process(token_file=str(tokens))
        assert self.may_call(node, tmp_path, OLD, monkeypatch)
        assert not self.may_call(node, tmp_path, NEW, monkeypatch)
        tokens.write_text(NEW + "\n")
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: "tokens were reloaded" in node.errors.read_text())
        assert self.may_call(node, tmp_path, NEW, monkeypatch)
        assert not self.may_call(node, tmp_path, OLD, monkeypatch)
        tokens.write_text("short\n")
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: "nothing was reloaded" in node.errors.read_text())
        assert self.may_call(node, tmp_path, NEW, monkeypatch), "a mistake changes nothing"

    @pytest.mark.parametrize("way", ["bulk", "streams"])
    def test_a_client_goes_on_while_tokens_are_rotated(
        self, node_process: Callable[..., NodeProcess], tmp_path: Path, tokens: Path, eventually, way: str
    ) -> None:
        """Without a call that fails, and without being made anew: nobody restarts every engine for a token."""
        grant = " tenant=mine"  # of a tenant: its pages do not go through the mapped arena
        tokens.write_text(OLD + grant + "\n")
        mine = tmp_path / "mine"
        mine.write_text(OLD)
        mine.chmod(0o600)
        node = node_process(token_file=str(tokens))
        reloads = 0

        def reload(text: str) -> None:
            nonlocal reloads
            reloads += 1
            tokens.write_text(text)
            os.kill(node.pid, signal.SIGHUP)
            eventually(lambda: node.errors.read_text().count("tokens were reloaded") == reloads)

        layout = kvstore.Layout(model="m", tenant="mine", block_size=16, page_bytes=4096)
        data = np.arange(3 * 4096, dtype=np.uint32).view(np.uint8).reshape(-1, 4096)
        hashes = [number.to_bytes(32, "big") for number in range(len(data))]
        url = node.kv_url if way == "bulk" else node.url
        with kvstore.connect(url, token_file=mine, timeout=20.0) as client:
            pages = client.namespace(layout)
            for place, (before, after) in enumerate([(OLD, NEW), (NEW, OLD), (OLD, NEW)]):
                reload(f"{before}{grant}\n{after}{grant}\n")
                mine.write_text(after)
                reload(f"{after}{grant}\n")
                if place == 1:  # the first request behind a rotation is a store, a load, or one without pages
                    assert pages.load(hashes[:4], np.zeros_like(data[:4])) == 4
                if place == 2:
                    assert client.status().pid == node.pid
                part = slice(4 * place, 4 * place + 4)
                assert pages.store(hashes[part], data[part]).stored == 4
                loaded = np.zeros_like(data[part])
                assert pages.load(hashes[part], loaded) == 4
                assert np.array_equal(loaded, data[part])
            reload(f"{OLD}{grant}\n")
            with pytest.raises(UnauthenticatedError):
                client.status()

    def test_what_needs_a_restart_is_said(
        self, node_process: Callable[..., NodeProcess], tmp_path: Path, eventually
    ) -> None:
        file = tmp_path / "kvstore.toml"
        file.write_text("disk_deadline = 9\n")
        node = node_process(config=str(file))
        file.write_text('disk_deadline = 8\nlog_level = "debug"\ndrain_seconds = 7\n')
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: "only a restart changes disk_deadline" in node.errors.read_text())
        assert "changed: drain_seconds, log_level" in node.errors.read_text()
        file.write_text("drain = 8\n")
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: "unknown key 'drain'" in node.errors.read_text())
        with kvstore.connect(node.url, timeout=20.0) as client:
            assert client.status().pid == node.pid

    def test_limits_and_quotas_change_while_it_runs(
        self, node_process: Callable[..., NodeProcess], tmp_path: Path, eventually
    ) -> None:
        file = tmp_path / "kvstore.toml"
        file.write_text('disk_limit = "64MiB"\narena = "16MiB"\n')
        node = node_process(config=str(file), disk_limit=None, arena=None, log_format="json")
        with kvstore.connect(node.url, timeout=20.0) as client:
            pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=1 << 20))
            for number in range(24):
                pages.store([bytes([number]) * 32], np.full(1 << 20, number, np.uint8))
                client.flush()  # or pages leave the small arena before the disk has them
            before = client.status().tier("disk").used_bytes
            file.write_text('disk_limit = "18MiB"\narena = "1GiB"\n[[namespace]]\narena = "2MiB"\n')
            os.kill(node.pid, signal.SIGHUP)
            eventually(lambda: "only a restart changes" in node.errors.read_text())
            status = client.status()
            assert status.tier("disk").limit_bytes == 18 << 20
            assert status.tier("disk").used_bytes <= 18 << 20 < before
            assert status.namespaces[0].quota_bytes == {"arena": 2 << 20}
            for number in range(4):
                pages.store([bytes([100 + number]) * 32], np.full(1 << 20, number, np.uint8))
            assert client.status().namespaces[0].used_bytes["arena"] <= 2 << 20
            file.write_text('disk_limit = "2MiB"\narena = "16MiB"\n')
            os.kill(node.pid, signal.SIGHUP)
            eventually(lambda: "nothing was reloaded" in node.errors.read_text())
            assert client.status().tier("disk").limit_bytes == 18 << 20, "a mistake changes nothing"
        lines = [json.loads(line) for line in node.errors.read_text().splitlines() if line.startswith("{")]
        said = {line["message"]: line for line in lines}
        [changed] = [message for message in said if "changed: " in message]
        assert changed.endswith("changed: disk_limit, namespace")
        [waiting] = [line for message, line in said.items() if "only a restart changes" in message]
        assert (waiting["level"], waiting["message"]) == ("warning", "SIGHUP: only a restart changes arena")
        [refused] = [line for message, line in said.items() if "nothing was reloaded" in message]
        assert "the least is 16777216, two of its segments" in refused["message"]

    def test_a_token_is_refused_while_an_earlier_reload_waits_for_a_disk_that_hangs(
        self, node_process: Callable[..., NodeProcess], tmp_path: Path, tokens: Path, eventually, monkeypatch
    ) -> None:
        file = tmp_path / "kvstore.toml"
        file.write_text('disk_limit = "64MiB"\n')
        node = node_process(ready=False, config=str(file), disk_limit=None, token_file=str(tokens))
        node.command = [sys.executable, "-c", HANGING_DISK]
        node.start()
        tokens.write_text(f"{OLD}\n{NEW}\n")
        file.write_text('disk_limit = "32MiB"\n')
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: "makes room" in node.errors.read_text())
        assert self.may_call(node, tmp_path, OLD, monkeypatch)
        tokens.write_text(NEW + "\n")
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: not self.may_call(node, tmp_path, OLD, monkeypatch))
        assert self.may_call(node, tmp_path, NEW, monkeypatch)

    def test_an_error_that_nobody_thought_of_does_not_end_the_node(self, start_node, monkeypatch, caplog) -> None:
        node = start_node()

        def fail(config: object, stop: object) -> None:
            raise ValueError("unforeseen")

        monkeypatch.setattr(node, "reload", fail)
        serve_command._reload(node, cli._parser().parse_args(["serve"]))
        [said] = [record for record in caplog.records if record.name == serve_command.__name__]
        assert said.getMessage() == ("SIGHUP: not everything was reloaded, the node goes on: ValueError('unforeseen')")

    def test_a_limit_that_can_not_be_takes_no_other_with_it(self, start_node) -> None:
        node = start_node(redis="redis://127.0.0.1:1", redis_limit=64 << 20)
        with pytest.raises(ConfigError, match="two of its segments"):
            node.reload(replace(node.config, redis_limit=32 << 20, disk_limit=1 << 20))
        assert node.store.statistics().lower_tiers["redis"].limit_bytes == 64 << 20
        assert node.config.redis_limit == 64 << 20


class TestTop:
    def test_lines_for_programs(self, node_process: Callable[..., NodeProcess], capsys) -> None:
        node = node_process()
        assert cli.main(["top", "--url", node.url, "--interval", "0.2", "--count", "2", "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["tiers"]["arena"]["rates"]["asked"] for line in lines] == [0.0, 0.0]
        assert set(lines[0]["tiers"]) == {"arena", "disk"}

    def test_rates_of_what_happens(self, node_process: Callable[..., NodeProcess], capsys) -> None:
        node = node_process()
        with kvstore.connect(node.url, timeout=20.0) as client:
            pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=5000))
            top = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli", "top", "--url", node.url, "--interval", "0.5", "--count", "4"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            number = 0
            while top.poll() is None:
                pages.store([number.to_bytes(32, "big")], [np.ones(5000, np.uint8)])
                number += 1
            out, _ = top.communicate()
        assert top.returncode == 0
        tables = [line.split() for line in out.splitlines() if line.startswith("arena")]
        columns = next(line.split() for line in out.splitlines() if line.startswith("tier"))
        assert len(tables) == 4
        assert any(int(arena[columns.index("stored/s")].replace(",", "")) for arena in tables)

    def test_a_node_that_goes_is_told_and_waited_for(
        self, node_process: Callable[..., NodeProcess], eventually
    ) -> None:
        node = node_process()
        top = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli", "top", "--url", node.url, "--interval", "0.5", "--count", "3"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert top.stdout is not None
        assert "kvstore" in top.stdout.readline()
        node.kill()
        out, err = top.communicate(timeout=60)
        assert top.returncode == 0, err
        assert "trying again" in out

    @pytest.mark.parametrize("flags", [["--interval", "0"], ["--count", "0"]])
    def test_flags_that_make_no_sense(self, flags: list[str], capsys) -> None:
        assert cli.main(["top", *flags]) == cli.EXIT_USAGE
        assert flags[0] in capsys.readouterr().err
