"""Says in the log when a node's certificate ends soon: at its start, at a reload, and once a day."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore.security.certificate import DAY, tell_of_end
from kvstore.service.access.gate import Tls


class CertificateWatch:
    """Looks at once, and every so many seconds until it is stopped.

    Args:
        tls: what the node shows; the latest counts.
        file: where it was read from, for the log.
        seconds: from one look to the next.
    """

    def __init__(self, tls: Tls, file: Path, seconds: float = DAY) -> None:
        self._tls = tls
        self._file = file
        self._seconds = seconds
        self._stop = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._run, name="kvstore-certificate", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Log it, if there is something to say."""
        tell_of_end(f"the certificate {self._file}", self._tls.validity)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self.look()
