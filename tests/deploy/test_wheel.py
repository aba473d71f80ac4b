"""What is installed: one top-level name, with everything in it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from what git knows: a folder ``build`` that lies about would bring its own packages along."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if files.returncode:
        pytest.skip("this is no checkout of git")
    names = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, input=files.stdout, capture_output=True, check=True
    )
    source.mkdir()
    subprocess.run(["tar", "--extract"], cwd=source, input=names.stdout, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvstore"}


def test_every_module_and_what_it_reads_is_in_it(wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "kvstore", "connector", "gpu"], cwd=ROOT, capture_output=True, text=True
    )
    files = [name for name in tracked.stdout.split() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
    expected = {name if name.startswith("kvstore/") else f"kvstore/{name}" for name in files}
    missing = expected - set(wheel.namelist())
    assert not missing


def test_vllms_plugin_is_announced(wheel: zipfile.ZipFile) -> None:
    [points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "[vllm.general_plugins]\nkvstore = kvstore.connector.vllm_plugin:register" in wheel.read(points).decode()


def test_a_zip_of_the_repository_is_refused(tmp_path: Path) -> None:
    """It has files in the place of the links."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "__init__.py").write_text("")
    (tmp_path / "kvstore" / "connector").write_text("../connector")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", str(tmp_path)]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode != 0
    assert "kvstore/connector does not lead to connector/: it is a link" in built.stdout + built.stderr
