"""Descriptors of the process: as many as it may have, and a word when none is left."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from kvstore.service.descriptors import Descriptors, raise_limit


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Soft and hard limit; as before behind the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_that_none_is_left_is_counted_and_said_once(limits, caplog):
    descriptors = Descriptors()
    try:
        descriptors.look()
        assert "are in use" not in caplog.text
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        descriptors.look()
        descriptors.look()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        [family] = descriptors.collect()
        assert family.samples[0].value >= 2
        assert caplog.text.count("are in use") == 1
    finally:
        descriptors.stop()


def test_a_low_soft_limit_is_raised(limits):
    wanted = min(limits[1], 1 << 16) if limits[1] != resource.RLIM_INFINITY else 1 << 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, wanted), limits[1]))
    raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, limits[1])
