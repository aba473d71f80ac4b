"""The arena in the memory of one NUMA node: asked of the real system, which has at least node 0."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
from pathlib import Path

import pytest

from kvstore.arena.arena import Arena
from kvstore.errors import ConfigError, ResourceError
from kvstore.host.numa import Placement, nodes_with_memory, parse_list

MIB = 1 << 20
NODE = nodes_with_memory()[0]
needs_mempolicy = pytest.mark.skipif(platform.machine() != "x86_64", reason="asks by the numbers of x86-64's calls")


def policy() -> int:
    """This thread's memory policy: 0 for none of its own, 2 for being bound."""
    mode = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(239, ctypes.byref(mode), None, 0, None, 0):
        pytest.skip("the system does not say memory policies here")
    return mode.value


@pytest.mark.parametrize(("text", "numbers"), [("0\n", [0]), ("0-3,8\n", [0, 1, 2, 3, 8]), ("\n", [])])
def test_lists_of_the_system_are_read(text: str, numbers: list[int]) -> None:
    assert parse_list(text) == numbers


def test_nodes_are_those_that_have_memory(tmp_path: Path) -> None:
    assert nodes_with_memory(tmp_path) == [0], "a system that knows of none"
    (tmp_path / "online").write_text("0-2\n")
    assert nodes_with_memory(tmp_path) == [0, 1, 2]
    (tmp_path / "has_memory").write_text("0,2\n")
    assert nodes_with_memory(tmp_path) == [0, 2]


def test_a_node_that_is_not_there_is_refused_with_those_that_are(shm: Path) -> None:
    with pytest.raises(ConfigError, match="numa_node is 5; this machine has NUMA nodes 0, 2"):
        Placement(5, nodes=[0, 2])
    with pytest.raises(ConfigError, match=r"numa_node is 999; this machine has NUMA nodes? \d"):
        Arena(shm / "arena", MIB, numa_node=999)
    assert not (shm / "arena").exists(), "nothing was made"


def test_on_the_only_node_there_is_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert Placement(0, nodes=[0]).node is None
    assert "the only NUMA node of this machine" in caplog.text


@needs_mempolicy
def test_what_is_allocated_within_is_bound_and_nothing_behind_it() -> None:
    placement = Placement(NODE, nodes=[NODE, NODE + 1])
    assert policy() == 0
    with placement.allocating():
        assert policy() == 2
    assert policy() == 0


@needs_mempolicy
def test_memory_that_is_there_is_bound() -> None:
    with mmap.mmap(-1, MIB) as memory:
        memory[:] = bytes(range(256)) * (MIB // 256)
        Placement(NODE, nodes=[NODE, NODE + 1]).move(memory)
        assert re.search(rf"bind:{NODE} ", Path("/proc/self/numa_maps").read_text())
        assert memory[:] == bytes(range(256)) * (MIB // 256)


@needs_mempolicy
def test_what_the_system_refuses_is_an_error_with_its_reason() -> None:
    nowhere = max(nodes_with_memory()) + 1
    with (
        pytest.raises(
            ResourceError, match=f"numa_node {nowhere}: the system refuses to place memory: Invalid argument"
        ),
        Placement(nowhere, nodes=[NODE, nowhere]).allocating(),
    ):
        pass
    assert policy() == 0


def test_an_arena_is_made_and_taken_over_on_a_node(shm: Path) -> None:
    first = Arena(shm / "arena", MIB, numa_node=NODE)
    first.pages[:] = 7
    first.close()
    again = Arena(shm / "arena", MIB, numa_node=NODE)
    assert again.taken_over
    assert (again.pages == 7).all()
    again.close()
