"""What imports what: folders are layers, imports point down, and an engine's side needs none of the node's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import import_rules
import pytest

ROOT = Path(__file__).resolve().parents[2]

# The highest floor first. A folder's name stands for the files right in it, a file's name for that file; what lies
# deeper has a name of its own. A file imports what lies under its own name or on a lower floor. Names on one floor are
# siblings: they do not know each other, nor what lies deeper in each other's folders, whichever floor that is on.
FLOORS = (
    ("kvstore/cli/__main__.py",),
    ("kvstore/cli/main.py",),
    ("kvstore/cli/plan",),
    ("kvstore/cli/bench", "kvstore/cli/doctor"),
    ("kvstore/cli",),
    ("connector/vllm_plugin.py",),
    ("connector/sglang.py", "connector/vllm.py"),
    ("connector/hicache",),
    ("connector/engine", "connector/proxy", "connector/reference"),
    ("connector/disagg",),
    ("connector",),
    ("connector/blocks",),
    ("kvstore/__init__.py", "kvstore/node"),
    ("kvstore/service/grpc", "kvstore/service/http", "kvstore/service/sockets"),
    ("kvstore/aio", "kvstore/service/access"),
    ("kvstore/client", "kvstore/service"),
    ("kvstore/client/paths/bulk", "kvstore/client/paths/shm"),
    ("kvstore/client/paths",),
    ("kvstore/client/url.py",),
    ("kvstore/store",),
    ("kvstore/namespaces",),
    ("kvstore/tiers/disk", "kvstore/tiers/objects", "kvstore/tiers/redis"),
    ("kvstore/tiers/redis/format",),
    ("kvstore/tiers/redis/net",),
    ("kvstore/catalog", "kvstore/config", "kvstore/tiers"),
    ("kvstore/catalog/policies",),
    ("kvstore/arena", "kvstore/segments", "kvstore/tracing.py", "kvstore/wire"),
    ("kvstore/events", "kvstore/host", "kvstore/logs.py", "kvstore/responses", "kvstore/status.py"),
    (
        "gpu",
        "kvstore/client_name.py",
        "kvstore/hashing.py",
        "kvstore/labels.py",
        "kvstore/layout.py",
        "kvstore/responses/embedding",
        "kvstore/responses/semantic",
        "kvstore/security",
        "kvstore/units.py",
    ),
    ("kvstore/core",),
    (
        "kvstore/breaker.py",
        "kvstore/cgroups.py",
        "kvstore/errors.py",
        "kvstore/fairness.py",
        "kvstore/limits.py",
        "kvstore/page_codes.py",
        "kvstore/rare_lines.py",
        "kvstore/v1",
    ),
)

# Who imports a package that is not the project's, by the names above: all of them, and nobody else.
IMPORTED_BY = {
    "aiohttp": ("connector/proxy",),
    "cryptography": ("kvstore/responses", "kvstore/segments"),
    "grpc": (
        "kvstore/cli/bench",
        "kvstore/client",
        "kvstore/client/paths",
        "kvstore/node",
        "kvstore/service",
        "kvstore/service/access",
        "kvstore/service/grpc",
        "kvstore/service/sockets",
        "kvstore/tracing.py",
        "kvstore/v1",
        "kvstore/wire",
    ),
    "http": ("kvstore/responses/embedding", "kvstore/service/http"),
    "lz4": ("kvstore/tiers/redis/format",),
    "numba": (),
    "obstore": ("kvstore/tiers/objects",),
    "opentelemetry": (
        "connector/disagg",
        "connector/engine",
        "kvstore/aio",
        "kvstore/client",
        "kvstore/node",
        "kvstore/tracing.py",
    ),
    "prometheus_client": (
        "kvstore/logs.py",
        "kvstore/node",
        "kvstore/responses",
        "kvstore/service",
        "kvstore/service/access",
        "kvstore/service/http",
    ),
    "redis": (
        "kvstore/cli/bench",
        "kvstore/cli/doctor",
        "kvstore/cli/plan",
        "kvstore/responses",
        "kvstore/tiers/redis/net",
    ),
    "rich": ("connector/reference", "kvstore/cli", "kvstore/cli/bench", "kvstore/cli/doctor"),
    "sentence_transformers": ("kvstore/responses/embedding",),
    "sglang": ("connector/sglang.py",),
    "torch": ("connector/engine", "connector/reference", "connector/sglang.py", "connector/vllm.py", "gpu"),
    "transformers": (),
    "triton": ("gpu",),
    "vllm": ("connector/vllm.py", "connector/vllm_plugin.py"),
    "zmq": ("kvstore/events", "kvstore/service"),
}

ENGINE_SIDE = """
import sys

for name in ("redis", "lz4", "rich", "cryptography", "obstore"):
    sys.modules[name] = None  # importing it raises

import kvstore.connector.reference.engine, kvstore.connector.scheduler, kvstore.connector.worker
import kvstore.gpu.paged_kv, kvstore.gpu.pinned, kvstore.node.node
"""


def test_an_engines_side_needs_no_package_of_the_tiers_below_or_of_the_command() -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run([sys.executable, "-c", ENGINE_SIDE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_imports_point_down_and_never_in_a_circle() -> None:
    found = import_rules.violations(ROOT, FLOORS, IMPORTED_BY)
    assert not found, "\n".join(found)


class Planted(NamedTuple):
    """Source that is put at the end of a file, and what is said of its last line."""

    file: str
    source: str
    said: tuple[str, ...]
    """Each with ``{}`` for the file and the line."""
    target: str
    """The file that the source imports; empty: none of the product's."""
    new: bool = False
    """Whether the file is there for this alone."""


PLANTED = {
    "a relative import upwards": Planted(
        "kvstore/segments/log.py",
        "from ..tiers import tier",
        (
            "{} imports ..tiers by a relative name",
            "{} imports kvstore/tiers/tier.py, which lies above it (floor: kvstore/tiers)",
        ),
        "kvstore/tiers/tier.py",
    ),
    "the scheduler's side imports the proxy": Planted(
        "connector/scheduler.py",
        "from kvstore.connector.proxy import server",
        ("{} imports connector/proxy/server.py, which lies above it (floor: connector/proxy)",),
        "connector/proxy/server.py",
    ),
    "the disk tier imports Redis' protocol": Planted(
        "kvstore/tiers/disk/reader.py",
        "from kvstore.tiers.redis.net.resp import Connection",
        ("{} imports kvstore/tiers/redis/net/resp.py, which lies beside it (floor: kvstore/tiers/redis)",),
        "kvstore/tiers/redis/net/resp.py",
    ),
    "segments import the arena": Planted(
        "kvstore/segments/log.py",
        "import kvstore.arena.arena",
        ("{} imports kvstore/arena/arena.py, which lies beside it (floor: kvstore/arena)",),
        "kvstore/arena/arena.py",
    ),
    "an eviction policy imports Redis": Planted(
        "kvstore/catalog/policies/lru.py",
        "def ask() -> None:\n    from kvstore.tiers.redis.tier import RedisTier",
        ("{} imports kvstore/tiers/redis/tier.py, which lies above it (floor: kvstore/tiers/redis)",),
        "kvstore/tiers/redis/tier.py",
    ),
    "an engine's requests import vLLM": Planted(
        "connector/engine/requests.py",
        "from vllm.v1.request import Request",
        ("{} imports vllm, which is for connector/vllm.py, connector/vllm_plugin.py",),
        "",
    ),
    "another file of a name that stands elsewhere, too low": Planted(
        "kvstore/arena/tier.py",
        "from kvstore.tiers.tier import Tier",
        ("{} imports kvstore/tiers/tier.py, which lies above it (floor: kvstore/tiers)",),
        "kvstore/tiers/tier.py",
        new=True,
    ),
    "another file of a name that stands elsewhere, in a new folder": Planted(
        "kvstore/tiers/object/path.py", "", ("kvstore/tiers/object/path.py lies on no floor",), "", new=True
    ),
    "another file of a name that stands elsewhere, at the root": Planted(
        "kvstore/path.py", "", ("kvstore/path.py lies on no floor",), "", new=True
    ),
}
planted = pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)


def write(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


def link(root: Path) -> None:
    """Make the packages at the top folders of kvstore, as they are in a checkout."""
    for name in ("connector", "gpu"):
        (root / "kvstore" / name).symlink_to(f"../{name}")


def plant(root: Path, planted: Planted) -> set[str]:
    """Plant it. Returns what is to be said of it."""
    path = root / planted.file
    source = f"{path.read_text() if path.exists() else ''}\n{planted.source}\n"
    write(root, {planted.file: source})
    return {said.format(f"{planted.file}:{source.count(chr(10))}") for said in planted.said}


@planted
def test_in_a_small_tree_that_breaks_no_rule_what_is_planted_is_all_that_is_said(
    tmp_path: Path, planted: Planted
) -> None:
    files = {name if name.endswith(".py") else f"{name}/part.py": "" for floor in FLOORS for name in floor}
    write(tmp_path, files | dict.fromkeys(IMPORTED_BY["vllm"], "import vllm") | {planted.target or "README.md": ""})
    link(tmp_path)
    foreign = {"vllm": IMPORTED_BY["vllm"]}
    assert import_rules.violations(tmp_path, FLOORS, foreign) == []
    said = plant(tmp_path, planted)
    assert {*import_rules.violations(tmp_path, FLOORS, foreign)} == said


@planted
def test_in_the_products_files_what_is_planted_is_said(tmp_path: Path, planted: Planted) -> None:
    """An import upwards may close a circle: that is said as well."""
    for package in import_rules.PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert not planted.target or (tmp_path / planted.target).is_file()
    assert (tmp_path / planted.file).is_file() != planted.new
    before = {*import_rules.violations(tmp_path, FLOORS, IMPORTED_BY)}
    said = plant(tmp_path, planted)
    new = {*import_rules.violations(tmp_path, FLOORS, IMPORTED_BY)} - before
    assert said <= new
    assert all("a circle" in each for each in new - said)


SMALL = (("kvstore/top", "gpu"), ("kvstore/low",), ("kvstore/errors.py",))


def small(root: Path, files: dict[str, str]) -> list[str]:
    """What is said of a small tree with some files of kvstore, named from there, in it."""
    write(root, dict.fromkeys(("kvstore/top/part.py", "kvstore/low/part.py", "gpu/part.py", "kvstore/errors.py"), ""))
    write(root / "kvstore", files)
    link(root)
    return import_rules.violations(root, SMALL)


@pytest.mark.parametrize(
    "source",
    [
        "import kvstore.top.part",
        "import numpy, kvstore.top.part as part",
        "from kvstore.top import part",
        "from kvstore.top import nothing, part as other",
        "from kvstore.top.part import name as other",
        "from kvstore.top.part import *",
        "def late(): import kvstore.top.part",
        "if TYPE_CHECKING: from kvstore.top.part import Part",
        "importlib.import_module('kvstore.top.part')",
        "import_module('kvstore.top.part')",
        "__import__('kvstore.top.part')",
        "TABLE = {'part': 'kvstore.top.part'}; import_module(TABLE[name])",
    ],
)
def test_every_kind_of_import_is_seen(tmp_path: Path, source: str) -> None:
    found = small(tmp_path, {"low/part.py": source, "top/__init__.py": "nothing = None"})
    said = "kvstore/low/part.py:1 imports kvstore/top/part.py, which lies above it (floor: kvstore/top)"
    assert said in found
    assert all("kvstore/top/__init__.py" in each for each in found if each != said)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from . import other", ".other"),
        ("from .other import x", ".other"),
        ("from .. import errors", "..errors"),
        ("def late():  from ..errors import x", "..errors"),
        ("importlib.import_module('.other', 'kvstore.low')", ".other"),
        ("__import__('other', level=1)", ".other"),
        ("__import__('other', {}, {}, [], 1)", ".other"),
    ],
)
def test_relative_names_are_banned_downwards_as_well(tmp_path: Path, source: str, name: str) -> None:
    found = small(tmp_path, {"low/part.py": source, "low/other.py": ""})
    assert found == [f"kvstore/low/part.py:1 imports {name} by a relative name"]


def test_a_linked_package_is_one_tree_and_each_of_its_files_is_seen_once(tmp_path: Path) -> None:
    found = small(tmp_path, {"top/part.py": "import kvstore.gpu.part", "low/part.py": "from kvstore.gpu import part"})
    assert found == [
        "kvstore/low/part.py:1 imports gpu/part.py, which lies above it (floor: gpu)",
        "kvstore/top/part.py:1 imports gpu/part.py, which lies beside it (floor: gpu)",
    ]
    assert import_rules.read_tree(tmp_path).files == {
        "gpu/part.py",
        "kvstore/errors.py",
        "kvstore/low/part.py",
        "kvstore/top/part.py",
    }


def test_no_files_of_one_folder_import_each_other_in_a_circle(tmp_path: Path) -> None:
    found = small(
        tmp_path,
        {
            "low/part.py": "from kvstore.low import middle",
            "low/middle.py": "def late(): import kvstore.low.other",
            "low/other.py": "from kvstore.low.part import x",
        },
    )
    first, second, third = (f"kvstore/low/{name}.py" for name in ("middle", "other", "part"))
    assert found == [f"{first} imports {second} imports {third} imports {first}: a circle"]


def test_a_circle_of_folders_is_said_beside_its_import_that_points_up(tmp_path: Path) -> None:
    found = small(tmp_path, {"top/part.py": "import kvstore.low.part", "low/other.py": "import kvstore.top.part"})
    assert found == [
        "kvstore/low imports kvstore/top imports kvstore/low: a circle of folders",
        "kvstore/low/other.py:1 imports kvstore/top/part.py, which lies above it (floor: kvstore/top)",
    ]


def test_a_sibling_is_one_at_any_depth(tmp_path: Path) -> None:
    """A folder deep in a sibling is no way around the rule, though it lies on a lower floor."""
    write(tmp_path, {"kvstore/a/x.py": "import kvstore.b.deep.y", "kvstore/b/x.py": "", "kvstore/b/deep/y.py": ""})
    floors = (("kvstore/a", "kvstore/b"), ("kvstore/b/deep",))
    assert import_rules.violations(tmp_path, floors) == [
        "kvstore/a/x.py:1 imports kvstore/b/deep/y.py, which lies beside it (floor: kvstore/b)"
    ]
    write(tmp_path, {"kvstore/a/x.py": "", "kvstore/b/x.py": "import kvstore.b.deep.y"})
    assert import_rules.violations(tmp_path, floors) == []


def test_floors_name_what_there_is_once(tmp_path: Path) -> None:
    write(tmp_path, {"kvstore/a/x.py": "", "kvstore/a/own.py": "import kvstore.a.x"})
    floors = (("kvstore/a/own.py", "kvstore/a"), ("kvstore/gone", "kvstore/gone.py"), ("kvstore/a",))
    assert import_rules.violations(tmp_path, floors) == [
        "kvstore/a is named on the floors twice",
        "kvstore/gone is named on a floor, and no file lies there",
        "kvstore/gone.py is named on a floor, and no file lies there",
    ]


def test_an_import_of_what_is_not_there_is_not_passed_over(tmp_path: Path) -> None:
    assert small(tmp_path, {"top/part.py": "def late():\n    from kvstore.low.gone import x"}) == [
        "kvstore/top/part.py:2 imports kvstore.low.gone, which is not in the tree"
    ]


@pytest.mark.parametrize("name", ["connector", "gpu"])
def test_an_import_by_a_linked_packages_own_name_breaks_a_rule_though_it_points_down(tmp_path: Path, name: str) -> None:
    write(tmp_path, {f"{name}/part.py": "", "kvstore/top/part.py": f"import {name}.part"})
    assert import_rules.violations(tmp_path, (("kvstore/top",), (name,))) == [
        f"kvstore/top/part.py:1 says {name}.part, which is kvstore.{name}.part"
    ]


def test_a_package_of_others_is_imported_by_all_that_are_said_to_and_by_nobody_else(tmp_path: Path) -> None:
    small(tmp_path, {"top/part.py": "import zmq.auth", "low/part.py": "def late(): from zmq import Context"})
    assert import_rules.violations(tmp_path, SMALL, {"zmq": ("kvstore/top", "gpu"), "redis": ()}) == [
        "gpu is said to import zmq, and does not",
        "kvstore/low/part.py:1 imports zmq, which is for gpu, kvstore/top",
    ]


@pytest.mark.parametrize("name", ["connector", "gpu"])
@pytest.mark.parametrize(
    ("file", "text", "dotted"),
    [
        ("kvstore/top/part.py", "import {}.part", "{}.part"),
        ("tests/test_part.py", "def late(): from {} import part", "{}"),
        ("benchmarks/part.py", "import {}", "{}"),
        ("tests/test_part.py", "monkeypatch.setattr('{}.part.LIMIT', 3)", "{}.part.LIMIT"),
        ("tests/test_part.py", "run([sys.executable, '-m', '{}.part'])", "{}.part"),
        ("tests/test_part.py", "CODE = 'from {} import part'", "{}"),
        ("tests/test_part.py", "CODE = 'import {}'", "{}"),
        ("tests/test_part.py", "CODE = '''\nimport {}.part'''", "{}.part"),
        ("tests/test_part.py", "f'see {{x}} and :class:`~{}.part.Part`'", "{}.part.Part"),
        ("kvstore/top/part.py", "import_module('{}.part')", "{}.part"),
        ("docs/part.md", "```python\nimport {}.part\n```", "{}.part"),
        ("docs/part.md", "```python\nfrom {} import part\n```", "{}"),
        ("docker-compose.yml", "command: python -m {}.part", "{}.part"),
        ("deploy/part.yaml", '"kv_connector_module_path": "{}.part"', "{}.part"),
        (".ci/run", 'python -c "import {}"', "{}"),
        ("Makefile", "\tpython -m {}.part", "{}.part"),
    ],
)
def test_a_linked_package_has_one_name_wherever_it_is_named(
    tmp_path: Path, name: str, file: str, text: str, dotted: str
) -> None:
    """By the other its modules would be loaded a second time."""
    write(tmp_path, {f"{name}/part.py": "", file: text.replace("{}", name)})
    wrong = dotted.replace("{}", name)
    line = 2 if "\n" in text else 1
    assert import_rules.top_level_names(tmp_path) == [f"{file}:{line} says {wrong}, which is kvstore.{wrong}"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tests/test_part.py", "import kvstore.{0}.part\nfrom kvstore import {0}\n{0}.part()\nself.{0}.part()"),
        ("tests/test_part.py", "'kvstore.{0}.part, {0}/part.py, {0}.py, the {0}. It'"),
        ("docs/part.md", "`kvstore.{0}.part`, the {0}. docs/{0}.md, [{0}]({0}.md), /{0}.part"),
        ("CHANGELOG.md", "{0}.part is kvstore.{0}.part"),
        (".venv/part.py", "import {0}.part"),
    ],
)
def test_what_only_looks_like_a_linked_package_is_left_alone(tmp_path: Path, file: str, text: str) -> None:
    write(tmp_path, {file: text.format("connector"), "picture.png": ""})
    (tmp_path / "picture.png").write_bytes(b"\x89PNG gpu.part")
    assert import_rules.top_level_names(tmp_path) == []


def test_the_graph_of_folders_has_its_circles_its_layers_and_few_edges_that_point_up(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "kvstore/cli.py": "import kvstore.a.x, kvstore.c.x",
            "kvstore/a/x.py": "import kvstore.a.y, kvstore.b.x, kvstore.c.x",
            "kvstore/a/y.py": "",
            "kvstore/b/x.py": "import kvstore.c.x, kvstore.errors",
            "kvstore/c/x.py": "import kvstore.a.y",
            "kvstore/errors.py": "",
        },
    )
    graph = import_rules.folder_graph(import_rules.read_tree(tmp_path))
    assert graph == {
        "kvstore/cli.py": {"kvstore/a", "kvstore/c"},
        "kvstore/a": {"kvstore/b", "kvstore/c"},
        "kvstore/b": {"kvstore/c", "kvstore/errors.py"},
        "kvstore/c": {"kvstore/a"},
        "kvstore/errors.py": set(),
    }
    assert import_rules.circles(graph) == [["kvstore/a", "kvstore/b", "kvstore/c"]]
    assert import_rules.upward_edges(graph) == [("kvstore/c", "kvstore/a")]
    assert import_rules.layers(graph) == 3
    tree = import_rules.read_tree(tmp_path)
    assert import_rules.folder_graph(tree, {"kvstore/a/y.py"})["kvstore/c"] == {"kvstore/a/y.py"}
