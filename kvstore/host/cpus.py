"""Usable processors: those that this process may run on, and what cgroups leave it of their time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_processors(cgroups: Path = _CGROUPS, own: Path = _OWN) -> float:
    """Processors' worth of time, as 1.5; where nothing can be read, as many as there are.

    Args:
        cgroups: where cgroups are mounted, version 2 or 1.
        own: says in which of them this process is.
    """
    usable = float(len(os.sched_getaffinity(0)))
    for line in _lines(own):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            usable = min(usable, *(_quota(folder, usable) for folder in _way(cgroups, path)))
        elif "cpu" in controllers.split(","):
            usable = min(usable, *(_old_quota(folder, usable) for folder in _way(cgroups / controllers, path)))
    return usable


def _way(mount: Path, path: str) -> list[Path]:
    """A cgroup and all above it: each of them has a limit of its own. In a container the path may be the host's: what
    is mounted then is the container's own."""
    inside = mount / path.lstrip("/")
    return [mount] + [folder for folder in (inside, *inside.parents) if mount in folder.parents]


def _quota(folder: Path, most: float) -> float:
    """Version 2: ``MICROSECONDS PERIOD``, or ``max PERIOD``."""
    with suppress(ValueError, IndexError, ZeroDivisionError):
        quota, period = _lines(folder / "cpu.max")[0].split()
        return int(quota) / int(period)
    return most


def _old_quota(folder: Path, most: float) -> float:
    """Version 1; -1: no quota."""
    with suppress(ValueError, IndexError, ZeroDivisionError):
        quota, period = (int(_lines(folder / f"cpu.cfs_{name}_us")[0]) for name in ("quota", "period"))
        return quota / period if quota > 0 else most
    return most


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, ValueError):
        return []
