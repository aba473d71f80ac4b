"""The command as people and service managers meet it: a process, its exit code, and what it prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from certificates import Authority

import kvstore
from kvstore.cli import main as cli
from kvstore.core import choice

ROOT = Path(__file__).parents[3]
LAYOUT = kvstore.Layout(model="tiny[/b] [red]", block_size=16, page_bytes=5000)
TIMEOUT = 60


def hashes_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def needs_shared_memory(size: int) -> None:
    if shutil.disk_usage("/dev/shm").free < size * 1.1:
        pytest.skip(f"/dev/shm has less than {size} bytes free")


@pytest.fixture
def kvstore_command(short_folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a folder and an environment of the test's own; whatever happens, no traceback."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *map(str, arguments)],
            cwd=short_folder,
            env=kept | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(short_folder / "run")} | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def refused(short_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., str]:
    """Run a command, in this process, that ends with 2. Returns what it says; it says nothing on stdout."""

    def run(*arguments: str) -> str:
        monkeypatch.chdir(short_folder)
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        assert code == 2
        said = capsys.readouterr()
        assert not said.out
        return said.err

    return run


@pytest.fixture
def small(short_folder: Path, shm_folder: Path) -> dict[str, object]:
    """Flags of a small node of the test's own."""
    return {
        "--socket": short_folder / "s",
        "--arena": "1MiB",
        "--arena-dir": shm_folder / "arena",
        "--disk": short_folder / "disk",
        "--disk-limit": "16MiB",
    }


def flat(flags: dict[str, object], **changed: object) -> list[object]:
    flags = flags | {"--" + name.replace("_", "-"): value for name, value in changed.items()}
    return [part for pair in flags.items() for part in pair]


class TestUsage:
    @pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["status", "--help"]])
    def test_help(self, kvstore_command, arguments):
        done = kvstore_command(*arguments)
        assert done.returncode == 0
        assert not done.stderr
        words = {
            1: ["serve", "status", "demo", "exit codes"],
            2: ["--socket", "--listen", "--arena", "--disk", "--disk-limit", "--config"]
            if arguments[0] == "serve"
            else ["unix://", "--json"],
        }[len(arguments)]
        assert all(word in done.stdout for word in words), done.stdout

    def test_version(self, kvstore_command):
        assert re.fullmatch(r"kvstore \S+\n", kvstore_command("--version").stdout)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "start here:"),
            (["fly"], "invalid choice: 'fly' (choose from 'serve', 'config',"),
            (["sevre"], "invalid choice: 'sevre'; did you mean 'serve'?"),
            (["config", "shwo"], "invalid choice: 'shwo'; did you mean 'show'?"),
            (["bench", "pth"], "invalid choice: 'pth'; did you mean 'path'?"),
            (["completion", "bsh"], "invalid choice: 'bsh'; did you mean 'bash'?"),
            (["pin", "m", "--fro", "12h", "-"], "unrecognized arguments: --fro; did you mean '--for'?"),
            (["status", "kv://a", "--json", "kv://b"], "unrecognized arguments: kv://b"),
            (["serve", "--soket", "x"], "unrecognized arguments: --soket x"),
            (["serve", "--aren", "1MiB"], "unrecognized arguments: --aren 1MiB"),  # no abbreviations
            (["serve", "--arena"], "--arena: expected one argument"),
            (["serve", "x"], "unrecognized arguments: x"),
            (["status", "--jason"], "unrecognized arguments: --jason"),
            (["serve", "--arena", "lots"], "--arena: arena: not a size: 'lots'; write it as 512MiB"),
            (["serve", "--arena=-1"], "not a size: '-1'"),
            (["serve", "--arena", "1KiB"], "arena is 1024 bytes, the least is 64KiB"),
            (["serve", "--disk-limit", "7"], "disk_limit is 7 bytes, the least is 1MiB"),
            (["serve", "--disk", ""], "disk can't be ''"),
            (["serve", "--listen", "99999"], "not an address: '99999'"),
            (["serve", "--listen", "host:http"], "not an address: 'host:http'"),
            (["serve", "--socket", "x" * 101], "100 bytes"),
            (["serve", "--config", "none.toml"], "none.toml can't be read: No such file"),
            (["serve", "--config", "."], "can't be read: Is a directory"),
            (["status", "--url", "kv://a", "kv://b"], "name one node"),
            (["status", "http://host"], "not a kvstore URL: 'http://host'"),
            (["status", "kv://host:port"], "not a kvstore URL"),
        ],
    )
    def test_what_cannot_be_right_ends_with_2(self, refused, arguments, words):
        assert words in refused(*arguments)

    def test_the_exit_code_of_the_process(self, kvstore_command):
        for arguments in (["serve", "--soket", "x"], ["serve", "--arena", "lots"], ["status", "nonsense"]):
            assert kvstore_command(*arguments).returncode == 2

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("arrena = '1GiB'", r"unknown key 'arrena'; did you mean 'arena'\?"),
            ("disk-limit = '1GiB'", r"unknown key 'disk-limit'; did you mean 'disk_limit'\?"),
            ("colour = 'red'", "unknown key 'colour'; known keys: socket, group, listen, bulk_port"),
            ("[node]\narena = '1GiB'", "unknown key 'node'"),
            ("arena = 1.5", "arena can't be 1.5"),
            ("arena = true", "arena: not a size: True|arena can't be True"),
            ("verify_checksums = 'perhaps'", "verify_checksums can't be 'perhaps'"),
            ("drain_seconds = nan", "drain_seconds must lie between 0 and 3600, got nan"),
            ("log_level = 'loud'", "log_level must be one of debug, info, warning, error, got 'loud'"),
            ("socket = ['a']", r"socket can't be \['a'\]"),
            ("arena = ", "not valid TOML"),
            ("\xff", "not valid TOML"),
        ],
    )
    def test_a_configuration_that_cannot_be_right(self, refused, short_folder, text, words):
        (short_folder / "kv.toml").write_bytes(text.encode("latin-1"))
        said = refused("serve", "--config", "kv.toml")
        assert re.search(words, said), said
        assert "kv.toml" in said or "must" in said

    @pytest.mark.parametrize("command", ["serve", "status"])
    def test_an_environment_that_cannot_be_right(self, refused, monkeypatch, command):
        monkeypatch.setenv("KVSTORE_ARENA", "much")
        assert "KVSTORE_ARENA: arena: not a size: 'much'" in refused(command)

    def test_a_node_that_cannot_have_the_core_that_was_asked_for(self, refused, monkeypatch, small):
        monkeypatch.setattr(
            choice, "CHOSEN", choice.Choice(None, "KVSTORE_CORE is native, and it is stale", wrong=True)
        )
        assert "KVSTORE_CORE is native, and it is stale" in refused("serve", *map(str, flat(small)))


class TestEndedEarly:
    """Whoever reads the output stops, as `head` does."""

    @pytest.mark.parametrize("lines", [100, 20_000])
    def test_a_closed_pipe_is_quiet(self, node_process, lines):
        node = node_process()
        with kvstore.connect(node.url) as client:
            client.namespace(LAYOUT)
        words = [each.hex() for each in hashes_of(lines)]
        command = [
            sys.executable,
            "-m",
            "kvstore.cli",
            "lookup",
            "--url",
            node.url,
            "tiny[/b] [red] · block 16 · group 0",
        ]
        process = subprocess.Popen(
            [*command, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        process.stdout.close()
        _, errors = process.communicate("\n".join(words).encode(), timeout=TIMEOUT)
        assert errors == b""
        assert process.returncode == 141

    def test_a_table_too(self, node_process):
        node = node_process()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli", "status", node.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT) == 141
        process.stderr.close()

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    @pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"], ["config", "show"]])
    def test_help_too(self, arguments, unbuffered):
        reader, writer = os.pipe()
        os.close(reader)
        process = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            timeout=TIMEOUT,
        )
        os.close(writer)
        assert process.stderr == b""
        assert process.returncode == 141


class TestCannotStart:
    def test_an_arena_larger_than_the_machine(self, kvstore_command, small):
        done = kvstore_command("serve", *flat(small, arena="100TiB"))
        assert done.returncode == 1
        assert re.search(r"needs 10\d(\.\d+)? TiB, only \d+(\.\d+)? [MGT]iB are free", done.stderr), done.stderr

    def test_a_socket_in_use(self, kvstore_command, small, node_process):
        node = node_process()
        done = kvstore_command("serve", *flat(small))
        assert done.returncode == 1
        assert done.stderr == f"kvstore serve: socket {node.socket} is served by process {node.pid}\n"

    def test_an_arena_and_a_disk_in_use(self, kvstore_command, small, node_process, short_folder, shm_folder):
        node = node_process()
        done = kvstore_command("serve", *flat(small, socket=short_folder / "b", arena_dir=shm_folder / "b"))
        assert done.returncode == 1
        assert f"{node.disk}" in done.stderr
        assert f"process {node.pid}" in done.stderr
        done = kvstore_command("serve", *flat(small, socket=short_folder / "b", disk=short_folder / "b-disk"))
        assert done.returncode == 1
        assert f"{node.arena_folder} is in use by process {node.pid}" in done.stderr

    def test_a_port_in_use(self, kvstore_command, small):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            done = kvstore_command("serve", *flat(small, listen=port))
        assert done.returncode == 1
        assert f"can't listen on 127.0.0.1:{port}" in done.stderr

    @pytest.mark.parametrize("flag", ["--disk", "--arena-dir", "--socket"])
    def test_a_file_in_place_of_a_folder(self, kvstore_command, small, short_folder, flag):
        (short_folder / "file").write_text("precious")
        place = short_folder / "file" / "s" if flag == "--socket" else short_folder / "file"
        done = kvstore_command("serve", *flat(small | {flag: place}))
        assert done.returncode == 1
        assert str(place) in done.stderr
        assert (short_folder / "file").read_text() == "precious"

    @pytest.mark.parametrize("flag", ["--disk", "--arena-dir", "--socket"])
    @pytest.mark.parametrize("place", ["/proc/kvstore/x", "/sys/kvstore/x"])
    def test_a_place_that_cannot_be_written(self, kvstore_command, small, flag, place):
        done = kvstore_command("serve", *flat(small | {flag: place}))
        assert done.returncode == 1
        assert place in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_after_all_of_that_a_right_start_works(self, kvstore_command, small, node_process):
        kvstore_command("serve", *flat(small, arena="100TiB"))
        kvstore_command("serve", *flat(small, listen="203.0.113.7:1"))
        assert node_process().terminate() == 0


class TestServe:
    def test_one_line_when_ready(self, node_process, short_folder, shm_folder):
        node = node_process()
        assert node.ready_line == (
            f"kvstore: ready on unix://{short_folder}/s and port {node.port} (bulk: {node.bulk_port})"
            f" (pid {node.pid}; arena 16 MiB; disk 64 MiB in {short_folder}/disk)\n"
        )
        assert node.terminate() == 0
        assert f"the arena's pages stay in {shm_folder}/arena" in node.errors.read_text()

    @pytest.mark.parametrize(
        ("address", "shown"),
        [
            ("0", "127.0.0.1:{port}"),
            ("127.0.0.1:0", "127.0.0.1:{port}"),
            ("localhost:0", "localhost:{port}"),
            ("[::1]:0", "[::1]:{port}"),
            ("0.0.0.0:0", "127.0.0.1:{port}"),
        ],
    )
    def test_the_line_names_the_console_by_what_a_browser_opens(self, node_process, short_folder, address, shown):
        config = short_folder / "kv.toml"
        config.write_text("insecure = true\n")
        line = node_process(metrics=address, disk_limit="0", config=str(config)).ready_line
        told = re.search(r", metrics on port (\d+), console at (\S+) \(pid ", line)
        assert told is not None, line
        assert told[2] == f"http://{shown.format(port=told[1])}/console"
        with urllib.request.urlopen(told[2], timeout=60) as answer:
            assert b"<h1>kvstore</h1>" in answer.read()

    def test_with_tls_the_console_is_https(self, node_process, short_folder):
        cert, key = Authority(short_folder).sign("node", "127.0.0.1")
        line = node_process(metrics="0", disk_limit="0", tls_cert=str(cert), tls_key=str(key)).ready_line
        assert re.search(r", metrics on port (\d+), console at https://127.0.0.1:\1/console \(", line), line

    def test_progress_of_a_large_arena(self, node_process):
        needs_shared_memory(1 << 30)
        node = node_process(arena="1GiB", disk_limit="0")
        shown = re.findall(r"populating the arena: (\d+) %", node.errors.read_text())
        assert shown[-1] == "100"
        assert len(shown) == 10
        assert "no disk tier" in node.ready_line

    def test_file_environment_and_flags_in_that_order(self, node_process, short_folder, monkeypatch):
        (short_folder / "kv.toml").write_text("arena = '2MiB'\ndisk_limit = 0\nlog_level = 'error'\n")
        node = node_process(ready=False, config=str(short_folder / "kv.toml"), arena="3MiB")
        del node.options["disk-limit"]
        node.start()
        with kvstore.connect(node.url) as client:
            status = client.status()
        assert [(tier.name, tier.limit_bytes) for tier in status.tiers] == [("arena", 3 << 20)]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_stops_it_and_pages_are_on_disk(self, node_process, number):
        node = node_process()
        data = np.random.default_rng(0).integers(0, 256, (300, 5000), dtype=np.uint8)
        with kvstore.connect(node.url) as client:
            assert client.namespace(LAYOUT).store(hashes_of(300), data).stored == 300
            node.signal(number)
            assert node.wait() == 0
        assert not node.socket.exists()
        assert "Traceback" not in node.errors.read_text()
        (node.arena_folder / "pages").unlink()
        node.start()
        with kvstore.connect(node.url) as client:
            pages = client.namespace(LAYOUT)
            assert pages.lookup(hashes_of(300)).tiers == ("disk",) * 300
            into = np.zeros_like(data)
            assert pages.load(hashes_of(300), into) == 300
            assert np.array_equal(into, data)

    def test_a_signal_during_start_is_a_stop(self, node_process, eventually):
        needs_shared_memory(2 << 30)
        node = node_process(ready=False, arena="2GiB", disk_limit="0")
        node.launch()
        eventually(lambda: "populating the arena: 10 %" in node.errors.read_text())
        assert node.terminate() == 0
        errors = node.errors.read_text()
        assert "stopped before it was ready" in errors
        assert "100 %" not in errors, "it does not go on to the end first"
        assert "Traceback" not in errors
        node.options["arena"] = "1MiB"
        node.start()

    def test_a_signal_while_it_stops_changes_nothing(self, node_process):
        node = node_process()
        with kvstore.connect(node.url) as client:
            client.namespace(LAYOUT).store(hashes_of(300), bytes(300 * 5000))
        for _ in range(3):
            node.signal(signal.SIGTERM)
        assert node.wait() == 0
        assert "Traceback" not in node.errors.read_text()


class TestStatus:
    def test_a_table(self, kvstore_command, node_process):
        node = node_process()
        with kvstore.connect(node.url) as client:  # one batch: slots reserved for a next one count as used
            client.namespace(LAYOUT).store(hashes_of(200), bytes(200 * 5000))
            client.flush()
        for url in (node.url, node.kv_url):
            done = kvstore_command("status", url)
            assert (done.returncode, done.stderr) == (0, "")
            assert "\x1b" not in done.stdout, "no colours into a pipe"
            # A client that has gone may be listed for a moment.
            lines = [line for line in done.stdout.splitlines() if not line.startswith("connected: ")]
            assert re.fullmatch(
                rf"kvstore \S+, {choice.CHOSEN.name} core, pid {node.pid}, up \d+s, \d+ clients?", lines[0]
            )
            assert lines[1] == "lookups: none yet"
            head = ["tier", "used", "limit", "pages", "loaded", "asked", "stored", "evicted", "overrun", "refused"]
            assert lines[2].split() == head
            assert lines[3].split() == ["arena", "1.562", "MiB", "16", "MiB", "200", "0", "0", "200", "0", "0", "0"]
            assert lines[4].split()[:1] == ["disk"]
            assert lines[5].endswith(
                " tiny[/b] [red] · block 16 · group 0: 200 pages of 4.883 KiB in the arena,"
                " arena 1.562 MiB, disk 1.596 MiB"
            )

    def test_one_json_object(self, kvstore_command, node_process):
        node = node_process()
        with kvstore.connect(node.url) as client:
            fingerprint = client.namespace(LAYOUT).fingerprint
            client.namespace(LAYOUT).store(hashes_of(2), bytes(10_000))
        status = json.loads(kvstore_command("status", node.url, "--json").stdout)
        assert status["pid"] == node.pid
        assert status["tiers"][0]["name"] == "arena"
        assert status["tiers"][0]["counters"]["stored"] == 2
        used = status["namespaces"][0]["used_bytes"]
        assert 0 <= status["namespaces"][0].pop("idle_seconds") <= status["namespaces"][0].pop("age_seconds") + 1
        assert status["namespaces"] == [
            {
                "name": "tiny[/b] [red] · block 16 · group 0",
                "fingerprint": fingerprint.hex(),
                "page_bytes": 5000,
                "arena_pages": 2,
                "used_bytes": {"arena": 16384, "disk": used["disk"]},
                "quota_bytes": {},
                "durability": "",
                "pinned_pages": 0,
                "layout": LAYOUT.to_json(),
                "counters": {
                    **dict.fromkeys(("arena", "disk", "redis", "objects", "missed", "present", "refused"), 0),
                    **dict.fromkeys(("looked_up", "found_arena", "found_disk", "found_redis", "found_objects"), 0),
                    "stored": 2,
                },
                "labels": [],
            }
        ]

    def test_the_socket_that_serve_would_use(self, kvstore_command, node_process):
        node = node_process()
        assert f"pid {node.pid}," in kvstore_command("status", KVSTORE_SOCKET=str(node.socket)).stdout
        assert kvstore_command("status").returncode == 1

    def test_a_dead_node(self, kvstore_command, node_process):
        node = node_process()
        node.kill()
        where = {node.url: str(node.socket), node.kv_url: f"127.0.0.1:{node.port}"}
        for url in (node.url, node.kv_url):
            done = kvstore_command("status", url)
            assert done.returncode == 1
            said = f"kvstore status: {url} can't be reached: nobody listens on {where[url]}: the node is not running"
            assert done.stderr.startswith(said)
            assert "; start it (`kvstore serve" in done.stderr
            assert len(done.stderr.splitlines()) == 1
            assert not done.stdout

    def test_a_hanging_node(self, kvstore_command, node_process):
        node = node_process()
        node.pause()
        done, from_afar = kvstore_command("status", node.url), kvstore_command("status", node.kv_url)
        node.resume()
        assert done.returncode == from_afar.returncode == 1
        waiting, failed = from_afar.stderr.splitlines()
        assert waiting == f"kvstore: waiting for {node.kv_url} to answer, for 5 s at most"
        said = "the node, or the network to it, hangs or is overloaded: `kvstore doctor` on its host says more"
        assert failed == f"kvstore status: {node.kv_url} did not answer in time; {said}"
        waiting, failed = done.stderr.splitlines()
        assert waiting == f"kvstore: waiting for {node.url} (pid {node.pid}) to answer, for 5 s at most"
        said = f"{node.url} did not answer in time: the node does not answer (pid {node.pid}, hung or overloaded); "
        assert failed.startswith(f"kvstore status: {said}")
        assert "start" not in failed.replace("restart", "")

    def test_a_terminal_that_knows_ascii_only(self, kvstore_command, node_process):
        node = node_process()
        with kvstore.connect(node.url) as client:
            client.namespace(LAYOUT)
        done = kvstore_command("status", node.url, PYTHONIOENCODING="ascii")
        assert done.returncode == 0
        assert "block 16" in done.stdout
