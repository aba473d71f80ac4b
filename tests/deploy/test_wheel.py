"""What is installed: one top-level name, with everything in it, the native core where there is a compiler; and what a
source archive has beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("connector", "gpu", "docs", "deploy", "proto")
"""Folders of the repository that are installed below ``kvstore/``."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git knows: a folder ``build`` that lies about would bring its own packages along."""
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if files.returncode:
        pytest.skip("this is no checkout of git")
    names = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, input=files.stdout, capture_output=True, check=True
    )
    subprocess.run(["tar", "--extract"], cwd=source, input=names.stdout, check=True)
    return source


def build_wheel(source: Path, into: Path, **environment: str) -> Path:
    copy = shutil.copytree(source, into / "copy", symlinks=True)  # the build leaves folders behind
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(into), str(copy)]
    built = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    [path] = into.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build_wheel(source, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = shutil.copytree(source, folder / "copy", symlinks=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    built = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    [path] = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder / path.name.removesuffix(".tar.gz")


def test_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvstore"}


def test_every_module_and_what_it_reads_is_in_it(wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(["git", "ls-files", "kvstore", *LINKED], cwd=ROOT, capture_output=True, text=True)
    files = [name for name in tracked.stdout.split() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
    expected = {name if name.startswith("kvstore/") else f"kvstore/{name}" for name in files}
    missing = expected - set(wheel.namelist())
    assert not missing


def test_a_wheel_with_a_binary_is_for_every_python_of_this_machine(wheel: zipfile.ZipFile) -> None:
    binaries = [name for name in wheel.namelist() if name.endswith((".so", ".dylib"))]
    if not binaries and shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    assert binaries == ["kvstore/_core.abi3.so"]
    assert "-cp311-abi3-" in Path(str(wheel.filename)).name


def test_without_a_compiler_a_wheel_is_built_that_runs_anywhere(
    source: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    path = build_wheel(source, tmp_path, CC=str(tmp_path / "no-compiler"))
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as plain:
        assert set(plain.namelist()) == set(wheel.namelist()) - {"kvstore/_core.abi3.so"}


def test_vllms_plugin_is_announced(wheel: zipfile.ZipFile) -> None:
    [points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "[vllm.general_plugins]\nkvstore = kvstore.connector.vllm_plugin:register" in wheel.read(points).decode()


def test_what_the_commands_name_is_printed_by_what_is_installed(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Who installed a wheel has no ``docs/`` to look into."""
    wheel.extractall(tmp_path)
    helps = (ROOT / "tests/fixtures/outside/help.txt").read_text()
    sources = "".join(path.read_text() for path in (tmp_path / "kvstore/cli").rglob("*.py"))
    named = set(re.findall(r"`?kvstore docs ([a-z][\w./-]+)", helps + sources))
    assert {"configuration", "disaggregation", "operations", "vllm", "deploy/kvstore.service"} <= named
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for name in named:
        command = [sys.executable, "-m", "kvstore.cli", "docs", name]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        path = name if "/" in name else f"docs/{name}.md"
        assert done.stdout == (ROOT / path).read_text(), done.stderr
    assert not re.findall(r"\bdocs/\w+", helps)


def test_a_source_archive_has_all_that_is_tracked_and_makes_the_same_wheel(
    source: Path, sdist: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    tracked = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    there = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert {name for name in tracked - there if not name.startswith((".ci/", ".gitignore"))} == set()
    with zipfile.ZipFile(build_wheel(sdist, tmp_path)) as again:
        assert set(again.namelist()) == set(wheel.namelist())


def test_what_the_image_is_built_from_makes_the_same_wheel(
    source: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    context.mkdir()
    for name in re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M):
        if (source / name).is_dir():
            shutil.copytree(source / name, context / name, symlinks=True)
        else:
            shutil.copy(source / name, context)
    with zipfile.ZipFile(build_wheel(context, tmp_path)) as image:
        assert set(image.namelist()) == set(wheel.namelist())


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
