"""The calls around the calls that pin memory. The CUDA runtime is replaced: there is none here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.gpu.cudart import CudaRuntime, cuda_runtime
from kvstore.gpu.pinned import PinnedMapping, is_pinned

GLOBAL = 0  # cudaStreamCaptureModeGlobal, what threads begin with
RELAXED = 2


class Library:
    """As libcudart: what is refused stays behind as the thread's last error."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.status = 0
        self.last_error = 0
        self.mode = GLOBAL
        self.attribute = 1
        self.mode_status = 0

    def call(self, name: str) -> int:
        self.log.append(f"{name}, mode {self.mode}")
        self.last_error = self.status or self.last_error
        return self.status

    def cudaHostRegister(self, address: Any, size: Any, flags: Any) -> int:
        return self.call("register")

    def cudaHostUnregister(self, address: Any) -> int:
        return self.call("unregister")

    def cudaDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (91, 1)
        value._obj.value = self.attribute
        return self.call("attribute")

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        if self.mode_status:
            self.last_error = self.mode_status
            return self.mode_status
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def runtime(library: Library, monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    @contextmanager
    def device(index: torch.device) -> Iterator[None]:
        library.log.append(f"use {index}")
        yield
        library.log.append("as before")

    monkeypatch.setattr(torch.cuda, "device", device)
    return CudaRuntime(library, torch.device("cuda", 1))


def test_each_call_is_made_for_its_device_and_beside_captures(library: Library, runtime: CudaRuntime) -> None:
    with PinnedMapping(np.zeros(64, np.uint8), runtime) as mapping:
        assert mapping.pinned

    assert library.log == [
        "use cuda:1",
        "register, mode 2",
        "as before",
        "use cuda:1",
        "unregister, mode 2",
        "as before",
    ]
    assert library.mode == GLOBAL


def test_what_is_refused_leaves_no_error_for_whoever_asks_next(library: Library, runtime: CudaRuntime) -> None:
    memory = np.zeros(64, np.uint8)
    library.status = 2
    assert PinnedMapping(memory, runtime).reason == "cudaHostRegister refused 64 bytes: cudaErrorMemoryAllocation (2)"
    assert library.last_error == 0

    library.status = 0
    mapping = PinnedMapping(memory, runtime)
    library.status = 713
    mapping.release()
    assert library.last_error == 0
    assert library.mode == GLOBAL


@pytest.mark.parametrize(("status", "attribute", "can"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_whether_the_device_has_the_hosts_addresses(
    library: Library, runtime: CudaRuntime, status: int, attribute: int, can: bool
) -> None:
    library.status, library.attribute = status, attribute

    assert runtime.can_use_host_pointers(1) is can
    assert library.last_error == 0


def test_what_could_end_a_capture_is_not_asked_for(library: Library, runtime: CudaRuntime) -> None:
    # Another thread may be capturing a graph, and this one's mode can't be set.
    library.mode_status = 3

    mapping = PinnedMapping(np.zeros(64, np.uint8), runtime)

    assert mapping.reason == "cudaHostRegister refused 64 bytes: cudaErrorInitializationError (3)"
    assert runtime.cudaHostUnregister(0) == 3
    assert not runtime.can_use_host_pointers(1)
    assert library.log == ["use cuda:1", "as before"] * 3
    assert library.last_error == 0


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    loaded = Loaded()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("kvstore.gpu.cudart.ctypes.CDLL", loaded)
    return loaded


class Loaded:
    """Libraries by name: those that this process has, and those that the machine has."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.on_disk: set[str] = set()
        self.opened: list[str] = []

    def __call__(self, name: str, mode: int = 0) -> object:
        if name not in self.here and (mode & os.RTLD_NOLOAD or name not in self.on_disk):
            raise OSError(name)
        self.opened.append(name)
        return object()


@pytest.mark.parametrize(
    ("version", "name"),
    [("11.8", "libcudart.so.11.0"), ("12.8", "libcudart.so.12"), ("13.0", "libcudart.so.13")],
)
def test_the_runtime_that_torch_has_loaded_is_found_by_its_name(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, version: str, name: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    loaded.here = {name}

    assert cuda_runtime(torch.device("cpu")) is None
    assert loaded.opened == []
    assert cuda_runtime(torch.device("cuda", 1)) is not None
    assert cuda_runtime() is not None
    assert loaded.opened == [name] * 2


def test_a_runtime_that_a_wheel_has_renamed_is_found_where_it_is_mapped(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    bundled, other = tmp_path / "libcudart-d0da41ae.so.11.0", tmp_path / "libcudart.so.12"
    mappings = []
    for path in (other, tmp_path / os.fsdecode(b"no \xff text.so"), bundled):
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            mappings.append(mmap.mmap(file.fileno(), 4096))
    loaded.here = {str(bundled), str(other)}
    loaded.on_disk = {"libcudart.so.11.0"}  # the machine's own, which torch does not use

    assert cuda_runtime() is not None
    assert loaded.opened == [str(bundled)]
    for mapping in mappings:
        mapping.close()


def test_where_the_runtime_is_linked_into_torch_the_machines_does(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    loaded.on_disk = {"libcudart.so.12"}

    assert cuda_runtime() is not None
    assert loaded.opened == ["libcudart.so.12"]


def test_without_torchs_cuda_runtime_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    memory = np.zeros(64, np.uint8)

    assert cuda_runtime() is None
    with PinnedMapping(memory) as mapping:
        assert not mapping.pinned
        assert not is_pinned(memory)


@pytest.mark.cuda
def test_torchs_cuda_runtime_is_found_and_forgets_what_it_refused() -> None:
    runtime = cuda_runtime(torch.device("cuda", 0))
    assert runtime is not None
    page = np.zeros(1 << 20, np.uint8)
    address = page.ctypes.data

    assert runtime.cudaHostRegister(address, page.nbytes, 0) == 0
    assert runtime.cudaHostRegister(address, page.nbytes, 0) != 0
    assert torch.ones(3, device="cuda").sum().item() == 3, "the error that stayed behind would be raised here"
    assert runtime.cudaHostUnregister(address) == 0
    assert runtime.cudaHostUnregister(address) != 0
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.cuda
def test_memory_is_registered_while_a_graph_is_captured() -> None:
    runtime = cuda_runtime(torch.device("cuda", 0))
    tensor = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    memory = np.zeros(1 << 20, np.uint8)

    with torch.cuda.graph(graph, capture_error_mode="global"):
        tensor += 1
        with PinnedMapping(memory, runtime) as mapping:
            assert mapping.pinned, mapping.reason
        tensor += 1
    graph.replay()

    assert tensor.tolist() == [2, 2, 2]
