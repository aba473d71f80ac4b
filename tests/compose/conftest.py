"""The deployment of ``docker-compose.yml``, brought up once for all tests, and what breaks parts of it.

``make test-compose`` runs these tests, and says so with ``KVSTORE_TEST_COMPOSE``; without it they skip.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[2]
SOCKET = "unix:///run/kvstore/kvstore.sock"
DEADLINE = 5.0
"""Seconds: that of the page clients' calls."""
HANG = 3 * DEADLINE
"""Seconds after which a call hung beyond its deadline, however busy this machine is."""
_PACE = 0.2
"""Seconds between two rounds of traffic: speed is not what is tested, and the processors are wanted elsewhere."""
PROMPTS = 8
PATIENCE = 90.0
"""Seconds within which everything must be back to normal by itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.compose)
        item.add_marker(pytest.mark.timeout(1200))  # the first one builds the images
        if not os.environ.get("KVSTORE_TEST_COMPOSE"):
            item.add_marker(pytest.mark.skip(reason="needs a Docker engine: make test-compose"))


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {PATIENCE:g} s: {what}"
        time.sleep(0.1)


def run_docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=600)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
    return done.stdout.strip()


class Deployment:
    """A compose project, with everything of it gone before and behind.

    Args:
        project: its name.
        files: compose files.
        wheels: an image with wheels for the engine's image, or nothing.
    """

    def __init__(self, project: str, files: Sequence[str], wheels: str) -> None:
        self.project = project
        self._files = files
        # What a person set for their own deployment is not what the tests are about.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        self._environment = environment | ({"KVSTORE_WHEELS": wheels} if wheels else {})
        self._processes: list[subprocess.Popen[str]] = []

    def command(self, *arguments: str) -> list[str]:
        files = [part for file in self._files for part in ("-f", file)]
        return ["docker", "compose", "--project-name", self.project, *files, "--profile", "engine", *arguments]

    def compose(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            self.command(*arguments), cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=900
        )
        assert not check or done.returncode == 0, f"compose {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A process in a service, with pipes to it: ``start("engine1", "python", ...)``."""
        process = subprocess.Popen(
            self.command("exec", "-T", *arguments),
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def up(self) -> None:
        self.down()
        for step in (("build",), ("up", "--detach", "--wait", "--no-build")):
            began = time.monotonic()
            self.compose(*step)
            print(f"compose {' '.join(step)}: {time.monotonic() - began:.0f} s", flush=True)

    def down(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
        self._processes.clear()
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "2")

    def container(self, service: str) -> str:
        return f"{self.project}-{service}-1"

    def network(self, name: str) -> str:
        return f"{self.project}_{name}"

    def address(self, service: str, network: str = "storage") -> str:
        where = f'{{{{(index .NetworkSettings.Networks "{self.network(network)}").IPAddress}}}}'
        return run_docker("inspect", "--format", where, self.container(service))

    def state(self, service: str) -> str:
        """``running healthy``, ``paused``, ``exited`` …"""
        state = json.loads(run_docker("inspect", "--format", "{{json .State}}", self.container(service)))
        return " ".join([state["Status"]] + ([state["Health"]["Status"]] if "Health" in state else []))

    def status(self, node: str) -> dict[str, Any]:
        """What ``kvstore status --json`` says, by tier."""
        told = json.loads(self.compose("exec", "-T", node, "kvstore", "status", "--json"))
        return {tier["name"]: {**tier["counters"], "pages": tier["pages"]} for tier in told["tiers"]}


class Relay:
    """A script of this folder that runs in a container and answers lines of JSON; it lives through everything."""

    script = ""

    def __init__(self, deployment: Deployment, service: str, url: str = SOCKET, *arguments: str) -> None:
        self._process = deployment.start(service, "python", "-u", f"/tests/{self.script}", url, *arguments)
        self._lines: queue.Queue[str] = queue.Queue()
        self._one_at_a_time = threading.Lock()
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
            return reply


class EngineClient(Relay):
    """``engine_client.py`` in a container: one engine."""

    script = "engine_client.py"

    def __init__(self, deployment: Deployment, service: str, *arguments: str) -> None:
        super().__init__(deployment, service, SOCKET, *arguments)
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


class Traffic:
    """Engines answer, and clients store and load, on both hosts again and again, while something breaks.

    No call hangs, no byte and no token is wrong. No call fails either, and what was just stored is there, but for a
    host whose own node is what breaks.

    Args:
        clients: of the hosts.
        engines: of the hosts.
        right: answers of the engines.
        name: of the clients' prompts.
        breaking: the hosts whose nodes break.
    """

    def __init__(
        self,
        clients: Sequence[PageClient],
        engines: Sequence[EngineClient],
        right: Sequence[list[int]],
        name: str,
        breaking: Sequence[int],
    ) -> None:
        self._clients = clients
        self._engines = engines
        self._right = right
        self._name = name
        self._breaking = breaking
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self.rounds = [0] * len(clients)
        self.replies: list[list[dict[str, Any]]] = [[] for _ in clients]
        self._threads = [threading.Thread(target=self._run, args=(host,)) for host in range(len(clients))]

    def _run(self, host: int) -> None:
        try:
            while not self._stop.wait(_PACE):
                self._round(host, self.rounds[host])
                self.rounds[host] += 1
        except BaseException as error:  # noqa: BLE001 - told where the test waits
            self._failure = error

    def _round(self, host: int, number: int) -> None:
        prompt = number % len(self._right)
        answer = self._engines[host].answer(prompt)
        assert answer["tokens"] == self._right[prompt], (self._engines[host].where, prompt, answer)
        own = f"{self._name}/{host}/{number}"
        other = (host + 1) % len(self._clients)
        theirs = f"{self._name}/{other}/{max(0, self.rounds[other] - 2)}"  # stored a moment ago
        for do, prompt in (("store", own), ("load", own), ("load", theirs)):
            reply = self._clients[host].call(do=do, prompt=prompt, pages=4)
            self.replies[host].append(reply)
            if host in self._breaking:
                assert reply.get("error") in (None, "UnavailableError", "DeadlineError"), reply
            else:
                assert "error" not in reply, (self._clients[host].where, do, reply)
                assert prompt != own or reply.get("stored", 4) == reply.get("loaded", 4) == 4, (do, reply)

    def more(self, rounds: int, host: int | None = None) -> None:
        """Wait for so many further rounds: of one host, or of each."""
        hosts = range(len(self._clients)) if host is None else [host]
        ends = {each: self.rounds[each] + rounds for each in hosts}
        wait_until(
            lambda: self._failure or all(self.rounds[each] >= end for each, end in ends.items()), f"{rounds} rounds"
        )
        self._raise()

    def total(self, host: int, field: str) -> int:
        """Sum over a host's replies."""
        return sum(reply.get(field, 0) for reply in self.replies[host])

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            self._raise()


@contextlib.contextmanager
def running(deployment: Deployment) -> Iterator[Deployment]:
    """Bring it up; take it down whatever happens, and say what its containers said when it did not come up."""
    try:
        try:
            deployment.up()
        except BaseException:
            print(deployment.compose("logs", "--tail", "20", check=False), flush=True)
            raise
        yield deployment
    finally:
        deployment.down()


@pytest.fixture(scope="session")
def wheels() -> str:
    """An image of the wheels that this machine has for pip, for builds that can't see them. Empty: it has none."""
    folder = Path(os.environ.get("PIP_FIND_LINKS", "/nonexistent"))
    if not any(folder.glob("torch-*.whl")):
        return ""
    recipe = "FROM scratch\nCOPY torch-*.whl /\n"
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", "kvstore-wheels", "--file", "-", str(folder)],
        input=recipe,
        text=True,
        check=True,
        capture_output=True,
        timeout=300,
    )
    return "kvstore-wheels"


@pytest.fixture(scope="session")
def hosts(wheels: str) -> Iterator[Deployment]:
    """Redis, two nodes, an engine's container beside each, and a client on a third host."""
    with running(
        Deployment("kvstore-test", ["docker-compose.yml", "tests/compose/override.yml"], wheels)
    ) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def clients(hosts: Deployment) -> tuple[PageClient, PageClient]:
    """A client beside each node."""
    return PageClient(hosts, "engine1"), PageClient(hosts, "engine2")


@pytest.fixture(scope="session")
def engines(hosts: Deployment) -> tuple[EngineClient, EngineClient]:
    """An engine beside each node."""
    return EngineClient(hosts, "engine1"), EngineClient(hosts, "engine2")


@pytest.fixture(scope="session")
def engine(hosts: Deployment) -> Callable[..., EngineClient]:
    """One more engine: ``engine("decode2", "host2", "host1=kv://node1:7420")``."""
    return lambda service, *arguments: EngineClient(hosts, service, *arguments)


@pytest.fixture(scope="session")
def right_answers(engines: tuple[EngineClient, EngineClient]) -> list[list[int]]:
    """What an engine without kvstore answers to each prompt."""
    answers = [engines[0].answer(prompt, plain=True) for prompt in range(PROMPTS)]
    # Float rounding can't be what an answer depends on.
    assert min(answer["gap"] for answer in answers) > 1e-4
    return [answer["tokens"] for answer in answers]


@pytest.fixture
def eventually() -> Callable[[Callable[[], object], str], None]:
    """Wait until a condition holds; fail when it does not."""
    return wait_until


@pytest.fixture(scope="session")
def docker() -> Callable[..., str]:
    """``docker``, with these arguments; what it printed. It must succeed."""
    return run_docker


@pytest.fixture
def page_client(hosts: Deployment) -> Callable[..., PageClient]:
    """One more client: ``page_client("remote", "kv://node1:7420")``."""
    return lambda service, url=SOCKET: PageClient(hosts, service, url)


@pytest.fixture
def traffic(
    clients: tuple[PageClient, PageClient],
    engines: tuple[EngineClient, EngineClient],
    right_answers: list[list[int]],
    name: str,
) -> Callable[..., Traffic]:
    """See :class:`Traffic`; ``breaking`` are the hosts whose nodes break."""
    return lambda *breaking: Traffic(clients, engines, right_answers, name, breaking)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """For prompts of this test alone."""
    return str(request.node.name)


def is_back_to_normal(deployment: Deployment, clients: Sequence[PageClient], name: str) -> None:
    """Wait until each node shares new pages with the other one, and every service is healthy, with no help."""
    for host, client in enumerate(clients):
        other = clients[(host + 1) % len(clients)]
        tries = iter(range(1 << 20))

        def shared(host: int = host, client: PageClient = client, other: PageClient = other) -> bool:
            prompt = f"{name}/normal/{host}/{next(tries)}"  # noqa: B023 - used up before the next turn
            if client.call(do="store", prompt=prompt, pages=4).get("stored") != 4:
                return False
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                if other.call(do="lookup", prompt=prompt, pages=4).get("prefix") == 4:
                    return other.load(prompt, 4)["tiers"] == {"redis": 4}
            return False

        wait_until(shared, f"new pages of host {host + 1} are found by the other one")
    for service in ("redis", "node1", "node2"):
        wait_until(lambda service=service: deployment.state(service) == "running healthy", f"{service} is healthy")


@pytest.fixture
def back_to_normal(
    hosts: Deployment, clients: tuple[PageClient, PageClient], name: str
) -> Iterator[Callable[[], None]]:
    """The check that a test ends with. Whatever state a failed one leaves is mended, so that the next can be told."""
    yield lambda: is_back_to_normal(hosts, clients, name)
    for service in ("redis", "node1", "node2"):
        run_docker("unpause", hosts.container(service), check=False)
        run_docker("start", hosts.container(service), check=False)


@pytest.fixture
def cut(hosts: Deployment) -> Iterator[Callable[..., None]]:
    """Drop what one container sends to another one: a partition in one direction."""
    if os.geteuid() != 0 or shutil.which("iptables") is None:
        pytest.skip("one-way partitions need root and iptables on the Docker host")
    rules: list[list[str]] = []

    def drop(source: str, destination: str) -> None:
        rule = ["-s", hosts.address(source), "-d", hosts.address(destination), "-j", "DROP"]
        subprocess.run(["iptables", "-I", "DOCKER-USER", *rule], check=True, capture_output=True)
        rules.append(rule)

    def mend() -> None:
        while rules:
            subprocess.run(["iptables", "-D", "DOCKER-USER", *rules.pop()], check=True, capture_output=True)

    drop.mend = mend  # type: ignore[attr-defined]
    yield drop
    mend()


@pytest.fixture(scope="module")
def cluster(wheels: str) -> Iterator[Deployment]:
    """Six servers of a Redis Cluster, two nodes, and an engine's container beside each."""
    files = ["docker-compose.cluster.yml", "tests/compose/cluster.yml"]
    with running(Deployment("kvstore-test-cluster", files, wheels)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def cluster_clients(cluster: Deployment) -> tuple[PageClient, PageClient]:
    """A client beside each node on the Cluster."""
    return PageClient(cluster, "engine1"), PageClient(cluster, "engine2")
