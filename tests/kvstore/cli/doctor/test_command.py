"""`kvstore doctor`: beside a node that is well, and beside what is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import types
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from redis_servers import RedisServer

import kvstore
from kvstore.arena import format as fmt
from kvstore.arena.arena import Arena
from kvstore.arena.epochs import READERS_BYTES
from kvstore.cli import main as cli
from kvstore.cli.doctor import (
    engine,
    machine,
    node,
    tiers,
)
from kvstore.cli.doctor.verdict import FAIL, OK, WARN
from kvstore.config.node import NodeConfig
from kvstore.connector import vllm_plugin
from kvstore.core import choice
from kvstore.status import Status

LAYOUT = kvstore.Layout(model="tiny", dtype="bfloat16", block_size=16, page_bytes=5000)
TOKENS = list(range(160))
CONFIG = {
    "kv_connector": "KVStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"url": "unix:///run/kvstore.sock"},
}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
SOCKET = Path("/run/kvstore.sock")
FORMER_MODULE = ".".join(("connector", "vllm"))


def findings(capsys) -> dict[str, dict[str, str]]:
    said = capsys.readouterr()
    assert not said.err
    return {each["subject"]: each for each in json.loads(said.out)["findings"]}


class TestCommand:
    def test_a_node_that_is_well(self, start_node, capsys) -> None:
        running = start_node()
        assert cli.main(["doctor", "--url", f"unix://{running.config.socket}", "--json"]) == 0
        found = findings(capsys)
        for subject in ("socket", "node", "clock", "arena", "hashes", "shared memory", "disk", "redis", "namespaces"):
            assert found[subject]["level"] == OK, found[subject]
        assert str(running.config.disk) in found["disk"]["text"]

    @pytest.mark.parametrize(
        ("chosen", "level", "text"),
        [
            (choice.Choice(types.SimpleNamespace(), ""), OK, "native"),
            (choice.Choice(None, "KVSTORE_CORE says so"), OK, "python: KVSTORE_CORE says so"),
            (choice.Choice(None, "kvstore._core was built from"), WARN, "python: kvstore._core was built from"),
        ],
        ids=["native", "wanted", "stale"],
    )
    def test_it_says_which_core_runs(self, chosen: choice.Choice, level: str, text: str, monkeypatch) -> None:
        monkeypatch.setattr(choice, "CHOSEN", chosen)
        verdict = engine.check_core(None)
        assert (verdict.subject, verdict.level, verdict.text) == ("core", level, text)
        assert bool(verdict.advice) == (level == WARN)

    def test_it_asks_the_engines_python_for_its_core(self, monkeypatch) -> None:
        monkeypatch.setenv("KVSTORE_CORE", "python")
        assert engine.check_core(sys.executable).text == "python: KVSTORE_CORE says so"
        assert engine.check_core("/none/python").level == WARN

    def test_without_a_node_it_says_what_to_do(self, short_folder: Path, shm_folder: Path, capsys, monkeypatch) -> None:
        monkeypatch.setenv("KVSTORE_SOCKET", str(short_folder / "none"))
        monkeypatch.setenv("KVSTORE_ARENA_DIR", str(shm_folder / "arena"))
        monkeypatch.setenv("KVSTORE_ARENA", "1000TiB")
        monkeypatch.setenv("KVSTORE_DISK_LIMIT", "0")
        assert cli.main(["doctor", "--json"]) == 1
        found = findings(capsys)
        assert found["socket"]["level"] == found["node"]["level"] == FAIL
        assert found["shared memory"]["level"] == found["free memory"]["level"] == FAIL
        assert "make the arena smaller (--arena)" in found["shared memory"]["advice"]
        assert "no disk tier" in found["disk"]["text"]

    @pytest.mark.parametrize("redis", ["", "redis://127.0.0.1:1"])
    def test_what_an_arena_needs_counts_all_its_files(self, redis: str, shm_folder: Path, start_node) -> None:
        """The summary of the disk as well, which there is without Redis."""
        config = NodeConfig(arena=8 << 20, disk_limit=64 << 30, redis=redis, arena_dir=shm_folder / "arena")
        summary = 0 if redis else (64 << 30) // (64 << 10) * 8
        headers = fmt.headers_bytes(8 << 20) + READERS_BYTES
        assert summary <= machine.arena_needs(config) - (8 << 20) - headers <= summary + 4096
        if not redis:
            node = start_node(arena=8 << 20, disk_limit=1 << 30)
            end = time.monotonic() + 60.0
            while not (files := list(node.store.arena.directory.glob("summary-*"))):
                assert time.monotonic() < end, "no summary comes"
                time.sleep(0.01)
            need = machine.arena_needs(node.config)
            files += [node.store.arena.directory / name for name in ("pages", "headers", "readers")]
            assert sum(file.stat().st_size for file in files) == need

    def test_a_node_that_hangs_is_not_to_be_started(self, node_process, capsys) -> None:
        running = node_process()
        running.pause()
        assert cli.main(["doctor", "--url", running.url, "--json"]) == 1
        running.resume()
        said = capsys.readouterr()
        assert said.err.splitlines()[0].startswith(f"kvstore: waiting for {running.url} (pid {running.pid})")
        found = {each["subject"]: each for each in json.loads(said.out)["findings"]}
        assert found["node"]["text"].endswith(f"the node does not answer (pid {running.pid}, hung or overloaded)")
        assert f"kill -CONT {running.pid}" in found["node"]["advice"]
        assert "kvstore serve" not in found["node"]["advice"]

    def test_a_table_without_colours(self, start_node, capsys) -> None:
        running = start_node()
        assert cli.main(["doctor", "--url", f"unix://{running.config.socket}"]) == 0
        said = capsys.readouterr().out
        assert "0 that can't work" in said
        assert "\x1b" not in said

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--against", "x"], "go with --why FILE"),
            (["--why", "/none"], "/none can't be read"),
            (["--url", "embedded:///x"], "has no node to look at"),
            (["--engine-pid", "4194305"], "process 4194305 can't be looked at"),
            (["--config", "/none"], "/none can't be read"),
        ],
    )
    def test_what_cannot_be_used(self, flags: list[str], words: str, capsys) -> None:
        assert cli.main(["doctor", *flags]) == cli.EXIT_USAGE
        assert words in capsys.readouterr().err


class TestWhy:
    @pytest.fixture
    def url(self, start_node) -> str:
        url = f"unix://{start_node().config.socket}"
        with kvstore.connect(url, timeout=20.0) as client:
            pages = client.namespace(LAYOUT)
            assert pages.store(kvstore.hash_blocks(TOKENS, 16), np.ones((10, 5000), np.uint8)).stored == 10
        return url

    def why(self, url: str, tmp_path: Path, value: object, capsys, *flags: str) -> tuple[int, dict]:
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(value))
        code = cli.main(["doctor", "--url", url, "--why", str(file), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    def test_a_real_node_answers(self, url: str, tmp_path: Path, capsys) -> None:
        code, said = self.why(url, tmp_path, TOKENS, capsys)
        assert (code, said["present"], said["block"], said["namespace"]) == (0, 10, None, LAYOUT.name)
        code, said = self.why(url, tmp_path, [*TOKENS[:50], 7, *TOKENS[51:]], capsys, "--namespace", "tiny")
        assert (code, said["present"], said["block"], said["key_field"]) == (1, 3, 3, "tokens")
        asked = {"tokens": TOKENS, "layout": json.loads(LAYOUT.to_json()) | {"dtype": "float16"}}
        code, said = self.why(url, tmp_path, asked, capsys)
        assert (code, said["block"], said["key_field"]) == (1, 0, "dtype")
        code, said = self.why(url, tmp_path, TOKENS, capsys, "--extra-key", "salt")
        assert (code, said["block"], said["key_field"]) == (1, 0, "extra_keys")

    def test_asking_is_no_use_of_a_namespace(self, url: str, tmp_path: Path, capsys) -> None:
        with kvstore.connect(url, timeout=20.0) as client:
            before = client.status().namespaces[0].idle_seconds
            self.why(url, tmp_path, TOKENS, capsys)
            assert client.status().namespaces[0].idle_seconds > before

    def test_pages_that_left_are_told_from_those_that_never_came(self, start_node, tmp_path: Path, capsys) -> None:
        running = start_node(arena=1 << 20, disk_limit=0)
        url = f"unix://{running.config.socket}"
        with kvstore.connect(url, timeout=20.0) as client:
            pages = client.namespace(LAYOUT)
            for start in range(0, 4800, 160):
                pages.store(kvstore.hash_blocks(range(start, start + 160), 16), np.ones((10, 5000), np.uint8))
            other = client.namespace(dataclasses.replace(LAYOUT, model="other"))  # it is evicted here, and there now
            other.store(kvstore.hash_blocks(TOKENS, 16), np.ones((10, 5000), np.uint8))
        code, said = self.why(url, tmp_path, TOKENS, capsys, "--namespace", "tiny")
        assert (code, said["key_field"]) == (1, "")
        assert "left to make room" in said["reason"]
        assert "a larger arena" in said["advice"]
        code, said = self.why(url, tmp_path, list(range(5000, 5160)), capsys, "--namespace", "tiny")
        assert "never stored, cleared, or gone too long ago" in said["reason"]

    def test_words(self, url: str, tmp_path: Path, capsys) -> None:
        (tmp_path / "p").write_text(json.dumps(TOKENS[:20] + [9] * 60))
        (tmp_path / "q").write_text(json.dumps(TOKENS))
        assert cli.main(["doctor", "--url", url, "--why", str(tmp_path / "p")]) == 1
        said = capsys.readouterr().out
        assert "1 of 5 leading blocks are there (1 in arena)" in said
        assert "first missing: block 1 (tokens 16 to 31)" in said
        assert cli.main(["doctor", "--why", str(tmp_path / "p"), "--against", str(tmp_path / "q")]) == 1
        assert "token 20 differs: 9 is asked for, 20 was stored" in capsys.readouterr().out
        assert cli.main(["doctor", "--url", url, "--why", str(tmp_path / "p"), "--namespace", "gpt"]) == 2
        assert "the node knows no namespace 'gpt'; known:\n" in capsys.readouterr().err


class TestEngine:
    def levels(self, command: object) -> list[tuple[str, str]]:
        return [(each.level, each.text) for each in engine.check_flags(command, SOCKET)]

    def flags(self, **changed: object) -> str:
        return json.dumps(CONFIG | changed)

    def test_flags_that_are_right(self) -> None:
        assert self.levels(self.flags()) == [(OK, "KVStoreConnector at unix:///run/kvstore.sock")]
        command = f"vllm serve m --kv_transfer_config='{self.flags()}' --block-size 32"
        assert [level for level, _ in self.levels(command)] == [OK, OK]
        (level, _), *_ = self.levels(self.flags(kv_connector_module_path="kvstore.connector.vllm"))
        assert level == OK

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            ("vllm serve m", "--kv-transfer-config is not among them"),
            ("vllm serve m --kv-transfer-config {", "is not a JSON object"),
            ("vllm 'serve", "can't be read as a command"),
            (json.dumps(CONFIG | {"kv_connector": "LMCache"}), "kv_connector must be 'KVStoreConnector', is 'LMCache'"),
            (json.dumps(CONFIG | {"kv_role": "both"}), "kv_role must be one of kv_both"),
            (
                json.dumps(CONFIG | {"kv_connector_module_path": FORMER_MODULE}),
                f"is '{FORMER_MODULE}'; it can be left out, or must be 'kvstore.connector.vllm'",
            ),
            (
                json.dumps(CONFIG | {"kv_connector_extra_config": {"ulr": "x"}}),
                "unknown key 'ulr'; did you mean 'url'?",
            ),
            (
                json.dumps({"kv_connector": "MultiConnector", "kv_role": "kv_both"}),
                "no KVStoreConnector among MultiConnector's connectors",
            ),
            (
                json.dumps(MULTI | {"kv_connector_extra_config": {"connectors": [CONFIG | {"kv_role": "both"}]}}),
                "kv_role must be one of kv_both",
            ),
            (f"vllm --kv-transfer-config '{json.dumps(CONFIG)}' --block-size x", "--block-size x"),
        ],
    )
    def test_flags_that_cannot_work(self, command: str, words: str) -> None:
        assert any(level == FAIL and words in text for level, text in self.levels(command)), self.levels(command)

    def test_without_a_url_the_engine_looks_for_the_node_itself(self) -> None:
        [(level, text)] = self.levels(json.dumps({key: CONFIG[key] for key in ("kv_connector", "kv_role")}))
        assert level == OK
        assert "KVStoreConnector at the node that it finds by itself" in text

    @pytest.mark.parametrize("role", ["=kv_both", " kv_both"])
    def test_flags_by_key(self, role: str) -> None:
        extra = '--kv-transfer-config.kv_connector_extra_config.url="unix:///run/kvstore.sock"'
        command = f"vllm serve m --kv-transfer-config.kv_connector KVStoreConnector --kv_transfer_config.kv_role{role}"
        assert self.levels(f"{command} {extra}") == [(OK, "KVStoreConnector at unix:///run/kvstore.sock")]
        [(level, text)] = self.levels(command.replace("kv_both", "both"))
        assert level == FAIL
        assert "kv_role must be one of" in text

    def test_inside_multi_connector(self) -> None:
        both = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, CONFIG]
        found = self.levels(json.dumps(MULTI | {"kv_connector_extra_config": {"connectors": both}}))
        assert found == [(OK, "KVStoreConnector at unix:///run/kvstore.sock")]

    @pytest.mark.parametrize(("other", "levels"), [("NixlConnector", [OK, WARN]), ("ExampleConnector", [OK])])
    def test_tickets_beside_another_connector(self, other: str, levels: list[str]) -> None:
        with_key = CONFIG | {"kv_connector_extra_config": {"ticket_key_file": "/etc/key"}}
        both = [{"kv_connector": other, "kv_role": "kv_both"}, with_key]
        found = self.levels(json.dumps(MULTI | {"kv_connector_extra_config": {"connectors": both}}))
        assert [level for level, _ in found] == levels

    def test_without_prefix_caching(self) -> None:
        command = f"vllm --kv-transfer-config '{self.flags()}' --no-enable-prefix-caching"
        assert (WARN, "--no-enable-prefix-caching") in self.levels(command)

    def test_another_node(self) -> None:
        found = self.levels(self.flags(kv_connector_extra_config={"url": "unix:///elsewhere"}))
        assert found == [(WARN, "the engine asks unix:///elsewhere, the node looked at is unix:///run/kvstore.sock")]

    def test_a_process_that_runs(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            code = "import sys; print('runs', flush=True); sys.stdin.read()"
            command = [sys.executable, "-c", code, "--kv-transfer-config", self.flags()]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"runs\n"  # until then its command line may be empty
                assert [each.level for each in engine.check_flags(engine.command_of(child.pid), SOCKET)] == [OK]
                assert engine.check_process(child.pid, path).level == OK
                child.communicate()

    @pytest.mark.parametrize(
        ("plugins", "levels"), [(None, []), ("kvstore", []), ("other,kvstore", []), ("other", [FAIL]), ("", [FAIL])]
    )
    def test_plugins_of_a_process_that_runs(self, plugins: str | None, levels: list[str]) -> None:
        environment = {} if plugins is None else {"VLLM_PLUGINS": plugins}
        command = [sys.executable, "-c", "print(flush=True); input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
            assert child.stdout is not None
            child.stdout.readline()  # until then its environment may be this process's
            assert [each.level for each in engine.check_plugins(self.flags(), child.pid, {})] == levels
            child.communicate(b"\n")

    @pytest.mark.parametrize(
        ("before", "own", "levels"),
        [
            ("", None, []),
            ("", "other", [FAIL]),
            ("VLLM_PLUGINS=other ", None, [FAIL]),
            ("env HF_HUB_OFFLINE=1 VLLM_PLUGINS= ", "kvstore", [FAIL]),
            ("VLLM_PLUGINS=other,kvstore ", "other", []),
        ],
    )
    def test_plugins_of_a_vllm_that_does_not_start(self, before: str, own: str | None, levels: list[str]) -> None:
        environment = {} if own is None else {"VLLM_PLUGINS": own}
        command = f"{before}vllm serve m --kv-transfer-config '{self.flags()}'"
        assert [each.level for each in engine.check_plugins(command, None, environment)] == levels

    @pytest.mark.parametrize(
        ("outer", "inside", "levels"),
        [
            ({}, {}, [OK]),
            ({}, {"load_failure_policy": "keep"}, [OK, WARN]),
            ({"kv_load_failure_policy": "fail"}, {"load_failure_policy": "keep"}, [OK, WARN]),
            ({"kv_load_failure_policy": "recompute"}, {"load_failure_policy": "keep"}, [OK]),
        ],
    )
    def test_a_policy_that_fails_requests(
        self, outer: dict[str, str], inside: dict[str, str], levels: list[str]
    ) -> None:
        ours = CONFIG | {"kv_connector_extra_config": {"url": "unix:///run/kvstore.sock"} | inside}
        nested = MULTI | {"kv_connector_extra_config": {"connectors": [ours]}}
        for each in ours, nested:  # directly, and in another MultiConnector
            given = MULTI | {"kv_connector_extra_config": {"connectors": [each]}} | outer
            assert [level for level, _ in self.levels(json.dumps(given))] == levels

    def test_two_kvstores_that_give_tickets(self) -> None:
        giver = CONFIG | {"kv_connector_extra_config": {"ticket_key_file": "/etc/key"}}
        given = MULTI | {"kv_connector_extra_config": {"connectors": [giver, giver]}}
        assert any(level == FAIL and "at most 1 may" in text for level, text in self.levels(json.dumps(given)))

    def test_plugins_only_count_where_kvstores_own_entry_has_no_path(self) -> None:
        other = {"kv_connector": "Other", "kv_role": "kv_both", "kv_connector_module_path": "other"}
        for path, levels in ({}, [FAIL]), ({"kv_connector_module_path": "kvstore.connector.vllm"}, []):
            inside = {"connectors": [other, CONFIG | path]}
            flags = json.dumps(MULTI | {"kv_connector_extra_config": inside})
            assert [each.level for each in engine.check_plugins(flags, None, {"VLLM_PLUGINS": "other"})] == levels
        assert engine.check_plugins("vllm serve m", None, {"VLLM_PLUGINS": "other"}) == []

    def test_the_plugin_is_the_one_that_is_installed(self) -> None:
        (plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == engine._PLUGIN]
        assert plugin.value == "kvstore.connector.vllm_plugin:register"
        assert (vllm_plugin.CONNECTOR, vllm_plugin.MODULE) == (engine._CONNECTOR, engine._MODULE)

    def test_versions(self) -> None:
        found = engine.check_versions(sys.executable)
        assert found[0].level == OK
        assert "protobuf" in found[0].text
        assert engine.check_versions("/none/python")[0].level == FAIL


class TestNode:
    def test_sockets(self, short_folder: Path) -> None:
        path = short_folder / "s"
        assert node.check_socket(path).level == FAIL
        path.write_text("")
        assert "is no socket" in node.check_socket(path).text
        path.unlink()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            path.chmod(0o600)
            assert node.check_socket(path).level == OK
            path.chmod(0o666)
            assert "everybody may read and write" in node.check_socket(path).advice

    def test_clocks(self) -> None:
        status = Status("1", 1, 1, 1.0, (), (), 0, "", "", time=1000.0)
        assert node.check_clock(status, 999.9, 1000.1).level == OK
        assert "7.0 s off" in node.check_clock(status, 1007.0, 1007.1).text
        assert "7.0 s off" in node.check_clock(status, 992.9, 993.0).text

    def test_hashes_that_differ(self) -> None:
        status = Status("1", 1, 1, 1.0, (), (), 0, "", "", hash_check=bytes(32))
        assert "computes other hashes" in node.check_hashes(status).text

    def test_an_engines_hashes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(Path(kvstore.__file__).parents[1]))
        assert engine.check_hashes(sys.executable).level == OK
        other = tmp_path / "python"
        other.write_text(f"#!/bin/sh\necho {'00' * 32} {'00' * 32}\n")
        other.chmod(0o700)
        assert engine.check_hashes(str(other)).level == FAIL
        other.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'kvstore'\" >&2; exit 1\n")
        assert "No module named 'kvstore'" in engine.check_hashes(str(other)).text
        assert "can't be asked" in engine.check_hashes(str(tmp_path / "none")).text


class TestMachine:
    def test_a_folder_that_is_no_memory(self, tmp_path: Path) -> None:
        config = NodeConfig(arena=1 << 20, arena_dir=tmp_path / "arena", disk_limit=0)
        found = machine.check_shared_memory(config)
        assert found.level in (OK, WARN)  # a machine whose /tmp is memory
        assert str(tmp_path) in found.text

    def test_arenas_that_nobody_has_open(self, shm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "default_arena_directory", lambda socket: shm_folder / "own")
        config = NodeConfig(arena_dir=shm_folder / "own")
        open_one = Arena(shm_folder / "open", 1 << 20)
        for name in ("own", "left"):
            Arena(shm_folder / name, 1 << 20).close()
        found = machine.check_unused_arenas(config)
        assert (found.level, found.text) == (WARN, f"in {shm_folder}: left (1.098 MiB)")
        open_one.close()
        assert "open" in machine.check_unused_arenas(config).text
        for name in ("open", "left"):
            shutil.rmtree(shm_folder / name)
        assert machine.check_unused_arenas(config).level == OK

    def test_locked_memory_matters_where_there_is_a_gpu(self, tmp_path: Path) -> None:
        config = NodeConfig(arena=1 << 60)
        assert machine.check_limits(config, gpu=tmp_path / "none")[0].level == OK
        limit = machine.check_limits(config, gpu=tmp_path)[0]
        assert limit.level == (OK if limit.text.startswith("unlimited") else WARN)

    def test_the_limits_are_those_of_node_and_engine(self, tmp_path: Path) -> None:
        with subprocess.Popen(["sleep", "600"]) as other:
            resource.prlimit(other.pid, resource.RLIMIT_NOFILE, (500, 500))
            resource.prlimit(other.pid, resource.RLIMIT_MEMLOCK, (4096, 4096))
            memlock, files = machine.check_limits(NodeConfig(arena=1 << 30), other.pid, other.pid, tmp_path)
            other.kill()
        assert (memlock.level, files.level) == (WARN, WARN)
        assert f"4 KiB for process {other.pid}, the arena has 1 GiB" in memlock.text
        assert f"500 at most for process {other.pid}" in files.text

    def test_a_numa_node_that_is_not_there(self) -> None:
        assert machine.check_numa(NodeConfig(numa_node="999")).level == FAIL


class TestTiers:
    def test_a_disk_that_is_smaller_than_its_limit(self, tmp_path: Path) -> None:
        found = {each.subject: each for each in tiers.check_disk(NodeConfig(disk=tmp_path, disk_limit=1 << 60))}
        assert found["disk"].level == WARN
        assert "lower --disk-limit" in found["disk"].advice
        assert found["O_DIRECT"].level in (OK, WARN)
        assert not list(tmp_path.iterdir()), "nothing stays there"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_of_somebody_else(self) -> None:
        assert tiers.check_disk(NodeConfig(disk=Path("/proc")))[-1].level == FAIL

    def test_redis(self, short_folder: Path) -> None:
        server = RedisServer(short_folder / "redis", "--maxmemory", "64mb")
        config = NodeConfig(redis=server.url, redis_limit=1 << 30)
        found = {each.subject: each for each in tiers.check_redis(config)}
        assert found["redis"].level == found["redis clock"].level == found["redis policy"].level == OK
        assert found["redis memory"].level == WARN
        server.client.config_set("maxmemory-policy", "allkeys-lru")
        found = {each.subject: each for each in tiers.check_redis(config)}
        assert found["redis policy"].level == FAIL
        server.close()
        assert tiers.check_redis(config)[0].level == FAIL
        assert tiers.check_redis(NodeConfig(redis="http://x"))[0].level == FAIL
