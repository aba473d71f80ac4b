"""The object tier over a real S3 server: the one that ``OBJECTS_URL`` and the environment (``AWS_…``) name."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from made_pages import make_page, read_pages
from tier_contract import TierContract

from kvstore.tiers.objects import ObjectTier
from kvstore.tiers.objects.bucket import Bucket
from kvstore.tiers.tier import Tier

URL = os.environ.get("OBJECTS_URL", "")
pytestmark = pytest.mark.skipif(not URL, reason="OBJECTS_URL names no bucket; make test-s3 says more")


@pytest.fixture
def place() -> Iterator[str]:
    """A prefix of the test's own, which is empty again in the end."""
    url = f"{URL.rstrip('/')}/test-{secrets.token_hex(8)}"
    yield url
    bucket = Bucket(url, 20.0)
    bucket.delete([each.path for each in bucket.list("")])
    bucket.close()


@pytest.fixture
def open_objects(place: str) -> Iterator[Callable[..., ObjectTier]]:
    with ExitStack() as stack:

        def open_tier(limit_bytes: int = 64 << 20) -> ObjectTier:
            tier = ObjectTier(place, limit_bytes, interval=0.2, deadline=30.0, silence=3.0)
            stack.callback(tier.close)
            return tier

        yield open_tier


class TestContract(TierContract):
    @pytest.fixture
    def open_tier(self, open_objects: Callable[..., Tier]) -> Callable[[], Tier]:
        return lambda: open_objects(16 << 20)


def test_two_writers_find_each_others_pages_and_keep_to_their_limits(
    place: str, open_objects: Callable[..., ObjectTier]
) -> None:
    first, second = open_objects(8 << 20), open_objects(8 << 20)
    for number in range(0, 40, 2):
        assert first.write([make_page(number, 1 << 20)]) == [True]
        assert second.write([make_page(number + 1, 1 << 20)]) == [True]
        assert max(first.statistics().used_bytes, second.statistics().used_bytes) <= 8 << 20
    bucket = Bucket(place, 30.0)
    assert sum(each.size for each in bucket.list("")) <= 16 << 20
    bucket.close()
    newest = [make_page(38, 1 << 20), make_page(39, 1 << 20)]
    end = time.monotonic() + 60.0
    while read_pages(first, newest) != [True, True] and time.monotonic() < end:
        time.sleep(0.1)
    assert read_pages(first, newest) == read_pages(second, newest) == [True, True]


def test_what_a_dead_writer_left_is_adopted(place: str, open_objects: Callable[..., ObjectTier]) -> None:
    first = open_objects()
    pages = [make_page(n, 100_000) for n in range(8)]
    assert all(first.write(pages))
    first._stop.set()
    first._thread.join()
    second = open_objects()
    assert all(read_pages(second, pages))
    end = time.monotonic() + 60.0
    while second.statistics().used_bytes < 800_000 and time.monotonic() < end:
        threading.Event().wait(0.1)
    assert second.statistics().used_bytes >= 800_000
    assert all(read_pages(second, pages))
