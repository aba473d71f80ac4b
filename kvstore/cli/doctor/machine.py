"""Checks of the node's machine: shared memory, limits of the process and of its cgroup, NUMA."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from kvstore.arena import format as fmt
from kvstore.arena.epochs import READERS_BYTES
from kvstore.arena.removal import unused
from kvstore.arena.summary import summary_bytes
from kvstore.cgroups import memory_limit
from kvstore.cli.doctor.verdict import FAIL, OK, WARN, Verdict
from kvstore.config.node import NodeConfig, default_arena_directory
from kvstore.host.numa import nodes_with_memory
from kvstore.store.own_summary import buckets_for
from kvstore.units import format_size

_CROWDED = 0.8
"""A memory limit of which the arena takes more leaves the engine beside it too little."""
_FEW_FILES = 4096
_FILES_A_CONNECTION = 4
"""gRPC connections, those without a token yet, and bulk connections, some of which have two descriptors."""
_GPU = Path("/dev/nvidiactl")


def arena_needs(config: NodeConfig) -> int:
    """Bytes of shared memory for a node's arena: headers, index, and the summary of the disk included, as that is for
    pages of 64 KiB and more. What object storage adds to it follows from what others have written there."""
    need = config.arena + fmt.headers_bytes(config.arena) + READERS_BYTES
    if not config.redis and (config.disk_limit or config.objects):
        need += summary_bytes(buckets_for(config.disk_limit, 0))
    return need


def check_shared_memory(config: NodeConfig) -> Verdict:
    """Whether the arena's files fit, and whether they would be memory at all."""
    directory = config.arena_directory
    here = next(folder for folder in (directory, *directory.parents) if folder.exists())
    stat = os.statvfs(here)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    taken = sum(path.stat().st_blocks * 512 for path in directory.glob("*") if path.is_file())
    need = arena_needs(config)
    kind = _file_system(here)
    text = f"{here}: {format_size(free)} free of {format_size(size)}, the arena needs {format_size(need)}"
    if taken:
        text += f" and has {format_size(taken)}"
    if free + taken < need:
        return Verdict(
            "shared memory",
            FAIL,
            text,
            f"make the arena smaller (--arena), or the mount larger: `mount -o remount,size={need * 5 // 4 >> 20}m"
            f" {here}`; in a container, a tmpfs volume of that size (its own /dev/shm has 64 MiB)",
        )
    if kind not in ("tmpfs", "ramfs", "hugetlbfs", ""):
        return Verdict(
            "shared memory", WARN, f"{text}; it is {kind}, not memory", "put --arena-dir on a tmpfs, as /dev/shm is"
        )
    return Verdict("shared memory", OK, text)


def check_unused_arenas(config: NodeConfig) -> Verdict:
    """Whether dead processes have left arenas in the default place, beside the node's own."""
    above = default_arena_directory(config.socket).parent
    found = [(path, size) for path, size in unused(above) if path != config.arena_directory]
    if not found:
        return Verdict("unused arenas", OK, f"none in {above}")
    text = ", ".join(f"{path.name} ({format_size(size)})" for path, size in found)
    advice = (
        "their processes were killed, or kept them: starting these again finds the pages; else `rm -r` gives the memory"
        " back"
    )
    return Verdict("unused arenas", WARN, f"in {above}: {text}", advice)


def _file_system(path: Path) -> str:
    """The type of the file system that a path is on; empty where the system does not say."""
    best = ("", "")
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount, kind, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = mount, kind
    return best[1]


def check_memory(config: NodeConfig, pid: int | None) -> list[Verdict]:
    """Whether memory limit and free memory hold the arena. ``pid``: of the node, which has it; None: none runs."""
    need = arena_needs(config)
    theirs = Path(f"/proc/{pid}/cgroup")
    own = pid is None or not theirs.exists()  # a node in another container has a number of its own
    limit, path = memory_limit((Path("/proc/self/cgroup") if own else theirs).read_text())
    verdicts = []
    if limit is None:
        whose = "this process's" if own else "the node's"
        verdicts.append(Verdict("memory limit", OK, f"{whose} cgroup has none"))
    else:
        text = f"{format_size(limit)} ({path}), the arena needs {format_size(need)} of it"
        if limit < need:
            verdicts.append(
                Verdict("memory limit", FAIL, text, "raise the limit (MemoryMax, limits.memory), or --arena")
            )
        elif need > _CROWDED * limit:
            advice = "the arena counts against it: leave the node 1 GiB, and the engine what it needs itself"
            verdicts.append(Verdict("memory limit", WARN, text, advice))
        else:
            verdicts.append(Verdict("memory limit", OK, text))
    available = _available()
    if pid is None and available is not None:
        text = f"{format_size(available)} available, the arena needs {format_size(need)}"
        level = FAIL if available < need else WARN if available * _CROWDED < need else OK
        verdicts.append(Verdict("free memory", level, text, "make the arena smaller" if level != OK else ""))
    return verdicts


def _available() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def check_limits(
    config: NodeConfig, pid: int | None = None, engine_pid: int | None = None, gpu: Path = _GPU
) -> list[Verdict]:
    """Memory that may be locked, which matters to an engine that registers the arena; open files.

    Args:
        config: of the node.
        pid: of the node; None, or one that is not to be seen here: this process stands for it.
        engine_pid: of the engine, likewise.
        gpu: there where there is a GPU.
    """
    (locked, _), engines = _limits_of(engine_pid, resource.RLIMIT_MEMLOCK)
    shown = ("unlimited" if locked == resource.RLIM_INFINITY else format_size(locked)) + engines
    if not gpu.exists():
        memlock = Verdict("memlock", OK, f"{shown}; no GPU here, so no engine registers the arena")
    elif locked not in (resource.RLIM_INFINITY,) and locked < config.arena:
        memlock = Verdict(
            "memlock",
            WARN,
            f"{shown}, the arena has {format_size(config.arena)}",
            "if the engine's log says `the arena is not pinned`: `ulimit -l unlimited`,"
            " LimitMEMLOCK=infinity, or `docker run --ulimit memlock=-1` for the engine; copies work without, slower",
        )
    else:
        memlock = Verdict("memlock", OK, shown)
    (_, files), nodes = _limits_of(pid, resource.RLIMIT_NOFILE)  # a node gives itself as many as it may
    files = 1 << 16 if files == resource.RLIM_INFINITY else files
    if files < (needed := max(_FEW_FILES, _FILES_A_CONNECTION * config.connections)):
        advice = "LimitNOFILE=65536 in the unit, or `ulimit -n 65536`"
        open_files = Verdict(
            "open files", WARN, f"{files} at most{nodes}; each client takes a few, {needed} are plenty", advice
        )
    else:
        open_files = Verdict("open files", OK, f"{files} at most{nodes}")
    return [memlock, open_files]


def _limits_of(pid: int | None, which: int) -> tuple[tuple[int, int], str]:
    """A process's limits, soft and hard, and a note of whose they are where it can't be asked for its own."""
    if pid is not None:
        with suppress(OSError):  # another host's or container's process, another user's
            return resource.prlimit(pid, which), f" for process {pid}"
    return resource.getrlimit(which), " for this process"


def check_numa(config: NodeConfig) -> Verdict:
    """Whether it is said on which node of the machine the arena lies."""
    nodes = nodes_with_memory()
    names = ", ".join(map(str, nodes))
    if config.numa_node and int(config.numa_node) not in nodes:
        return Verdict("NUMA", FAIL, f"numa_node is {config.numa_node}, there are {names}", "name one of these")
    if len(nodes) == 1:
        return Verdict("NUMA", OK, "one node: nothing to place")
    if not config.numa_node:
        advice = "--numa-node N puts the arena beside the engine (`nvidia-smi topo -m`, `lscpu`); one kvstore a socket"
        return Verdict("NUMA", WARN, f"nodes {names}; the arena is wherever the system put it", advice)
    return Verdict("NUMA", OK, f"the arena is on node {config.numa_node} of {names}")
