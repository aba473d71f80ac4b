"""What a store keeps in memory depends on what it has, not on what it did."""

from __future__ import annotations

import gc
from array import array
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

from tiny_stores import OpenStore, hold_pages, layout_of, load_pages, page_hashes, put_pages

from kvstore.config.rules import parse_rules
from kvstore.store.store import Store
from kvstore.tiers.disk import DiskTier

FRAME = 4096
_CONTAINERS = (dict, list, set, tuple, deque, array)


def entries(store: Store) -> dict[str, int]:
    """How many entries the containers have that a store holds, by the class and the attribute where they hang."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", store)]
    while waiting:
        where, one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | str | bytes):
            continue
        seen.add(id(one))
        if isinstance(one, _CONTAINERS):
            found[where] = found.get(where, 0) + len(one)
            waiting += [(where, each) for each in gc.get_referents(one)]
        elif type(one).__module__.startswith("kvstore"):
            names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            waiting += [(f"{type(one).__name__}.{name}", getattr(one, name, None)) for name in names]
    return found


def test_what_was_stored_used_and_cleared_leaves_nothing(open_store: OpenStore, tmp_path: Path) -> None:
    rules = parse_rules([{"match": "quota*", "arena": "128KiB", "disk": "1MiB"}])
    disk = DiskTier(tmp_path / "disk", 16 << 20)
    store = open_store(64, [disk], rules=rules)

    def live(turn: int) -> None:
        """A namespace from its opening to its end, with more pages than there is room for."""
        known = store.open_namespace(layout_of(f"{'quota' if turn % 2 else 'model'} {turn}", FRAME))
        for start in range(0, 96, 8):
            put_pages(store, known, range(start, start + 8))
            while store.write_back.write_back():
                pass
        assert load_pages(store, known, range(8)) == 8
        assert store.pin(known.fingerprint, page_hashes([1]), 1000.0) == 1
        held = hold_pages(store, known, [1, 2])
        store.clear(known.fingerprint)
        store.complete_load(0, held.lease)
        store.sweep()
        store.statistics()
        store.catch_up()

    for turn in range(8):
        live(turn)
    before = entries(store)
    for turn in range(8, 40):
        live(turn)
    after = entries(store)
    assert {where: (before.get(where, 0), size) for where, size in after.items() if size > before.get(where, 0)} == {}
