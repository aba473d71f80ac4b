"""Lookups that make no call, beside stores, evictions, promotions and reclaims, on disk and in object storage: a page
that is there is never a "no".

Each page is stored once, by a process of its own. So what the node does not have now it will never have again; and
where it has a page now that was stored before a lookup began, that lookup may not have said that it is nowhere. But for
pages that are dropped by wish: those that are on their way to the disk are nowhere, then there, and then dropped there.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from node_process import NodeProcess
from s3_server import URL, S3Server, running_s3
from storing_process import LAYOUT, PAGES, prompt, split

import kvstore
from kvstore.arena.epochs import CAN_READ
from kvstore.page_codes import UNTOLD, PageTier

SECONDS = float(os.environ.get("NOWHERE_SECONDS", "2"))
LATEST = 400
"""Among so many prompts, and those to come, the ones looked up are chosen: arena and disk hold 150 or so."""
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Object storage, which a node finds by the environment."""
    with running_s3(monkeypatch) as running:
        yield running


@pytest.mark.nowhere
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.skipif(not CAN_READ, reason="on this processor nothing is read without a call")
@pytest.mark.parametrize("tiers", ["disk", "disk and objects"])
def test_no_page_that_is_there_is_said_to_be_nowhere(
    tiers: str, node_process: Callable[..., NodeProcess], request: pytest.FixtureRequest
) -> None:
    settings = {"arena": "8MiB", "disk_limit": "64MiB"}
    if tiers == "disk and objects":
        pytest.importorskip("obstore", reason="the extra `objects` is not installed")
        request.getfixturevalue("bucket")
        settings |= {"disk_limit": "16MiB", "objects": URL, "objects_limit": "64MiB", "objects_admit": "all"}
    node = node_process(**settings)
    storing = subprocess.Popen(
        [sys.executable, str(ROOT / "fixtures" / "storing_process.py"), node.url],
        stdout=subprocess.PIPE,
        text=True,
    )
    stored = [0]
    dropped: set[int] = set()

    def count() -> None:
        assert storing.stdout is not None
        for line in storing.stdout:
            if line.startswith("evict"):
                dropped.add(int(line.split()[1]))
            else:
                stored[0] = int(line)

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    looked = nowhere = untold = 0
    gone: dict[int, set[bytes]] = defaultdict(set)
    """By prompt, the pages of which the node has said that it has them no more."""
    prompt_of = lru_cache(2 * LATEST)(prompt)  # to make them takes longer than to look them up
    chosen = random.Random(0)
    try:
        with kvstore.connect(node.url, timeout=60.0) as client:
            pages = client.namespace(LAYOUT)
            end = time.monotonic() + 120.0
            while not stored[0]:
                assert time.monotonic() < end, "nothing is stored"
                time.sleep(0.01)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end or (not nowhere and time.monotonic() < end + 120.0):
                latest = stored[0]
                numbers = [max(0, latest - chosen.randrange(LATEST) + 20) for _ in range(16)]
                before = [number < latest for number in numbers]  # stored, before the lookup begins
                opened, path = pages._handle.now(end + 300.0)
                told = path.find(opened, b"".join(map(prompt_of, numbers)))
                assert told is not None
                looked += len(told)
                untold += told.count(UNTOLD)
                nowhere += told.count(PageTier.ABSENT)
                said = [
                    (number, each)
                    for place, (number, known) in enumerate(zip(numbers, before, strict=True))
                    if known and len(gone[number]) < PAGES
                    for each, tier in zip(split(prompt_of(number)), told[place * PAGES :], strict=False)
                    if tier == PageTier.ABSENT and each not in gone[number]
                ]
                if said:
                    asked = [each for _, each in said]
                    [truth] = client._session.control.lookup([(LAYOUT.fingerprint, asked)], 60.0)
                    there = [
                        (number, PageTier(tier).name) for (number, _), tier in zip(said, truth, strict=True) if tier
                    ]
                    if there:  # what was dropped until now is known once more was stored
                        more, patience = stored[0] + 2, time.monotonic() + 60.0
                        while stored[0] < more and time.monotonic() < patience:
                            time.sleep(0.01)
                        there = [each for each in there if each[0] not in dropped]
                    assert not there, (
                        f"behind {looked} pages looked up, {stored[0]} prompts stored, these pages of prompts were said"
                        f" to be nowhere, and are there: {Counter(there)}"
                    )
                    for number, each in said:
                        gone[number].add(each)
    finally:
        storing.kill()
        storing.wait()
        counting.join()
        assert storing.stdout is not None
        storing.stdout.close()
    print(
        f"{looked:,} pages looked up in {SECONDS:.0f} s: {nowhere:,} nowhere, {untold:,} asked for;"
        f" {stored[0] * PAGES:,} stored, {sum(map(len, gone.values())):,} seen to be gone"
    )
    assert nowhere
    assert untold < looked
