"""What calls cost object storage and a router, as docs/scaling.md says: by the counters of the real code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from made_pages import make_page, read_pages
from memory_tier import MemoryTier
from s3_server import URL, running_s3
from tiny_stores import layout_of, load_pages, put_pages

from kvstore.arena.arena import Arena
from kvstore.events.vllm_events import block_event, encode
from kvstore.store.store import Store
from kvstore.tiers.tier import ObjectStorage, PageWrite

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
PAGES = 16
FRAME = 4096


def table() -> dict[tuple[str, str, str], tuple[str, str]]:
    """Of each row its part, call and page; what is asked, and how many bytes that is."""
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    parts = ("object storage", "router")
    return {(row[0], row[1], row[2]): (row[3], row[4]) for row in rows if row[0] in parts and len(row) == 5}


def asked(tier: ObjectStorage, call: Callable[[], object]) -> tuple[str, str]:
    """What a call asks of the server, as in the table."""
    before = tier.traffic()
    call()
    after = tier.traffic()
    requests = {what: after.requests[what] - before.requests[what] for what in after.requests}
    size = after.sent_bytes - before.sent_bytes + after.received_bytes - before.received_bytes
    return ", ".join(
        f"{number} {what}" for what, number in requests.items() if number
    ) or "none", f"{size / 1e6:.1f} MB"


@pytest.mark.parametrize(("page", "length"), [("64 KiB", 64 << 10), ("2 MiB", 2 << 20)])
def test_requests_of_object_storage(monkeypatch: pytest.MonkeyPatch, page: str, length: int) -> None:
    pytest.importorskip("obstore", reason="the extra `objects` is not installed")
    from kvstore.tiers.objects import ObjectTier

    made = [make_page(number, length) for number in range(PAGES)]
    keys = [bytes(32) + hashlib.sha256(each.key).digest() for each in made]
    chain = [
        PageWrite(key, each.checksum, each.payload, keys[at - 1] if at else b"")
        for at, (key, each) in enumerate(zip(keys, made, strict=True))
    ]
    with running_s3(monkeypatch):
        tier = ObjectTier(URL, 1 << 30, interval=1000.0, deadline=60.0)
        try:
            assert tier.write([make_page(1000, 4096)]) == [True]  # the first one costs a heartbeat more
            found = {
                "store": asked(tier, lambda: tier.write(chain)),
                "lookup": asked(tier, lambda: tier.contains(keys)),
                "load": asked(tier, lambda: read_pages(tier, chain)),
                "use told": asked(tier, lambda: tier.touch(keys)),
            }
        finally:
            tier.close()
    written = table()
    assert {call: written.get(("object storage", call, page)) for call in found} == found


def test_events_to_a_router(shm_folder: Path) -> None:
    """Of sixteen pages with neighbours: stored, shared, loaded, and evicted for others."""
    found = {}
    with Store(
        Arena(shm_folder / "arena", 8 * PAGES * FRAME), [], [shm_folder / "arena"], shared=MemoryTier("redis")
    ) as store:
        known = store.open_namespace(layout_of("a", FRAME))
        reader = store._state.events.reader()

        def told(call: Callable[[], object]) -> tuple[str, str]:
            call()
            events, _ = reader.read(1 << 16, 0.0)
            size = sum(len(encode(1.7e9, [block_event(event, known.layout)])) for event in events)
            hashes = sum(len(event.hashes) for event in events)
            return f"{len(events)} of {hashes} pages" if events else "none", f"{size} B"

        found["store"] = told(lambda: put_pages(store, known, range(1, 1 + PAGES)))
        found["load"] = told(lambda: load_pages(store, known, range(1, 1 + PAGES)))
        while store.write_back.share():
            pass
        for first in range(100, 800, 100):
            put_pages(store, known, range(first, first + PAGES))
        reader.read(1 << 16, 0.0)
        found["store where as many leave"] = told(lambda: put_pages(store, known, range(800, 800 + PAGES)))
    written = table()
    assert {call: written.get(("router", call, "any")) for call in found} == found
