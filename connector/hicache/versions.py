"""The releases of SGLang that the backend is for."""

from __future__ import annotations

from kvstore.errors import ConfigError

SUPPORTED = ("0.5.23",)
"""HiCache's interface changes from release to release: those that ``make test-sglang`` was run with."""


def check_version(version: str) -> None:
    """Whether this release of SGLang is one of them.

    Raises:
        ConfigError: it is not.
    """
    if version.partition("+")[0] not in SUPPORTED:
        raise ConfigError(
            f"this kvstore supports SGLang {', '.join(SUPPORTED)}, this is SGLang {version}: install one of these, or"
            " another kvstore"
        )
