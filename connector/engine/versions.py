"""The releases of vLLM that the connector is for."""

from __future__ import annotations

import re

from kvstore.errors import ConfigError

OLDEST, NEWEST = (0, 31), (0, 33)
"""The connector's interface changes from release to release. Tried by ``make test-vllm``, but for the newest one, of
which there is no build for CPUs yet: docs/vllm.md says what of it was run."""

_IN_PART = ((0, 33),)
"""Those of which only a part was run."""


def check_version(version: str) -> None:
    """Whether this release of vLLM is one of them.

    Raises:
        ConfigError: it is not.
    """
    found = _release(version)
    if found is None or not OLDEST <= found <= NEWEST:
        raise ConfigError(
            f"this kvstore supports vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, this is vLLM {version}:"
            " install a vLLM of that range, or another kvstore"
        )


def run_in_part(version: str) -> bool:
    """Whether only a part of what the connector does was ever run with this release of vLLM."""
    return _release(version) in _IN_PART


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else None
