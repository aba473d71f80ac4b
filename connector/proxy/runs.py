"""Which run of each instance goes on: answers that were given before belong to the runs that gave them.

An instance loads its weights when it starts, so what it answered holds until it starts again. When it started, servers
with a Prometheus client say themselves (vLLM and SGLang do): proxies then agree on it, and it outlives a proxy. Where
an instance does not say it, its run is this proxy's own name for it, and ends when it was out of service.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from kvstore.connector.proxy.instances import Instance, Instances
from kvstore.connector.proxy.upstream import Upstream

LOOK_SECONDS = 5.0
"""Between two looks at an instance that stays in service."""
_CHECK_SECONDS = 0.5
_FIRST_SECONDS = 2.0
"""For the first look at all of them, before the proxy is ready."""
_MOST_BYTES = 8 << 20
_STARTED = re.compile(rb"^process_start_time_seconds(?:\{[^}\n]*\})? (\S+)", re.MULTILINE)


@dataclass(slots=True)
class _Known:
    name: str
    returns: int
    """Of the instance, when it was looked at."""
    looked_at: float
    told: bool
    """Whether it said itself when it started."""


class Runs:
    """Looks at the instances from :meth:`start` until :meth:`stop`."""

    def __init__(self, instances: Instances, upstream: Upstream) -> None:
        self._instances = instances
        self._upstream = upstream
        self._known: dict[Instance, _Known] = {}
        self._looking: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look at all of them once, as far as they answer soon, and then now and then."""
        first = [asyncio.create_task(self._look(each)) for each in self._instances.all]
        await asyncio.wait(first, timeout=_FIRST_SECONDS)
        self._looking = [asyncio.create_task(self._look_forever(each)) for each in self._instances.all]
        self._looking += first

    async def stop(self) -> None:
        """End."""
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    def of(self, made_by: Collection[Instance]) -> list[str]:
        """The runs of these instances; none: one of them is not known."""
        names = [self._name(instance) for instance in made_by]
        return [] if None in names else [name for name in names if name is not None]

    def going_on(self) -> set[str]:
        """All that go on, as far as it is known."""
        return set(self.of([each for each in self._instances.all if self._name(each) is not None]))

    def _name(self, instance: Instance) -> str | None:
        """None: it has come back, and was not looked at since."""
        known = self._known.get(instance)
        return known.name if known is not None and known.returns == instance.returns else None

    async def _look_forever(self, instance: Instance) -> None:
        while True:
            known = self._known.get(instance)
            now = asyncio.get_running_loop().time()
            due = known is None or known.returns != instance.returns or now - known.looked_at >= LOOK_SECONDS
            if due and instance.in_service:
                await self._look(instance)
            await asyncio.sleep(_CHECK_SECONDS)

    async def _look(self, instance: Instance) -> None:
        returns = instance.returns
        said = await self._upstream.look(instance, "/metrics", _MOST_BYTES)
        if said is None:
            return
        now = asyncio.get_running_loop().time()
        known = self._known.get(instance)
        if (started := _STARTED.search(said)) is not None:
            name = hashlib.sha256(instance.url.encode() + b" " + started[1]).hexdigest()[:16]
            self._known[instance] = _Known(name, returns, now, told=True)
        elif known is not None and known.returns == returns and not known.told:
            known.looked_at = now
        else:
            self._known[instance] = _Known(uuid.uuid4().hex[:16], returns, now, told=False)
