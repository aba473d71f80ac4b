"""Mapped files of an arena's folder."""

from __future__ import annotations

import mmap
import os
from io import FileIO
from pathlib import Path as FilePath

from kvstore.errors import ResourceError


class Mapping(mmap.mmap):
    """A mapped file. It is there as long as anybody has a view of it, and keeps open what must be open until then."""

    kept: object = None
    identity = (0, 0)
    """Device and inode."""


def map_file(path: FilePath, protection: int) -> Mapping:
    """Map a file as a whole.

    Raises:
        ResourceError: it can't be mapped.
    """
    try:
        with FileIO(path, "r+" if protection & mmap.PROT_WRITE else "r") as file:
            status = os.fstat(file.fileno())
            mapping = Mapping(file.fileno(), status.st_size, mmap.MAP_SHARED, protection)
            mapping.identity = status.st_dev, status.st_ino
            return mapping
    except (OSError, ValueError) as error:  # ValueError: a file that a node is just making is empty
        raise ResourceError(f"{path.parent}: the arena can't be mapped: {error}") from error
