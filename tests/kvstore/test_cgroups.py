"""Which memory limit holds for a process, of both versions of cgroups."""

from pathlib import Path

import pytest

from kvstore.cgroups import memory_limit

MIB = 1 << 20


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    return root


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_version_2_the_smallest_limit_on_the_way_up(cgroups: Path) -> None:
    write(cgroups / "a" / "b" / "memory.max", "max\n")
    smallest = write(cgroups / "a" / "memory.max", "1048576\n")
    write(cgroups / "memory.max", "4194304\n")
    assert memory_limit("0::/a/b\n", cgroups) == (MIB, smallest)
    assert memory_limit("0::/other\n", cgroups) == (4 * MIB, cgroups / "memory.max")


def test_version_1_the_smallest_limit_on_the_way_up(cgroups: Path) -> None:
    write(cgroups / "memory" / "a" / "memory.limit_in_bytes", "9223372036854771712\n")
    smallest = write(cgroups / "memory" / "memory.limit_in_bytes", "2097152\n")
    membership = "5:cpu,cpuacct:/x\n4:hugetlb,memory:/a\n1:name=systemd:/\n"
    assert memory_limit(membership, cgroups) == (2 * MIB, smallest)


def test_in_a_container_the_path_is_not_below_the_mount(cgroups: Path) -> None:
    limit = write(cgroups / "memory" / "memory.limit_in_bytes", "2097152\n")
    assert memory_limit("4:memory:/docker/0123\n", cgroups) == (2 * MIB, limit)
    limit = write(cgroups / "memory.max", "1048576\n")
    assert memory_limit("0::/\n", cgroups) == (MIB, limit)


def test_both_versions_at_once(cgroups: Path) -> None:
    write(cgroups / "memory" / "memory.limit_in_bytes", "2097152\n")
    write(cgroups / "unified" / "memory.max", "1\n")
    assert memory_limit("4:memory:/\n0::/\n", cgroups)[0] == 2 * MIB


def test_no_limit_is_none(cgroups: Path) -> None:
    write(cgroups / "memory.max", "max\n")
    write(cgroups.parent / "memory.max", "1\n")
    assert memory_limit("0::/a\n3:cpu:/\n", cgroups)[0] is None
    assert memory_limit("", cgroups)[0] is None


def test_what_version_1_says_where_there_is_no_limit_is_none(cgroups: Path) -> None:
    write(cgroups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_limit("4:memory:/\n", cgroups)[0] is None
