"""Answers in a Redis or Valkey, where several proxies share them. Plain hashes and sorted sets; no module is needed.

====================================  ==========================================================================
key                                   what it is
====================================  ==========================================================================
``{kvstore-responses}:entry:NAME``    a hash with label and sealed content; Redis removes it when it has ended
``{kvstore-responses}:order``         a sorted set of names by the millisecond in which they end
``{kvstore-responses}:sizes``         a hash: bytes of each name
``{kvstore-responses}:bytes``         their sum
====================================  ==========================================================================

The braces put all of them on one server of a Cluster, so that each change is one script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from kvstore.errors import ConfigError
from kvstore.responses.store import Choice, Entry, Label, Limits, StoreError, Usage

SCHEMES = ("redis://", "rediss://", "unix://")
_TIMEOUT = 1.0
"""Seconds for each step. A request waits for less: see :data:`kvstore.responses.cache.DEADLINE`."""
_PREFIX = "{kvstore-responses}:"
_ENTRY, _ORDER, _SIZES, _BYTES = (_PREFIX + name for name in ("entry:", "order", "sizes", "bytes"))
_FIELDS = ("tenant", "key", "model", "weights", "stored_at", "expires_at")
_LISTED_AT_ONCE = 200

_DROP = """
local function drop(name)
  local size = redis.call('HGET', KEYS[2], name)
  redis.call('DEL', ARGV[1] .. name)
  local was = redis.call('ZREM', KEYS[1], name)
  if size then
    redis.call('HDEL', KEYS[2], name)
    redis.call('DECRBY', KEYS[3], size)
  end
  return was
end
local function drop_ended()
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do drop(name) end
  return now
end
"""
_PUT = (
    _DROP
    + """
local name, size = ARGV[2], tonumber(ARGV[3])
local now = drop_ended()
drop(name)
while redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[5])
    or tonumber(redis.call('GET', KEYS[3]) or '0') + size > tonumber(ARGV[6]) do
  local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not first then redis.call('SET', KEYS[3], '0') break end
  drop(first)
end
redis.call('HSET', ARGV[1] .. name, unpack(ARGV, 7))
redis.call('PEXPIRE', ARGV[1] .. name, ARGV[4])
redis.call('ZADD', KEYS[1], now + ARGV[4], name)
redis.call('HSET', KEYS[2], name, size)
redis.call('INCRBY', KEYS[3], size)
return 1
"""
)
_DELETE = (
    _DROP
    + """
local gone = 0
for place = 2, #ARGV do gone = gone + drop(ARGV[place]) end
return gone
"""
)
_USAGE = (
    _DROP
    + """
drop_ended()
return {redis.call('ZCARD', KEYS[1]), tonumber(redis.call('GET', KEYS[3]) or '0')}
"""
)


class RedisStore:
    """One server. Nothing is asked of it before the first call, so a proxy starts without it.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``.
        limits: what it holds at most, of all that share it; the same everywhere.
        password: overrides that of the URL.
        now: seconds since 1970.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(
        self, url: str, limits: Limits, password: str | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._limits = limits
        self._now = now
        given: dict[str, Any] = {} if password is None else {"password": password}
        try:
            self._redis: Any = Redis.from_url(url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT, **given)
        except ValueError as error:
            raise ConfigError(f"not the URL of a Redis for responses: {error}") from error
        self._put, self._delete, self._usage = map(self._redis.register_script, (_PUT, _DELETE, _USAGE))

    def get(self, entry: str) -> Entry | None:
        """See :class:`kvstore.responses.store.Store`."""
        with _failing():
            found = self._redis.hmget(_ENTRY + entry, [*_FIELDS, "sealed"])
        label = _label(entry, found[:-1])
        if label is None or found[-1] is None or label.expires_at <= self._now():
            return None
        return Entry(label, found[-1])

    def put(self, entry: Entry) -> bool:
        """See :class:`kvstore.responses.store.Store`."""
        label = entry.label
        left = int(1000 * (label.expires_at - self._now()))
        if entry.size > self._limits.bytes or not self._limits.entries or left <= 0:
            return False
        fields: list[str | bytes] = []
        for name in _FIELDS:
            value = getattr(label, name)
            fields += [name, value if isinstance(value, str) else repr(value)]
        limits = self._limits.entries, self._limits.bytes
        with _failing():
            self._put(
                keys=[_ORDER, _SIZES, _BYTES],
                args=[_ENTRY, label.entry, entry.size, left, *limits, *fields, "sealed", entry.sealed],
            )
        return True

    def labels(self) -> Iterator[Label]:
        """See :class:`kvstore.responses.store.Store`."""
        with _failing():
            names = [name.decode(errors="replace") for name in self._redis.zrange(_ORDER, 0, -1)]
        for start in range(0, len(names), _LISTED_AT_ONCE):
            some = names[start : start + _LISTED_AT_ONCE]
            with _failing():
                pipeline = self._redis.pipeline(transaction=False)
                for name in some:
                    pipeline.hmget(_ENTRY + name, list(_FIELDS))
                found = pipeline.execute()
            for name, fields in zip(some, found, strict=True):
                if (label := _label(name, fields)) is not None and label.expires_at > self._now():
                    yield label

    def delete(self, choice: Choice) -> int:
        """See :class:`kvstore.responses.store.Store`."""
        names = [label.entry for label in self.labels() if choice.takes(label)]
        gone = 0
        for start in range(0, len(names), _LISTED_AT_ONCE):
            with _failing():
                some = names[start : start + _LISTED_AT_ONCE]
                gone += int(self._delete(keys=[_ORDER, _SIZES, _BYTES], args=[_ENTRY, *some]))
        return gone

    def usage(self) -> Usage:
        """See :class:`kvstore.responses.store.Store`."""
        with _failing():
            entries, size = self._usage(keys=[_ORDER, _SIZES, _BYTES], args=[_ENTRY])
        return Usage(int(entries), int(size))

    def close(self) -> None:
        """See :class:`kvstore.responses.store.Store`."""
        self._redis.close()


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreError(f"the Redis of responses: {error}") from error


def _label(entry: str, fields: list[Any]) -> Label | None:
    """None: there is no such entry, or something else lies there."""
    if any(value is None for value in fields):
        return None
    try:
        tenant, key, model, weights, stored_at, expires_at = (value.decode() for value in fields)
        return Label(entry, tenant, key, model, weights, float(stored_at), float(expires_at))
    except ValueError:
        return None
