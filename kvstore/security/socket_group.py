"""The group whose members may use a node's socket and arena, besides its own user: one, or none."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ResourceError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SocketGroup:
    """Gives files and folders to the group, and sets their modes. Nothing is ever open to others."""

    gid: int | None = None
    """The group. None: the node's own user is alone."""

    def set_modes(self, path: Path, private: int, shared: int) -> None:
        """Give a file or folder of this user the mode ``private`` or, where there is a group, that and ``shared``.

        Raises:
            ResourceError: this user may not give it to the group.
            OSError: it is gone, or somebody else's.
        """
        if self.gid is None:
            path.chmod(private)
            return
        try:
            os.chown(path, -1, self.gid)
        except PermissionError as error:
            raise ResourceError(
                f"{path} can't be given to group {self.gid}: user {os.geteuid()} is not a member of it"
            ) from error
        path.chmod(shared)  # behind it: another group takes the set-group-id bit away

    def make_folder(self, folder: Path) -> None:
        """Make the folder that a socket lies in, where it is missing. One that is there stays as it is.

        Raises:
            ResourceError: this user may not give it to the group.
            OSError: it can't be made, or is no folder.
        """
        was_there = folder.is_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not was_there:
            self.set_modes(folder, 0o700, 0o750)

    def check_way_to(self, path: Path) -> None:
        """Warn if the folder that ``path`` lies in keeps the group out: it is not this node's to change."""
        folder = path.absolute().parent
        status = folder.stat()
        if self.gid is None or status.st_mode & 0o001 or (status.st_gid == self.gid and status.st_mode & 0o010):
            return
        _log.warning(
            "members of group %d don't get to %s: %s has mode %04o and group %d",
            *(self.gid, path, folder, status.st_mode & 0o7777, status.st_gid),
        )
