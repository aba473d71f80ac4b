"""Faults one after the other, chosen by dice, while two writers write and one reads: no wrong bytes, no exception, and
in the end all is as it was."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from made_pages import make_page, read_pages
from s3_server import Faults, S3Server

from kvstore.tiers.objects import ObjectTier, known_packs

FAULTS = (
    Faults(status=403),
    Faults(status=429),
    Faults(status=500),
    Faults(status=503),
    Faults(cut=True),
    Faults(corrupt=True),
    Faults(swap=True),
    Faults(delay=1.0),
    Faults(lists_late=1.0),
    Faults(empty=True),
)
ROUNDS = 20


def test_faults_in_any_order_cost_misses_alone(
    open_objects: Callable[..., ObjectTier], server: S3Server, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_packs, "_DOUBT_SECONDS", 0.2)
    dice = random.Random(seed)
    writers = [open_objects(8 << 20, deadline=0.5) for _ in range(2)]
    reader = open_objects(8 << 20, deadline=0.5)
    stop = threading.Event()
    failed: list[BaseException] = []
    found = asked = 0

    def read() -> None:
        nonlocal found, asked
        chosen = random.Random(seed)
        try:
            while not stop.is_set():
                answers = read_pages(reader, [make_page(chosen.randrange(8 * ROUNDS), 20_000) for _ in range(8)])
                found, asked = found + sum(answers), asked + len(answers)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failed.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        for number in range(ROUNDS):
            server.faults = dice.choice((Faults(), *FAULTS))
            for which, tier in enumerate(writers):
                pages = [make_page(8 * number + 4 * which + each, 20_000) for each in range(4)]
                tier.write(pages)
                read_pages(tier, pages)
                tier.contains([page.key for page in pages])
                tier.touch([page.key for page in pages])
    finally:
        server.faults = Faults()
        stop.set()
        reading.join()
    assert not failed
    counts = reader.statistics()
    assert (counts.asked, counts.hit, counts.missed) == (asked, found, asked - found)
    last = [make_page(8 * ROUNDS + each, 20_000) for each in range(4)]
    end = time.monotonic() + 60.0
    while not (all(writers[0].write(last)) and all(read_pages(reader, last))):
        assert time.monotonic() < end, "it heals"
        time.sleep(0.1)
    assert server.used() <= 3 * (8 << 20)
