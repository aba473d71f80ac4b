"""The evictor: which pages leave for one that comes. Namespaces and tenants at their quotas give up their own pages, a
full arena the coldest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.catalog.eviction_orders import EvictionOrders
from kvstore.catalog.slabs import Slab, Slabs
from kvstore.catalog.slot_state import Slot
from kvstore.catalog.slot_table import SlotTable

_SLOTS_TRIED = 1 << 14
"""Slots looked at, in the coldest runs of slabs first, for a run that can be emptied."""
_EVICTIONS_A_LOOK = 64
"""Evictions of one size, for each of its slabs, from a look that found no colder slab of another size to the next."""


@dataclass(slots=True)
class Evicted:
    """Pages that left the arena, and slots that became free with them."""

    left: list[int] = field(default_factory=list)
    """The first frame of each. Their headers must say that they are gone before anything else is written."""
    overrun: int = 0
    """Of these: dirty ones, which no lower tier has."""
    keys: list[bytes] = field(default_factory=list, compare=False)
    """Of each that left."""


class Evictor:
    """Chooses the pages that leave, and has ``retire`` take them out. One lock outside of it (the store's) guards all
    calls. ``frames_of`` says how many frames a namespace's slots in use take."""

    def __init__(
        self,
        slabs: Slabs,
        slots: SlotTable,
        orders: EvictionOrders,
        frames_of: Callable[[int], int],
        retire: Callable[[Sequence[Slot], Evicted], None],
    ) -> None:
        self._slabs = slabs
        self._slots = slots
        self._orders = orders
        self._frames_of = frames_of
        self._retire = retire
        self._quotas: dict[int, int] = {}
        self._tenant_of: dict[int, str] = {}
        """Namespace → the tenant that has a quota for all of its namespaces together."""
        self._tenant_quotas: dict[str, int] = {}
        self._evictions_to_look: dict[int, int] = {}

    def set_quota(self, namespace: int, frames: int | None) -> None:
        """Most frames that a namespace's slots take; None: as many as there are."""
        if frames is None:
            self._quotas.pop(namespace, None)
        else:
            self._quotas[namespace] = frames

    def set_tenant_quota(self, namespace: int, tenant: str, frames: int | None) -> None:
        """The same for all of a tenant's namespaces together, this one's among them."""
        if frames is None:
            self._tenant_of.pop(namespace, None)
        else:
            self._tenant_of[namespace] = tenant
            self._tenant_quotas[tenant] = frames

    def forget_namespace(self, namespace: int) -> None:
        """It has no quotas any more."""
        self._quotas.pop(namespace, None)
        self._tenant_of.pop(namespace, None)

    def quota_of(self, namespace: int) -> int | None:
        """Most frames that a namespace's slots may take, where that is said for it or its tenant."""
        quotas = [self._quotas.get(namespace), self._tenant_quotas.get(self._tenant_of.get(namespace, ""))]
        return min((quota for quota in quotas if quota is not None), default=None)

    def has_quota(self, namespace: int) -> bool:
        """Whether one is said for it or its tenant."""
        return namespace in self._quotas or namespace in self._tenant_of

    def make_quota(self, namespace: int, frames: int, removal: Evicted, *, evict: bool) -> bool:
        """Let pages leave until one more of a namespace fits into its quota and its tenant's. False: too few can, or
        none may. A quota waits for pages that are on their way into the order of their namespace."""
        if (
            namespace in self._quotas
            and not self._orders.is_moving(namespace)
            and not self._make_own_quota(namespace, frames, removal, evict=evict)
        ):
            return False
        tenant = self._tenant_of.get(namespace)
        return tenant is None or self._make_tenant_quota(tenant, frames, removal, evict=evict)

    def make_room(self, frames: int, removal: Evicted, most: int = 1) -> bool:
        """Let up to ``most`` pages of this slot size leave, or empty slabs of other sizes that are colder. False:
        nothing can."""
        victims = self._orders.first(frames, most)
        to_look = self._evictions_to_look.get(frames, 0)
        if not victims or to_look <= 0:
            if self._take_slabs(frames, victims[0] if victims else None, removal):
                return True
            # Looking walks over all slabs: only now and then while this size's own pages are the coldest.
            to_look = _EVICTIONS_A_LOOK * self._slabs.slabs_of_size(frames)
        if not victims:
            return False
        del victims[to_look:]
        self._evictions_to_look[frames] = to_look - len(victims)
        self._retire(victims, removal)
        return True

    def _take_slabs(self, frames: int, rival: Slot | None, removal: Evicted) -> bool:
        """Empty the coldest run of other sizes' slabs, if all of it is colder than ``rival``."""
        before = self._slots.used[rival] if rival is not None else math.inf
        windows: list[tuple[int, int, list[Slab]]] = []
        for window in self._slabs.windows(frames):
            if window and all(slab.slot_frames != frames for slab in window):
                used = max(slab.used for slab in window)
                if used < before:
                    windows.append((used, len(windows), window))
        heapq.heapify(windows)
        to_try = _SLOTS_TRIED
        while windows and to_try > 0:
            window = heapq.heappop(windows)[2]
            slots = [slot for slab in window for slot in slab.in_use()]
            to_try -= len(slots)
            if all(self._slots.may_leave(slot) and not self._slots.holds[slot] for slot in slots):
                self._retire(slots, removal)
                for slab in window:
                    self._slabs.release(slab)
                return True
        return False

    def _make_own_quota(self, namespace: int, frames: int, removal: Evicted, *, evict: bool) -> bool:
        """Let pages of a namespace leave until one more fits into its quota. False: too few can, or none may."""
        while self._frames_of(namespace) + frames > self._quotas[namespace]:
            victim = self._orders.first_of(namespace, frames) if evict else None
            if victim is None:
                return False
            self._retire([victim], removal)
        return True

    def _make_tenant_quota(self, tenant: str, frames: int, removal: Evicted, *, evict: bool) -> bool:
        """The same for all of a tenant's namespaces: that page leaves first which was used longest ago."""
        namespaces = [namespace for namespace, whose in self._tenant_of.items() if whose == tenant]
        if any(map(self._orders.is_moving, namespaces)):
            return True
        while sum(map(self._frames_of, namespaces)) + frames > self._tenant_quotas[tenant]:
            victim = self._orders.first_of_any(namespaces) if evict else None
            if victim is None:
                return False
            self._retire([victim], removal)
        return True
