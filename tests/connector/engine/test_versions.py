"""Releases of vLLM: which are refused, and of which it is said that only a part was run."""

from __future__ import annotations

import pytest

from kvstore.connector.engine.versions import check_version, run_in_part
from kvstore.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "in_part"), [("0.31.0", False), ("0.32.1+cpu", False), ("0.33.0", True), ("0.33.1rc2", True)]
)
def test_releases_that_are_supported(version: str, in_part: bool) -> None:
    check_version(version)
    assert run_in_part(version) is in_part


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0", "dev"])
def test_other_releases(version: str) -> None:
    with pytest.raises(ConfigError, match=r"supports vLLM 0\.31 to 0\.33"):
        check_version(version)
    assert not run_in_part(version)
