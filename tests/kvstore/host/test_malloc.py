"""How many arenas of the C library a node's threads use, and what these keep."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from kvstore.host.malloc import Excess, keep_memory_for_messages

_MANY_THREADS = """
import ctypes, threading
from kvstore.host.malloc import keep_memory_for_messages, limit_malloc_arenas

def arenas():
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    return text.value.count(b"<heap nr")

def work():
    kept = bytearray(100_000)
    all_are_here.wait()
    return kept

limit_malloc_arenas()
before = arenas()
all_are_here = threading.Barrier(12)
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(before, arenas())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("said", [None, 5])
def test_threads_share_two_arenas_or_as_many_as_the_environment_says(said: int | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if said:
        environment["MALLOC_ARENA_MAX"] = str(said)
    done = subprocess.run(
        [sys.executable, "-c", _MANY_THREADS], env=environment, capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert after == max(before, said or 2)


_MESSAGES = """
import resource, sys
from kvstore.host.malloc import keep_memory_for_messages

def faults():
    for _ in range(20):
        messages = [b"x" * (2 << 20) for _ in range(4)]
        messages.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1:]:
    keep_memory_for_messages()
print(-faults() + faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_memory_of_one_message_is_there_for_the_next_one() -> None:
    pages_each = 20 * 4 * (2 << 20) // 4096

    def faults(*flags: str) -> int:
        command = [sys.executable, "-c", _MESSAGES, *flags]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < pages_each // 100
    assert faults() > pages_each // 4, "glibc keeps it by itself now"


_CLIENT = """
import resource
from kvstore.client.paths.control import Connection
from kvstore.client.paths.grpc import GrpcPath

def faults():
    for _ in range(20):
        messages = [b"x" * (2 << 20) for _ in range(4)]
        messages.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

path = GrpcPath(Connection("127.0.0.1:1", "kv://127.0.0.1:1"))
print(-faults() + faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_client_leaves_the_memory_of_its_process_alone() -> None:
    done = subprocess.run([sys.executable, "-c", _CLIENT], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20 * 4 * (2 << 20) // 4096 // 4


_PIECES = """
import threading
from kvstore.host.malloc import Excess, _resident_bytes

def work():
    threads_own = [[bytearray(20_000), bytearray(700)] for _ in range(4_000)]
    for each in threads_own:
        each[0] = None
    kept.append(threads_own)

kept = []
excess = Excess()
before = _resident_bytes()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
taken = _resident_bytes() - before
print(taken, excess.give_back(), _resident_bytes() - before, excess.give_back())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_between_what_stays_is_given_back_once() -> None:
    done = subprocess.run([sys.executable, "-c", _PIECES], capture_output=True, text=True, check=True)
    taken, gave, left, again = done.stdout.split()
    assert int(taken) > 100 << 20
    assert (gave, again) == ("True", "False")
    assert int(left) < int(taken) // 2


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    excess = Excess()
    monkeypatch.setattr("kvstore.host.malloc.ctypes.CDLL", lambda name: object())
    assert not excess.give_back()


def test_what_the_environment_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    class Library:
        def mallopt(self, parameter: int, value: int) -> None:
            told.append(parameter)

    monkeypatch.setattr("kvstore.host.malloc.ctypes.CDLL", lambda name: Library())
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    keep_memory_for_messages()
    assert sorted(told) == [-3, -1]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    told.clear()
    keep_memory_for_messages()
    assert told == [-3]
