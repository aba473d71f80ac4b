"""A fingerprint of a model's, or an adapter's, files: equal for equal weights, at whatever path, by whatever name.

Every byte counts: who adds a token to a vocabulary changes one row of one tensor. Files are read once, by several
threads, at about the speed of memory when they have just been loaded, or of the disk. What was found is remembered by
the files' identity (inode, size, times), so that the other ranks of an engine, and its next start, read nothing; where
a file system makes times up, nothing is remembered.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Self

import xxhash

from kvstore.errors import ResourceError

CHUNK = 32 << 20
"""Bytes that are read and hashed at once. A fingerprint depends on it."""

THREADS = 4

PATIENCE = 600.0
"""Seconds for which another process that reads the same files is waited for."""

SETTLED = 5.0
"""Seconds after which a file that was written counts as finished: what was found of it is remembered."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
CONFIGS = (
    "adapter_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What stands beside weights and decides, as they do, what is computed."""


def weights_fingerprint(path: Path, memory: Path | None = None) -> str:
    """32 hexadecimal digits for the weights in a folder, or in one file.

    Args:
        path: folder or file.
        memory: folder where fingerprints are remembered; by default ``$XDG_CACHE_HOME/kvstore-weights``.

    Raises:
        ResourceError: there are no weights, or they can't be read.
    """
    try:
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
        weights = [each for each in files if each.suffix in _WEIGHTS]
        if not weights:
            raise ResourceError(f"{path} has no file of weights ({', '.join(_WEIGHTS)})")
        counting = weights + [each for each in files if each.name in CONFIGS]
        with _Memory(memory or _default_memory(), counting) as remembered:
            if remembered.fingerprint is None:
                remembered.fingerprint = _read(counting)
            return remembered.fingerprint
    except OSError as error:
        if isinstance(error, ResourceError):
            raise
        raise ResourceError(f"the weights in {path} can't be read: {error}") from error


def weights_folder(model: str, revision: str | None, download_dir: str | None, file: str = "config.json") -> Path:
    """Where a model's weights are: a folder, or a snapshot of the hub's cache."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, file, cache_dir=download_dir, revision=revision)
    except ValueError:  # no name on the hub: an address, a file in a repository
        found = None
    if not isinstance(found, str):
        raise ResourceError(f"the weights of {model} are in no folder on this machine")
    return Path(found).parent


def _read(files: Sequence[Path]) -> str:
    sizes = [file.stat().st_size for file in files]
    chunks = [
        (file, start, min(CHUNK, size - start))
        for file, size in zip(files, sizes, strict=True)
        for start in range(0, size, CHUNK)
    ]
    digest = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"\0{_part(file, files)}\0{size}\0".encode())
    with ThreadPoolExecutor(THREADS, "kvstore-weights") as pool:
        for of_chunk in pool.map(_hash_chunk, chunks):
            digest.update(of_chunk)
    return digest.hexdigest()[:32]


def _part(file: Path, files: Sequence[Path]) -> str:
    """Which of a model's files one is. The name of a single one is the model's, which people choose."""
    return file.name if len(files) > 1 else file.suffix


def _hash_chunk(chunk: tuple[Path, int, int]) -> bytes:
    file, start, length = chunk
    with file.open("rb", buffering=0) as opened:
        data = os.pread(opened.fileno(), length, start)
    if len(data) != length:
        raise ResourceError(f"{file} has {len(data)} bytes at {start}, {length} are expected: it is being written")
    return xxhash.xxh3_128(data).digest()


class _Memory:
    """What is known of these files; others who want to know it wait meanwhile. Without a folder nothing is known."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        told = [file.stat() for file in files]
        identity = [
            (_part(file, files), each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
            for file, each in zip(files, told, strict=True)
        ]
        newest = max(max(each.st_mtime, each.st_ctime) for each in told)
        settled = time.time() - newest > SETTLED  # or a change in the same tick of the clock is not seen
        # Images and mounted object stores make times up, in whole seconds: other weights may have the same.
        self._may_remember = settled and all(each.st_ctime_ns % 1_000_000_000 for each in told)
        self._path = folder / hashlib.sha256(repr(identity).encode()).hexdigest()
        self._descriptor: int | None = None
        self._known: str | None = None
        self.fingerprint: str | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.parent.stat().st_uid == os.geteuid():
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._wait(self._descriptor)
                known = os.pread(self._descriptor, 64, 0).decode("ascii", "replace")
                if re.fullmatch("[0-9a-f]{32}", known):
                    self._known = self.fingerprint = known
        return self

    @staticmethod
    def _wait(descriptor: int) -> None:
        """Until nobody else reads these files, or for :data:`PATIENCE`: then they are read twice."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return

    def __exit__(self, *error: object) -> None:
        if self._descriptor is None:
            return
        if self._may_remember and self.fingerprint is not None and self._known is None:
            with suppress(OSError):
                os.pwrite(self._descriptor, self.fingerprint.encode(), 0)
        os.close(self._descriptor)


def _default_memory() -> Path:
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        cache = Path(f"/tmp/kvstore-{os.geteuid()}")  # noqa: S108 - private, or not used
    return cache / "kvstore-weights"
