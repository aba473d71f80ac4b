"""A compose project on this machine's Docker engine, or what the ``tests`` container of one reaches from inside."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 90.0
"""Seconds within which everything must be back to normal by itself."""
NODES = ("node1", "node2")
RUN = secrets.randbelow(1 << 16)
"""Tells these tests' prompts from those of an earlier run on the same nodes."""
_SCRAPE = "import urllib.request as u; print(u.urlopen('http://{node}:9464/metrics', timeout=30).read().decode())"


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {PATIENCE:g} s: {what}"
        time.sleep(0.1)


def run_docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=600)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
    return done.stdout.strip()


class Hosts(Protocol):
    """What tests that break nothing need of a deployment."""

    def socket_url(self, service: str) -> str:
        """How a process of this service reaches its host's node."""

    def start(self, service: str, *command: str, environment: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        """A process in a service, with pipes to it: a script of this folder, and its arguments."""

    def status(self, node: str) -> dict[str, Any]:
        """What ``kvstore status --json`` says, by tier."""

    def scrape(self, node: str) -> str:
        """What the node's ``/metrics`` says to another host."""

    def is_healthy(self, service: str) -> bool:
        """Whether it is up and answers."""

    def mend(self) -> None:
        """Undo what a failed test left."""


class Deployment:
    """A compose project, with everything of it gone before and behind.

    Args:
        project: its name.
        files: compose files.
        variables: for these files.
    """

    def __init__(self, project: str, files: Sequence[str], variables: Mapping[str, str]) -> None:
        self.project = project
        self._files = files
        # What a person set for their own deployment is not what the tests are about.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        self._environment |= variables
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

    def socket_url(self, service: str) -> str:
        return "unix:///run/kvstore/kvstore.sock"

    def start(self, service: str, *command: str, environment: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        variables = [part for name, value in environment.items() for part in ("--env", f"{name}={value}")]
        script, *arguments = command
        process = subprocess.Popen(
            self.command("exec", "-T", *variables, service, "python", "-u", f"/tests/{script}", *arguments),
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
        for step in (("--profile", "tests", "build"), ("up", "--detach", "--wait", "--no-build")):
            began = time.monotonic()
            self.compose(*step)
            print(f"compose {' '.join(step)}: {time.monotonic() - began:.0f} s", flush=True)

    def down(self) -> None:
        for process in self._processes:
            end_process(process)
        self._processes.clear()
        everything = ("--profile", "tests", "--profile", "metrics")
        self.compose(*everything, "down", "--volumes", "--remove-orphans", "--timeout", "2")

    def container(self, service: str) -> str:
        return f"{self.project}-{service}-1"

    def network(self, name: str) -> str:
        return f"{self.project}_{name}"

    def address(self, service: str, network: str = "storage") -> str:
        where = f'{{{{(index .NetworkSettings.Networks "{self.network(network)}").IPAddress}}}}'
        return run_docker("inspect", "--format", where, self.container(service))

    def is_healthy(self, service: str) -> bool:
        state = json.loads(run_docker("inspect", "--format", "{{json .State}}", self.container(service)))
        return bool(state["Status"] == "running" and state["Health"]["Status"] == "healthy")

    def variable(self, name: str) -> str:
        """What the compose files read."""
        return self._environment[name]

    def recreate(self, node: str, **variables: str) -> None:
        """Start a node anew, with other variables for the compose files. Its arena stays: the engine has it mounted."""
        self._environment |= variables
        self.compose("up", "--detach", "--no-deps", "--no-build", "--wait", node)

    def status(self, node: str) -> dict[str, Any]:
        return by_tier(self.compose("exec", "-T", node, "kvstore", "status", "--json"))

    def scrape(self, node: str) -> str:
        other = NODES[1 - NODES.index(node)]
        return self.compose("exec", "-T", other, "python", "-c", _SCRAPE.format(node=node))

    def mend(self) -> None:
        for service in ("redis", *NODES):
            run_docker("unpause", self.container(service), check=False)
            run_docker("start", self.container(service), check=False)


class Inside:
    """The same from the ``tests`` container: in the nodes' network, with the folder of each host at another path."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def socket_url(self, service: str) -> str:
        return f"unix:///hosts/{service[-1]}/kvstore.sock"

    def start(self, service: str, *command: str, environment: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        script, *arguments = command
        process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name(script)), *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def status(self, node: str) -> dict[str, Any]:
        command = ["kvstore", "status", "--json", "--url", self.socket_url(node)]
        return by_tier(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)

    def scrape(self, node: str) -> str:
        with urllib.request.urlopen(f"http://{node}:9464/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def is_healthy(self, service: str) -> bool:
        if service == "redis":
            with socket.create_connection(("redis", 6379), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"
        with urllib.request.urlopen(f"http://{service}:9464/health", timeout=30) as answer:
            return bool(answer.status == 200)

    def mend(self) -> None:
        pass

    def end(self) -> None:
        for process in self._processes:
            end_process(process)

    def __getattr__(self, name: str) -> Any:
        if hasattr(Deployment, name):
            pytest.skip("breaks containers: needs the Docker CLI on the host (make test-compose)")
        raise AttributeError(name)


def end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()


def by_tier(status: str) -> dict[str, Any]:
    """What ``kvstore status --json`` printed, by tier."""
    return {tier["name"]: {**tier["counters"], "pages": tier["pages"]} for tier in json.loads(status)["tiers"]}


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
