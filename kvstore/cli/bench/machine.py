"""The machine that a benchmark ran on: processor, load, versions. A figure means nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvstore
from kvstore.core import choice
from kvstore.status import kvstore_version

LIBRARIES = ("numpy", "grpcio", "redis")


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, versions, and what else the machine has to do."""

    cpu: str
    cores: int
    """That this process may use."""
    load: float
    """Before the benchmark: processes that ran or waited to, on average over a minute."""
    python: str
    libraries: dict[str, str]
    """Versions by name, of those that are installed."""
    kvstore: str
    core: str
    """``native`` or ``python``: see :mod:`kvstore.core`."""
    commit: str | None
    """Of the checkout that kvstore runs from, with ``-dirty`` where it was changed since; None: it is installed."""

    def line(self) -> str:
        """All of it, for the top of a table."""
        libraries = ", ".join(f"{name} {number}" for name, number in self.libraries.items())
        commit = f" at {self.commit}" if self.commit else ""
        return (
            f"{self.cpu}, {self.cores} cores, load {self.load:.1f}; Python {self.python}, {libraries};"
            f" {self.core} core;"
            f" kvstore {self.kvstore}{commit}"
        )


def this_machine() -> Machine:
    """What is known of it now."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        libraries={name: number for name in LIBRARIES if (number := _version(name))},
        kvstore=kvstore_version(),
        core=choice.CHOSEN.name,
        commit=_commit(Path(kvstore.__file__).parents[1]),
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # redis, where a device's copies are all that is measured
        return ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit(root: Path) -> str | None:
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
