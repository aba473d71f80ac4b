"""What imports what: layers point one way, and an engine's side needs none of the node's own packages.

Also, that docs/architecture.md says what each part is.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE_SIDE = """
import sys

for name in ("redis", "lz4", "rich", "cryptography"):
    sys.modules[name] = None  # importing it raises

import connector.reference.engine, connector.scheduler, connector.worker, gpu.pages, gpu.pinned, kvstore.node
"""


def test_an_engines_side_needs_no_package_of_the_tiers_below_or_of_the_command() -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run([sys.executable, "-c", ENGINE_SIDE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@cache
def layers() -> list[list[str]]:
    """The rows of the table of layers in docs/architecture.md: names of files and folders, highest first."""
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    start = lines.index("| layer | modules |") + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def layer_of(path: Path) -> int:
    """The row with the most exact name of a file."""
    name = path.relative_to(ROOT).as_posix()
    found = [
        (len(pattern), number)
        for number, patterns in enumerate(layers())
        for pattern in patterns
        if name.startswith(pattern) or fnmatch(name, pattern)
    ]
    assert found, f"{name} is in no row of the table of layers in docs/architecture.md"
    return max(found)[1]


def imports_of(path: Path, modules: dict[str, Path]) -> set[Path]:
    """The project's files that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            names |= (inner & modules.keys()) or {node.module}
    return {modules[name] for name in names & modules.keys()}


def test_imports_point_down_and_never_in_a_circle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("kvstore", "connector", "gpu")
        for path in (ROOT / package).rglob("*.py")
    }
    imported = {path: imports_of(path, modules) for path in modules.values()}
    up = [
        f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for path, others in imported.items()
        for other in others
        if layer_of(other) < layer_of(path)
    ]
    assert not up, "\n".join(up)
    TopologicalSorter(imported).prepare()  # raises where there is a circle


def test_every_module_has_its_row() -> None:
    """In the table of parts; what is in a folder of kvstore may be said by the folder's row."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    parts = re.findall(r"`([^`]+)`", text.partition("| part | what it is |")[2].partition("\n## ")[0])
    names = {name.rpartition("/")[2] for name in parts}
    missing = [
        path.relative_to(ROOT).as_posix()
        for package in ("kvstore", "connector", "gpu")
        for path in (ROOT / package).glob("[!_]*.py")
        if not any(fnmatch(path.name, name) for name in names)
    ]
    assert not missing, "docs/architecture.md does not say what these are"
