"""The errors that kvstore raises on purpose. In brackets: the built-in error that one is as well.

::

    KVStoreError
    ├── InvalidRequestError (ValueError)   the caller erred; the message names the value and the limit
    │   ├── LayoutMismatchError            a namespace of this name exists with another layout
    │   ├── LimitExceededError             more than the node accepts
    │   ├── ConfigError                    an unknown key, or a value that can't be used
    │   └── UnknownNamespaceError          the namespace was not opened, or was cleared
    ├── UnavailableError (ConnectionError) the node can't be reached, is stopping, or broke the stream off
    │   └── NotAttachedError               the client does not share the node's arena (any more)
    ├── UnauthenticatedError (PermissionError)  no token, or none that the node knows
    ├── PermissionDeniedError (PermissionError) a call that is not allowed from there
    ├── DeadlineError (TimeoutError)       the answer did not come in time
    ├── InUseError                         another process owns the directory or the socket
    ├── ResourceError (OSError)            the machine can't give what the configuration asks for
    └── FormatError                        a file or a peer speaks a format that this version does not

A page that is damaged, evicted or late is none of these: it is a miss. After an ``InvalidRequestError`` nothing was
stored, lost or changed. A call that ended with ``UnavailableError`` or ``DeadlineError`` may have been done all the
same; it may be made again.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Self


class KVStoreError(Exception):
    """Base of every error that kvstore raises on purpose."""

    advice = ""
    """What to do about it, where the message says that; it ends with the same words."""


class InvalidRequestError(KVStoreError, ValueError):
    """The caller gave something that can't be right. Nothing was stored, lost or changed."""


class LayoutMismatchError(InvalidRequestError):
    """A namespace with this name is open with a layout that differs."""


class LimitExceededError(InvalidRequestError):
    """The request is larger than the node accepts, or one more than a tenant may make now."""


class ConfigError(InvalidRequestError):
    """A configuration key is unknown, or its value can't be used."""


class UnknownNamespaceError(InvalidRequestError):
    """The namespace was not opened at this node, or was cleared. Clients open it again by themselves."""


class UnavailableError(KVStoreError, ConnectionError):
    """The node can't be reached, is stopping, or broke off in the middle."""


class NotAttachedError(UnavailableError):
    """The client does not share the node's arena (any more). Clients attach again by themselves."""


class UnauthenticatedError(KVStoreError, PermissionError):
    """The node wants a token, and this client showed none, or none that the node knows."""


class PermissionDeniedError(KVStoreError, PermissionError):
    """This client may not do that, or not from where it is."""


class DeadlineError(KVStoreError, TimeoutError):
    """The answer did not come before the deadline."""


class InUseError(KVStoreError):
    """Another process owns the directory or the socket; the message names it."""


class ResourceError(KVStoreError, OSError):
    """The machine can't give what the configuration asks for (memory, disk, a port)."""

    @classmethod
    def of_place(cls, place: Path, error: OSError) -> Self:
        """A folder that can't be used, and the file that this lies at, where that is another."""
        where = "" if error.filename in (None, str(place)) else f"{error.filename}: "
        advice = _who_may_use(place) if isinstance(error, PermissionError) else ""
        return cls(f"{place} can't be used: {where}{error.strerror or error}{advice}")


class FormatError(KVStoreError):
    """A file or a peer uses a format that this version does not read."""


def _who_may_use(place: Path) -> str:
    """Whose folder it is that this user may not use, and what to do."""
    user = os.geteuid()
    try:
        owner = place.stat().st_uid
    except OSError:
        make = f"install -d -o {user} -m 700 {shlex.quote(str(place))}"
        return f" for user {user}; name a folder of your own, or have root make this one: `{make}`"
    if owner == user:
        return ""
    return f" for user {user}; it is user {owner}'s: run as that user, or name a folder of your own"
