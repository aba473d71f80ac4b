"""The packs that are known, and whose they are. No I/O; the caller holds the catalog's lock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import Pack

_MOST_GONE = 1 << 16
_DOUBT_SECONDS = 30.0
_LONGEST_DOUBT = 3600.0
_MOST_DOUBTS = 16


@dataclass(slots=True)
class KnownPack:
    """One pack."""

    id: int
    pack: Pack
    own: bool
    """Whether it is this writer's to delete."""
    used_at: float
    removed: set[bytes] = field(default_factory=set)
    """Keys of pages that are not to be found in it any more."""
    doubts: int = 0
    """How often something else came from there than was asked for."""
    listed: bool = True
    """Whether its pages are in the index: where memory is short, those of old packs are not."""


class KnownPacks:
    """All packs, by name and by number: their ids, which stand for them in the index."""

    def __init__(self) -> None:
        self._packs: dict[int, KnownPack] = {}
        self._ids: dict[PackName, int] = {}
        self.count = 0
        """How many there were ever."""
        self._gone: dict[PackName, None] = {}
        self._removed_early: dict[PackName, set[bytes]] = {}
        """Removals that were told of before their packs."""
        self._doubted: dict[int, float] = {}
        """Packs whose pages are to be learnt again, and when."""
        self.own_bytes = 0
        self.others_bytes = 0

    def __iter__(self) -> Iterator[KnownPack]:
        return iter(self._packs.values())

    def __contains__(self, name: PackName) -> bool:
        return name in self._ids

    def __getitem__(self, id_: int) -> KnownPack:
        return self._packs[id_]

    def get(self, id_: int) -> KnownPack | None:
        """A pack by its id."""
        return self._packs.get(id_)

    def named(self, name: PackName) -> KnownPack | None:
        """A pack by its name."""
        return self._packs.get(self._ids.get(name, 0))

    def names(self, *, own: bool) -> list[PackName]:
        """All packs, or this writer's."""
        return [each.pack.name for each in self if each.own or not own]

    # -- coming and going --------------------------------------------------------------------------------------------

    def add(self, pack: Pack, *, own: bool, used_at: float) -> KnownPack | None:
        """A pack was told of. Returns it, unless it is known, or gone. One that is another's becomes ``own`` by it."""
        if pack.name in self._gone:
            return None
        known = self.named(pack.name)
        if known is not None:
            if own and not known.own:
                known.own = True
                self.others_bytes -= pack.size
                self.own_bytes += pack.size
            return None
        self.count += 1
        known = KnownPack(self.count, pack, own, used_at, self._removed_early.pop(pack.name, set()))
        self._packs[known.id], self._ids[pack.name] = known, known.id
        self._count(known, pack.size)
        return known

    def drop(self, name: PackName) -> KnownPack | None:
        """A pack is gone, and whoever tells of it later is not believed. Returns it, if it was known."""
        self._gone[name] = None
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
        known = self._packs.pop(self._ids.pop(name, 0), None)
        if known is not None:
            self._count(known, -known.pack.size)
            self._doubted.pop(known.id, None)
        return known

    def disown(self) -> None:
        """All packs are another's from now on."""
        for each in self:
            each.own = False
        self.others_bytes += self.own_bytes
        self.own_bytes = 0

    def remove_early(self, key: bytes, name: PackName) -> None:
        """A removal from a pack that is not known yet."""
        if name not in self._gone and len(self._removed_early) < _MOST_GONE:
            self._removed_early.setdefault(name, set()).add(key)

    def _count(self, known: KnownPack, size: int) -> None:
        if known.own:
            self.own_bytes += size
        else:
            self.others_bytes += size

    # -- doubts ------------------------------------------------------------------------------------------------------

    def doubt(self, known: KnownPack, now: float) -> None:
        """Something else came from a pack than was asked for: a server that is ill may get well again."""
        if known.id not in self._doubted:
            known.doubts = min(known.doubts + 1, _MOST_DOUBTS)
            self._doubted[known.id] = now + min(_DOUBT_SECONDS * (1 << (known.doubts - 1)), _LONGEST_DOUBT)

    def is_doubted(self, known: KnownPack) -> bool:
        """Whether its pages are to be learnt again."""
        return known.id in self._doubted

    def take_doubted(self, now: float) -> list[Pack]:
        """Those that are to be looked at again now."""
        due = [id_ for id_, when in self._doubted.items() if when <= now]
        for id_ in due:
            del self._doubted[id_]
        return [self._packs[id_].pack for id_ in due]
