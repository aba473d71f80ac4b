"""A machine that has a CUDA device, torch and little else: no package for lower tiers, for events or for encryption."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THERE = (
    *("torch", "triton", "cuda-bindings", "pytest", "hypothesis", "numpy", "grpcio", "protobuf", "msgpack", "xxhash"),
    *("prometheus-client", "rich"),
)
OUTCOME = re.compile(r"^(?:=+ )?(.*) in [0-9.]+s", re.MULTILINE)

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bare() -> Run:
    """Run a command from the checkout on such a machine: what this Python has besides is hidden from it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE"))}
    environment |= {
        "BARE_MACHINE": " ".join(THERE),
        "PYTHONPATH": str(ROOT / "tests/fixtures/bare_machine"),
        "CUDA_PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",  # with a device the tests of the device run by themselves
    }

    def run(*command: str, path: str = "") -> subprocess.CompletedProcess[str]:
        own = environment | {"PYTHONPATH": os.pathsep.join(filter(None, [path, environment["PYTHONPATH"]]))}
        return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=240, check=False)

    return run


def test_such_a_machine_has_nothing_else(bare: Run) -> None:
    look = (
        "import importlib.metadata, importlib.util, torch, numpy, grpc, google.protobuf\n"
        "print([name for name in ('redis', 'lz4', 'zmq', 'cryptography', 'aiohttp', 'pytest_asyncio', 'transformers')"
        " if importlib.util.find_spec(name)])\n"
        "print('redis' in {each.name for each in importlib.metadata.distributions()})\n"
    )

    done = bare(sys.executable, "-c", look)

    assert done.stdout == "[]\nFalse\n", done.stderr


def test_what_needs_a_device_is_collected_and_skipped_for_the_want_of_it(bare: Run) -> None:
    tests = ROOT.glob("tests/**/test_*.py")
    marked = {str(path.relative_to(ROOT)) for path in tests if re.search(r"mark\.cuda", path.read_text())}

    done = bare("make", "test-cuda")

    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = OUTCOME.findall(done.stdout)
    assert re.fullmatch(r"\d+ skipped, \d+ deselected(, \d+ warnings?)?", outcome), done.stdout
    reasons = re.findall(r"^SKIPPED \[\d+\] ([^:]+):\d+: (.*)", done.stdout, re.MULTILINE)
    assert {file for file, _ in reasons} == marked
    assert all(re.fullmatch("needs a CUDA device.*|.* is not installed", reason) for _, reason in reasons), reasons


def test_benchmarks_of_the_device_say_why_they_do_not_run(bare: Run) -> None:
    done = bare("make", "--silent", "bench-cuda")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["skipped: this needs a CUDA device, and torch finds none"] * 2


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("copy_cost", ["--run-bytes", "8"]),
        ("device", ["--only", "layouts,pin,decode,python,arena", "--pages", "1"]),
    ],
)
def test_benchmarks_of_the_device_need_no_more_than_it_has(bare: Run, script: str, flags: list[str]) -> None:
    command = [sys.executable, f"benchmarks/{script}.py", "--device", "cpu", "--rounds", "1", "--json", *flags]

    done = bare(*command, path=str(ROOT))

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "cpu"


ENGINES = """
import sys
from pathlib import Path

import kvstore
from kvstore.config.node import NodeConfig
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.node.node import Node

folder, memory = map(Path, sys.argv[1:])
tiny = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2}
model = Llama(LlamaConfig(**tiny, num_kv_heads=1))


def answers(url):
    with kvstore.connect(url, timeout=30.0) as client:
        for _ in range(2):
            engine = Engine(model, num_blocks=16, client=client, lookup_budget=30.0, load_deadline=30.0)
            engine.add_request("a", [each % 60 for each in range(100)], 4)
            yield from engine.run()
            engine.close()


def tell(url):
    first, second = answers(url)
    print(first.tokens_loaded, second.tokens_loaded, first.token_ids == second.token_ids)


tell(f"embedded://{folder}/store?arena=16MiB&disk_limit=16MiB&arena_dir={memory}/embedded")
config = {"socket": folder / "s", "listen": "", "arena": 16 << 20, "arena_dir": memory / "arena", "disk_limit": 0}
node = Node(NodeConfig(**config))
try:
    tell(f"unix://{folder}/s")
finally:
    node.stop()
"""


def test_engines_find_pages_over_an_embedded_store_and_over_a_node(
    bare: Run, short_folder: Path, shm_folder: Path
) -> None:
    done = bare(sys.executable, "-c", ENGINES, str(short_folder), str(shm_folder), path=str(ROOT))

    assert done.stdout == "0 96 True\n" * 2, done.stderr
