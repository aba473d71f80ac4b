"""How many processors a process may use, by files as cgroups have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.host.cpus import usable_processors

HERE = len(os.sched_getaffinity(0))


def written(folder: Path, own: str, files: dict[str, str]) -> float:
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_processors(folder / "cgroup", folder / "own")


def old_files(quota: str) -> dict[str, str]:
    return {"cpu,cpuacct/x/cpu.cfs_quota_us": quota, "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n"}, 1.0),
        ("0::/a/b\n", {"a/cpu.max": "70000 100000\n", "a/b/cpu.max": "max 100000\n"}, 0.7),
        ("0::/of/the/host\n", {"cpu.max": "90000 100000\n"}, 0.9),
        ("0::/\n", {"cpu.max": "max 100000\n"}, HERE),
        ("0::/\n", {"cpu.max": "99999999 100000\n"}, HERE),
        ("0::/\n", {"cpu.max": "nonsense\n"}, HERE),
        ("0::/\n", {"cpu.max": ""}, HERE),
        ("4:cpu,cpuacct:/x\n", old_files("60000"), 0.6),
        ("4:cpu,cpuacct:/x\n", old_files("-1"), HERE),
        ("", {}, HERE),
    ],
)
def test_a_quota_counts_wherever_it_is(tmp_path, own, files, usable):
    assert written(tmp_path, own, files) == usable


def test_without_cgroups_all_processors_count(tmp_path):
    assert usable_processors(tmp_path / "none", tmp_path / "nothing") == HERE
