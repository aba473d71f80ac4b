"""The deployment of ``docker-compose.yml``, brought up once for all tests, and what breaks parts of it.

``make test-compose`` runs these tests, and says so with ``TEST_COMPOSE``; without it they skip. In the ``tests``
service it is ``inside``: there the deployment is up already, and tests that break containers skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployment import RUN, Deployment, Inside, run_docker, running, wait_until
from relays import EngineClient, PageClient
from traffic import Traffic, check_back_to_normal

PROMPTS = 8
INSIDE = os.environ.get("TEST_COMPOSE") == "inside"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.compose)
        item.add_marker(pytest.mark.timeout(1200))  # the first one builds the images
        if not os.environ.get("TEST_COMPOSE"):
            item.add_marker(pytest.mark.skip(reason="needs a Docker engine: make test-compose"))


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
def variables(wheels: str) -> dict[str, str]:
    """For compose files."""
    return {"KVSTORE_WHEELS": wheels} if wheels else {}


@pytest.fixture(scope="session")
def hosts(request: pytest.FixtureRequest) -> Iterator[Deployment | Inside]:
    """Redis, two nodes, an engine's container beside each, and a client on a third host."""
    if INSIDE:
        inside = Inside()
        yield inside
        inside.end()
        return
    files = ["docker-compose.yml", "tests/compose/override.yml"]
    # Folders that containers see, for the tests of upgrades and clocks to fill.
    folders = {name: str(request.getfixturevalue("tmp_path_factory").mktemp(name)) for name in ("OTHER_CODE", "CLOCK")}
    for folder in folders.values():
        Path(folder).chmod(0o755)  # containers have other users
    variables = request.getfixturevalue("variables") | folders | {"PROMETHEUS_PORT": "0"}  # any free one
    with running(Deployment("kvstore-test", files, variables)) as deployment:
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
    return lambda service, *arguments, **options: EngineClient(hosts, service, *arguments, **options)


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
    if INSIDE:
        pytest.skip("breaks containers: needs the Docker CLI on the host (make test-compose)")
    return run_docker


@pytest.fixture
def page_client(hosts: Deployment) -> Callable[..., PageClient]:
    """One more client: ``page_client("remote", "kv://node1:7420")``."""
    return lambda service, url="", **options: PageClient(hosts, service, url, **options)


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
    return f"{request.node.name}/{RUN}"


@pytest.fixture
def back_to_normal(
    hosts: Deployment, clients: tuple[PageClient, PageClient], name: str
) -> Iterator[Callable[[], None]]:
    """The check that a test ends with. Whatever state a failed one leaves is mended, so that the next can be told."""
    yield lambda: check_back_to_normal(hosts, clients, name)
    hosts.mend()


@pytest.fixture
def counted_truly(
    hosts: Deployment,
    clients: tuple[PageClient, PageClient],
    engines: tuple[EngineClient, EngineClient],
) -> Callable[[int], bool]:
    """Whether a host's node counts as stored, since the test began, what its client and its engine were told is stored.

    A store that an engine gave up may have come about, or not.
    """

    def told(host: int) -> tuple[int, int]:
        engine = engines[host].answer(-1, plain=True)
        return clients[host].stored + engine.get("pages_stored", 0), engine.get("pages_dropped", 0)

    def count(host: int) -> int:
        return clients[host].counters("arena")["stored"]

    before = [(*told(host), count(host)) for host in range(len(clients))]

    def run(host: int) -> bool:
        (stored, given_up), (first, first_given_up, first_count) = told(host), before[host]
        surplus = count(host) - first_count - (stored - first)
        return 0 <= surplus <= given_up - first_given_up

    return run


@pytest.fixture
def cut(hosts: Deployment) -> Iterator[Callable[..., None]]:
    """Drop what one container sends to another one: a partition in one direction."""
    if INSIDE or os.geteuid() != 0 or shutil.which("iptables") is None:
        pytest.skip("one-way partitions need root and iptables on the Docker host")
    rules: list[list[str]] = []

    def drop(source: str, destination: str, network: str = "storage") -> None:
        ends = hosts.address(source, network), hosts.address(destination, network)
        rule = ["-s", ends[0], "-d", ends[1], "-j", "DROP"]
        subprocess.run(["iptables", "-I", "DOCKER-USER", *rule], check=True, capture_output=True)
        rules.append(rule)

    def mend() -> None:
        while rules:
            subprocess.run(["iptables", "-D", "DOCKER-USER", *rules.pop()], check=True, capture_output=True)

    drop.mend = mend  # type: ignore[attr-defined]
    yield drop
    mend()


@pytest.fixture(scope="module")
def cluster(docker: Callable[..., str], variables: dict[str, str]) -> Iterator[Deployment]:
    """Six servers of a Redis Cluster, two nodes, and an engine's container beside each."""
    files = ["docker-compose.cluster.yml", "tests/compose/cluster.yml"]
    with running(Deployment("kvstore-test-cluster", files, variables)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def cluster_clients(cluster: Deployment) -> tuple[PageClient, PageClient]:
    """A client beside each node on the Cluster."""
    return PageClient(cluster, "engine1"), PageClient(cluster, "engine2")
