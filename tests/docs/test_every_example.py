"""Every example of every document and help text runs; what can't run here is named with its reason, and parses."""

from __future__ import annotations

import fcntl
import http.server
import itertools
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import Example, examples, help_texts, parsed
from node_process import NodeProcess
from ports import free_port

import kvstore
from kvstore.cli.bench.command import BENCHES
from kvstore.cli.doctor import sglang
from kvstore.cli.doctor.verdict import OK
from kvstore.cli.documents import documents
from kvstore.config.load import load_config
from kvstore.connector.engine.options import Options
from kvstore.layout import Layout
from kvstore.security.secret_files import read_tokens

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
ALL = examples()
MODEL = Layout(model="my-model", block_size=16, page_bytes=4096)
TOKENS = list(range(40))

NOT_RUN = {
    r"(vllm|python -m vllm\S*) ": "vLLM",
    r"curl \S+ localhost:8000/(v1|metrics)": "vLLM's answers",
    r"python -m sglang\S* ": "SGLang",
    r"curl \S+ localhost:30000/": "SGLang's answers",
    r"(/opt/kvstore/bin/)?pip install ": "it installs packages",
    r"python3 -m pip ": "it fetches packages, or installs them for another Python",
    r"python3 -m venv /opt/": "it writes where all users see it",
    r"kvstore docs \S+ >/etc/": "it writes where all users see it",
    r"kvstore status --url kvs://cache-1": "a host of that name; test_security_document.py does what is written there",
    r"apt-get ": "it installs packages",
    r"ln -s /opt/": "it writes where all users see it",
    r"systemctl ": "systemd",
    r"(useradd|chown) ": "it changes the machine's users",
    r"docker ": "Docker",
    r"make ": "a target takes minutes, or installs something",
    r"kvstore check --objects\b": "it reads a bucket; tests/kvstore/cli/test_objects.py runs it",
    r"kvstore bench (path|WHAT)\b": "a benchmark takes minutes; tests/kvstore/cli/bench runs each",
    r'eval "\$\(kvstore completion zsh\)"': "zsh",
    r"kvstore at ": "a line of vLLM's log, no command",
}
"""Command lines that can't run here, by how they begin → what they would need."""
RUN = {"kvstore", "python", "python3", ".", "curl", "cp", "eval", "export", "mkdir", "umask"}
"""The programs that may be run here, with places of the machine's in their arguments replaced."""
NO_COMMANDS = {"kvstore worker load": "a span's name", "kvstore worker store": "a span's name"}
PYTHON_NOT_RUN = {"vllm.distributed": "vLLM"}
SERVERS = {"kvstore serve": "ready on", "kvstore proxy": "ready on", "kvstore top": "arena"}
"""Commands that end only when they are told to, and what they have said when they are at work."""


class World:
    """What the examples speak of: a node, its files, its namespace, and an engine that makes tokens of a prompt."""

    def __init__(self, folder: Path, node: NodeProcess, metrics: int, engine: int) -> None:
        self.folder, self.node, self.metrics, self.engine = folder, node, metrics, engine
        self.url = node.url
        self.home = folder / "home"
        self.etc = folder / "etc"
        self.disk = folder / "kept"
        for each in (self.home / ".config/fish/completions", self.etc, folder / "bin"):
            each.mkdir(parents=True)
        for name, words in (("kvstore", [sys.executable, "-m", "kvstore.cli"]), ("python", [sys.executable])):
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            program.chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")} | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(folder),
            "TERM": "xterm",
        }
        with kvstore.connect(f"embedded://{folder}/e?arena=1MiB&disk_limit=16MiB") as store:
            store.namespace(MODEL).store(self.hashes, bytes(len(self.hashes) * 4096))
        (folder / "e/disk").rename(self.disk)
        self._write_files()

    @property
    def hashes(self) -> list[bytes]:
        return kvstore.hash_blocks(TOKENS, MODEL.block_size)

    def fill(self) -> None:
        """Examples drop what they speak of."""
        with kvstore.connect(self.url) as client:
            client.namespace(MODEL).store(self.hashes, bytes(len(self.hashes) * 4096))

    def real(self, text: str) -> str:
        """An example with the names of real things in place of those that it was written with."""
        serves = text.startswith("kvstore serve")
        socket = self.folder / "own" if serves else self.node.socket
        port = free_port() if serves else self.metrics
        words = {"NAMESPACE": MODEL.model, "NAME": MODEL.model, "MODEL": MODEL.model, "M": MODEL.model}
        words |= {"DIR": str(self.disk), "TRACE": "trace.jsonl", "FILE": "prompt.json", "URL": self.url}
        words |= {"SHELL": "bash", "COMMAND": "status"}
        places: dict[str, str] = {
            r"/run/kvstore(/kvstore)?\.sock": str(socket),
            r"/var/lib/kvstore": str(self.disk),
            r"/etc/kvstore\.toml": str(self.folder / "kvstore.toml"),
            r"/etc/kvstore\b": str(self.etc),
            r"0\.0\.0\.0:\d+": f"127.0.0.1:{free_port()}",
            r"(?<=--bulk-port )\d+": str(free_port()),
            r"127\.0\.0\.1:5557": f"127.0.0.1:{free_port()}",
            r"127\.0\.0\.1:5558": f"127.0.0.1:{free_port()}",
            r"\b9464\b": str(port),
            r"localhost:8000": f"localhost:{self.engine}",
            r"(?<=--arena )\S+": "1MiB",
            r"(?<=kvstore docs )NAME": "operations",
            r"(?<=kvstore docs )deploy/FILE": "deploy/kvstore.service",
            r"\| less\b": "| cat",
            r"(?<![\w-])(" + "|".join(words) + r")(?![\w-])": "",
        }
        for pattern, place in places.items():
            text = re.sub(pattern, lambda found, place=place: place or words[found[0]], text)
        if text.startswith("kvstore proxy") and "--listen" not in text:
            text += f" --listen 127.0.0.1:{free_port()}"
        if text == "kvstore serve" or (serves and "--config" not in text):
            text += f" --arena-dir /dev/shm/{self.folder.name}-own"
        return text

    def _write_files(self) -> None:
        authority = pytest.importorskip("certificates").Authority(self.folder)
        for name in ("node", "proxy", "cache-1", "engine"):
            authority.sign(name, "127.0.0.1", "localhost", "cache-1")
        for name, text in (("tokens", "ops:a-token-of-some-length\n"), ("my-token", "a-token-of-some-length\n")):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o600)
        for name, text in (("responses.key", 64 * "a"), ("redis.password", "a-password")):
            (self.etc / name).write_text(text)
            (self.etc / name).chmod(0o600)
        settings = {"socket": self.folder / "own", "arena": "1MiB", "disk": self.disk, "disk_limit": "16MiB"}
        settings["arena_dir"] = Path(f"/dev/shm/{self.folder.name}-own")
        (self.folder / "kvstore.toml").write_text("".join(f'{name} = "{value}"\n' for name, value in settings.items()))
        (self.folder / "hashes").write_text("\n".join(each.hex() for each in self.hashes))
        (self.folder / "prompt.json").write_text(json.dumps(TOKENS))
        (self.folder / "prompts.jsonl").write_text(f"{json.dumps(TOKENS)}\n{json.dumps({'tokens': TOKENS})}\n")
        request = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
        (self.folder / "trace.jsonl").write_text(f"{json.dumps(request)}\n" * 3)


class Tokenizer(http.server.BaseHTTPRequestHandler):
    """Answers ``/tokenize`` as vLLM does."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert {"model", "prompt"} <= set(asked)
        answer = json.dumps({"count": len(TOKENS), "max_model_len": 4096, "tokens": TOKENS}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/kvXXXXXX"], text=True).strip())
    metrics = free_port()
    node = NodeProcess(folder, Path(f"/dev/shm/{folder.name}"), metrics=str(metrics))
    node.start()
    engine = http.server.ThreadingHTTPServer(("localhost", 0), Tokenizer)
    thread = threading.Thread(target=engine.serve_forever)
    thread.start()
    yield World(folder, node, metrics, engine.server_address[1])
    engine.shutdown()
    thread.join()
    engine.server_close()
    node.terminate()
    subprocess.run(["rm", "-rf", folder, f"/dev/shm/{folder.name}", f"/dev/shm/{folder.name}-own"], check=True)


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(each, id=str(each)) for each in ALL if each.kind == kind]


@pytest.mark.parametrize("example", of_kind("shell"))
def test_command_lines_run(world: World, example: Example) -> None:
    for text in example.lines:
        if any(re.match(pattern, text) for pattern in NOT_RUN):
            check_what_does_not_run(text)
            continue
        assert text.split()[0] in RUN, f"{text!r} is not known to be harmless; say in NOT_RUN what it would need"
        world.fill()
        line = world.real(text)
        server = next((begin for begin in SERVERS if line.startswith(begin)), "")
        code, said = run_in_a_terminal(world, line, SERVERS.get(server))
        expected = {130} if server == "kvstore top" else {0, 1} if "kvstore doctor" in line else {0}
        assert code in expected and "Traceback" not in said, f"{line}\n{said}"


def run_in_a_terminal(world: World, line: str, ready: str | None) -> tuple[int, str]:
    """Exit code and output of a command line, as a person runs it, who says yes; stopped once it says ``ready``."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    own = {"KVSTORE_SOCKET": str(world.folder / "own" if line.startswith("kvstore serve") else world.node.socket)}
    if line.startswith("kvstore serve"):
        own |= {"KVSTORE_ARENA": "1MiB", "KVSTORE_ARENA_DIR": f"/dev/shm/{world.folder.name}-own"}
        own |= {"KVSTORE_DISK": str(world.folder / "own-disk"), "KVSTORE_DISK_LIMIT": "16MiB"}
    words = ["bash", "-c", f"exec {line}" if ready else line]
    process = subprocess.Popen(
        words, cwd=world.folder, env=world.environment | own, stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    os.write(terminal, b"y\n")
    said, end = "", time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                said += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # nobody writes there any more
                break
        if ready and ready in said:
            process.send_signal(signal.SIGINT)
            ready = None
    code = process.wait(PATIENCE)
    os.close(terminal)
    return code, said


def check_what_does_not_run(text: str) -> None:
    words = list(itertools.takewhile(lambda word: word[0] != ">", shlex.split(text, comments=True)))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), f"make has no {words[1]}"
    if "--kv-transfer-config" in words:
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        inside = [config]
        if config["kv_connector"] == "MultiConnector":
            inside = config["kv_connector_extra_config"]["connectors"]
        ours = [each for each in inside if each["kv_connector"] == "KVStoreConnector"]
        assert ours, config
        for each in ours:
            Options.parse(each.get("kv_connector_extra_config", {}))
    if "--hicache-storage-backend-extra-config" in words:
        assert all(each.level == OK for each in sglang.check_flags(text, Path("/run/kvstore.sock")))
    if "kvstore" in words[1:] and words[0] == "docker" and words[1] == "run":
        parsed(words[words.index("kvstore") + 1 :])
    if words[0] == "kvstore" and words[1] != "at":
        names = [each.__name__.rpartition(".")[2] for each in BENCHES]
        parsed([names[0] if word == "WHAT" else word for word in words[1:]])


@pytest.mark.parametrize("example", of_kind("named"))
def test_a_command_that_is_named_is_there(example: Example) -> None:
    command, _, document = example.text.rpartition(" ")
    if command == "kvstore docs":
        assert document in documents()
    else:
        assert example.text in help_texts() or example.text in NO_COMMANDS


def test_what_is_left_out_is_there() -> None:
    lines = [line for each in ALL for line in each.lines]
    stale = [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in lines)]
    stale += [text for text in NO_COMMANDS if text not in {each.text for each in ALL if each.kind == "named"}]
    blocks = [each.text for each in ALL if each.kind == "python"]
    stale += [text for text in PYTHON_NOT_RUN if not any(text in block for block in blocks)]
    assert not stale
    assert {each.kind for each in ALL} == {"shell", "sh", "named", "toml", "json", "python", "tokens", "text"}


@pytest.mark.parametrize("example", of_kind("toml"))
def test_settings_are_taken(world: World, example: Example, caplog: pytest.LogCaptureFixture) -> None:
    path = world.folder / "example.toml"
    path.write_text(example.text)
    path.chmod(0o600)
    assert tomllib.loads(example.text)
    load_config(path)
    assert not caplog.records


@pytest.mark.parametrize("example", of_kind("json"))
def test_an_engines_settings_are_taken(example: Example) -> None:
    assert Options.parse(json.loads(example.text)).url == "unix:///run/kvstore.sock"


@pytest.mark.parametrize("example", of_kind("tokens"))
def test_a_token_file_is_read(tmp_path: Path, example: Example) -> None:
    path = tmp_path / "tokens"
    path.write_text(example.text.replace("…", "0123456789abcdef"))
    path.chmod(0o600)
    assert len(read_tokens(path)) == len(re.findall("^[a-z]", example.text, re.M))


@pytest.mark.parametrize("example", of_kind("python"))
def test_python_runs(world: World, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(example.text, str(example), "exec")
    if any(text in example.text for text in PYTHON_NOT_RUN):
        return
    monkeypatch.chdir(world.folder)
    names: dict[str, Any] = {"kvstore": kvstore}
    if "pages.new_step_starts" in example.text:
        names |= an_engine_of_pages(world)
    if "token_ids, 16" in example.text:
        names |= {"token_ids": TOKENS, "buffer": np.zeros((2, 2 << 20), np.uint8)}
    code = compile(world.real(example.text.replace("cache-1:7420", "localhost:7420")), str(example), "exec")
    try:
        exec(code, names)
    finally:
        for each in names.values():
            if isinstance(each, kvstore.Client):
                each.close()
    if "StoreResult" in example.text:
        assert (names["n"], names["kv"].shape) == (4, (6, 2 << 20)), "as its comments say"


def an_engine_of_pages(world: World) -> dict[str, Any]:
    """The names that the block manager's example takes from its engine."""
    pytest.importorskip("kvstore.connector.blocks")
    from kvstore.connector.reference.pages import PageEngine

    client = kvstore.connect(world.url)
    PageEngine(client).prefill("of another engine", TOKENS)
    engine = PageEngine(client)
    return {
        "client": client,
        "pages": engine.pages,
        "memory": engine.memory,
        "namespace": engine.namespace,
        "request_id": "a",
        "token_ids": TOKENS,
    }
