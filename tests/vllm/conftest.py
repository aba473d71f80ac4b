"""Real vLLM, on models made on the spot. Skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

HERE = Path(__file__).parent

pytest.register_assert_rewrite("tests.vllm.driving")  # its asserts say what they compared, as a test's do


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="drives vLLM, which is not installed (make test-vllm)")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def recurrent_kernels() -> None:
    """Skips where vLLM's build for CPUs can't compute a model with recurrent layers in float32."""
    import vllm

    if vllm.__version__.startswith("0.31."):
        pytest.skip("vLLM 0.31 has no causal_conv1d_fwd in float32 for CPUs, and in bfloat16 only blocks of 64 tokens")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model by name, written when it is asked for first: ``llama``, ``hybrid``, ``recurrent``,
    ``deepseek``, ``idefics``, ``worded``, ``chat``, ``lora`` (:mod:`tests.vllm.model`)."""
    from tests.vllm import model as writers

    base = tmp_path_factory.mktemp("models")

    def model(name: str) -> Path:
        folder: Path = base / name
        return folder if folder.exists() else getattr(writers, f"write_{name}")(folder)

    return model


@pytest.fixture
def node(node_process: Callable[..., NodeProcess]) -> NodeProcess:
    """A node with room for all that a test stores."""
    return node_process(arena="64MiB")


@pytest.fixture
def transfer(node: NodeProcess) -> dict[str, Any]:
    """An engine's ``kv_transfer_config`` for it, with which every hit is found, however busy the machine is."""
    from tests.vllm.engine import PATIENT, transfer_config

    return transfer_config(node.url, **PATIENT)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A ``ticket_key_file``."""
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.fixture(params=["V1", "V2"])
def runner(request: pytest.FixtureRequest) -> str:
    """Which of vLLM's model runners an engine has: in which order a step's calls come."""
    return str(request.param)


@pytest.fixture
def start_loop(models: Callable[[str], Path], runner: str) -> Iterator[Callable[..., Any]]:
    """Start an engine with a made-up model (:class:`~tests.vllm.loop.Loop`) on a node; ``extra`` goes into
    ``kv_connector_extra_config``, and ``role`` is its ``kv_role``."""
    from tests.vllm.driving import PATIENT
    from tests.vllm.engine import transfer_config
    from tests.vllm.loop import Loop

    loops: list[Loop] = []

    def start(node: Any, *, extra: dict[str, Any] | None = None, role: str = "kv_both", **options: Any) -> Loop:
        deadlines = {"lookup_budget_ms": PATIENT, "load_deadline_ms": PATIENT, "store_deadline_ms": PATIENT}
        transfer = transfer_config(node.url, **(deadlines | (extra or {})))
        loop = Loop(models("llama"), transfer | {"kv_role": role}, **({"runner": runner} | options))
        loops.append(loop)
        return loop

    yield start
    for loop in loops:
        loop.close()


@pytest.fixture
def start_engine(models: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start an :class:`~tests.vllm.engine.EngineProcess`; ``model`` by name. It is gone when the test ends."""
    from tests.vllm.engine import EngineProcess

    engines: list[EngineProcess] = []

    def start(model: str = "llama", **options: Any) -> EngineProcess:
        engine = EngineProcess(models(model), tmp_path / f"engine-{len(engines)}.log", **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def plain(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """What vLLM answers without a connector: one process a model for the whole run, with nothing cached.

    Takes the model's name, what :meth:`~tests.vllm.engine.EngineProcess.run` takes, and as ``options`` the engine's.
    """
    from tests.vllm.engine import Answers, EngineProcess

    engines: dict[str, EngineProcess] = {}
    folder = tmp_path_factory.mktemp("plain")

    def answers(prompts: Any, *, model: str = "llama", options: dict[str, Any] | None = None, **run: Any) -> Answers:
        name = f"{model} {sorted((options or {}).items())}"
        if name not in engines:
            engines[name] = EngineProcess(models(model), folder / f"{len(engines)}.log", **(options or {}))
        result = engines[name].run(prompts, **run)
        engines[name].forget()
        return result

    yield answers
    for engine in engines.values():
        engine.kill()


@pytest.fixture
def start_server(models: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a :class:`~tests.vllm.server.ServerProcess`, with ``ready=False`` without waiting for it."""
    from tests.vllm.server import ServerProcess

    servers: list[ServerProcess] = []

    def start(model: str = "llama", *, ready: bool = True, **options: Any) -> ServerProcess:
        server = ServerProcess(models(model), tmp_path / f"server-{len(servers)}.log", **options)
        servers.append(server)
        server.launch()
        if ready:
            server.wait_ready()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Make a prompt: token ids, so many, the same for the same seed."""

    def make(tokens: int, seed: int = 0) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(2, 1024) for _ in range(tokens)]

    return make
