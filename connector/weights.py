"""A fingerprint of a model's, or an adapter's, files: equal for equal weights, at whatever path.

Files of hundreds of gigabytes are not read whole. Of each tensor of a safetensors file a few samples count: training
changes nearly every number of the tensors that it touches. Of other files of weights samples at even distances count.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import ResourceError

SAMPLE_BYTES = 256
"""Bytes of one sample."""

SAMPLES_A_TENSOR = 3
SAMPLES_A_FILE = 1024
_LONGEST_HEADER = 100 << 20

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CONFIGS = (
    "adapter_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def weights_fingerprint(path: Path) -> str:
    """32 hexadecimal digits for the weights in a folder, or in one file.

    Raises:
        ResourceError: there are no weights, or they can't be read.
    """
    try:
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
        weights = [each for each in files if each.suffix in _WEIGHTS]
        if not weights:
            raise ResourceError(f"{path} has no file of weights ({', '.join(_WEIGHTS)})")
        digest = hashlib.sha256()
        for file in weights + [each for each in files if each.name in _CONFIGS]:
            size = file.stat().st_size
            digest.update(f"\0{file.name}\0{size}\0".encode())
            with file.open("rb", buffering=0) as opened:
                descriptor = opened.fileno()
                for offset, length in _samples(descriptor, file, size):
                    digest.update(os.pread(descriptor, length, offset))
    except OSError as error:
        if isinstance(error, ResourceError):
            raise
        raise ResourceError(f"the weights in {path} can't be read: {error}") from error
    return digest.hexdigest()[:32]


def _samples(descriptor: int, file: Path, size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what counts of a file."""
    if file.suffix not in _WEIGHTS:
        yield 0, size
        return
    tensors = _tensors(descriptor, size) if file.suffix == ".safetensors" else None
    if tensors is None:
        yield from _spread(0, size, SAMPLES_A_FILE)
        return
    header, spans = tensors
    yield 0, header
    for start, end in spans:
        yield from _spread(header + start, header + end, SAMPLES_A_TENSOR)


def _tensors(descriptor: int, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Bytes of a safetensors file's header, and where its tensors lie behind it; None for another format."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        return None
    try:
        entries = json.loads(os.pread(descriptor, length, 8))
        spans = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
        return 8 + length, [(int(start), int(end)) for start, end in spans]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _spread(start: int, end: int, samples: int) -> Iterator[tuple[int, int]]:
    """Evenly, the first at the start and the last at the end; all of a short stretch."""
    if end - start <= samples * SAMPLE_BYTES:
        yield start, end - start
        return
    for number in range(samples):
        yield start + (end - start - SAMPLE_BYTES) * number // (samples - 1), SAMPLE_BYTES
