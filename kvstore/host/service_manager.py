"""Tells systemd how far a service is (``sd_notify``): a datagram for each message, to the socket ``NOTIFY_SOCKET``."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

_SEND_SECONDS = 5.0
_log = logging.getLogger(__name__)


class ServiceManager:
    """Who started this process, if it asked to be told. If it did not, every method does nothing.

    A message that can't be sent is logged, and nothing else: the service goes on.

    Args:
        environment: whose ``NOTIFY_SOCKET`` is the path of a socket, or ``@`` and the name of an abstract one.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = b"\0" + os.fsencode(address[1:]) if address.startswith("@") else os.fsencode(address)

    def starting(self, status: str, seconds: float) -> None:
        """The start goes on, and may take so long from now until it is heard of again."""
        self._tell(STATUS=status, EXTEND_TIMEOUT_USEC=_microseconds(seconds))

    def ready(self, status: str) -> None:
        """The start, or a reload, is over: the service serves."""
        self._tell(READY=1, STATUS=status)

    def reloading(self) -> None:
        """A reload begins. ``ready`` ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._tell(RELOADING=1, MONOTONIC_USEC=now, STATUS="reloading")

    def stopping(self, status: str, seconds: float) -> None:
        """The stop begins, and may take so long."""
        self._tell(STOPPING=1, STATUS=status, EXTEND_TIMEOUT_USEC=_microseconds(seconds))

    def _tell(self, **facts: str | int) -> None:
        if not self._address:
            return
        message = "\n".join(f"{name}={' '.join(str(value).splitlines())}" for name, value in facts.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
                sending.settimeout(_SEND_SECONDS)
                sending.sendto(os.fsencode(message), self._address)
        except OSError as error:
            _log.warning("the service manager can't be told %s: %s", next(iter(facts)), error)


def _microseconds(seconds: float) -> int:
    return int(seconds * 1_000_000)
