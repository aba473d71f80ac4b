"""The object tier over a real S3 server: the one that ``OBJECTS_URL`` and the environment (``AWS_…``) name, or Ceph's
gateway, where that is installed. Without ``OBJECTS_URL`` and ``TEST_S3`` the short form runs, which is one test: each
process that runs some of them starts a gateway."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ceph_gateway import BUCKET, missing, running_ceph
from made_pages import make_page, read_pages
from tier_contract import TierContract

from kvstore.tiers.objects import ObjectTier
from kvstore.tiers.objects.bucket import Bucket
from kvstore.tiers.tier import Tier

URL = os.environ.get("OBJECTS_URL", "")
LONG = bool(URL or os.environ.get("TEST_S3"))
pytestmark = pytest.mark.skipif(not URL and bool(missing()), reason=f"OBJECTS_URL names no bucket, and {missing()}")
long_form = pytest.mark.skipif(not LONG, reason="the long form: make test-s3")


@pytest.fixture(scope="module")
def bucket_url() -> Iterator[str]:
    """A bucket that this process's clients find by the environment."""
    if URL:
        yield URL.rstrip("/")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        running_ceph(Path(folder)) as environment,
        pytest.MonkeyPatch.context() as patched,
    ):
        for name, value in environment.items():
            patched.setenv(name, value)
        yield f"s3://{BUCKET}"


@pytest.fixture
def place(bucket_url: str) -> Iterator[str]:
    """A prefix of the test's own, which is empty again in the end."""
    url = f"{bucket_url}/test-{secrets.token_hex(8)}"
    yield url
    bucket = Bucket(url, 20.0)
    bucket.delete([each.path for each in bucket.list("")])
    bucket.close()


@pytest.fixture
def open_objects(place: str) -> Iterator[Callable[..., ObjectTier]]:
    with ExitStack() as stack:

        def open_tier(limit_bytes: int = 64 << 20) -> ObjectTier:
            tier = ObjectTier(place, limit_bytes, interval=0.2, deadline=30.0, silence=20.0)
            stack.callback(tier.close)
            return tier

        yield open_tier


@long_form
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
    for tier in (first, second):
        while read_pages(tier, newest) != [True, True]:
            assert time.monotonic() < end, "each hears of what the other one wrote"
            time.sleep(0.1)


@long_form
def test_what_a_dead_writer_left_is_adopted(place: str, open_objects: Callable[..., ObjectTier]) -> None:
    first = open_objects()
    pages = [make_page(n, 100_000) for n in range(8)]
    assert all(first.write(pages))
    first._rounds._stop.set()
    first._rounds._thread.join()
    second = open_objects()
    assert all(read_pages(second, pages))
    end = time.monotonic() + 60.0
    while second.statistics().used_bytes < 800_000 and time.monotonic() < end:
        threading.Event().wait(0.1)
    assert second.statistics().used_bytes >= 800_000
    assert all(read_pages(second, pages))
