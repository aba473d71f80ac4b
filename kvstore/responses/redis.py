"""Answers, prompts and outcomes in a Redis or Valkey, where several proxies share them. Plain hashes and sorted sets.

=======================================  =======================================================================
key                                      what it is
=======================================  =======================================================================
``{kvstore-responses}:entry:NAME``       a hash with label, sealed content and sealed prompt; Redis removes it
                                         when it has ended
``{kvstore-responses}:order``            a sorted set of names by the millisecond in which they end
``{kvstore-responses}:sizes``            a hash: bytes of each name
``{kvstore-responses}:bytes``            the sum of everything that is sealed
``{kvstore-responses}:groups``           a hash: the group of each name that has a prompt
``{kvstore-responses}:group:GROUP``      a sorted set of its names, as they came
``{kvstore-responses}:learnt:LEARNER``   a sorted set of sealed outcomes, as they came
``{kvstore-responses}:learners``         a hash: tenant and key of each learner
``{kvstore-responses}:outcomes``         a sorted set of all outcomes by the millisecond in which they end
``{kvstore-responses}:outcome-bytes``    the sum of these
``{kvstore-responses}:sequence``         a number for each prompt and outcome
``{kvstore-responses}:epoch``            another word after each deletion, and in each new Redis
=======================================  =======================================================================

The braces put all of them on one server of a Cluster, so that each change is one script.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from kvstore.errors import ConfigError
from kvstore.responses import redis_scripts
from kvstore.responses.semantic.group import MOST_PROMPTS
from kvstore.responses.store import (
    MOST_OUTCOMES,
    NEWS_AT_ONCE,
    Choice,
    Entry,
    Label,
    Learner,
    Limits,
    News,
    Seen,
    StoreError,
    Usage,
)

SCHEMES = ("redis://", "rediss://", "unix://")
_TIMEOUT = 1.0
"""Seconds for each step. A request waits for less: see :data:`kvstore.responses.cache.DEADLINE`."""
_PREFIX = "{kvstore-responses}:"
_ENTRY, _ORDER, _SIZES, _BYTES = (_PREFIX + name for name in ("entry:", "order", "sizes", "bytes"))
_KEYS = [_ORDER, _SIZES, _BYTES]
_GROUPS, _LEARNERS = _PREFIX + "groups", _PREFIX + "learners"
_FIELDS = ("tenant", "key", "model", "weights", "stored_at", "expires_at")
_LISTED_AT_ONCE = 200


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
        self._put, self._learn, self._news, self._delete, self._forget, self._usage = map(
            self._redis.register_script,
            (
                redis_scripts.PUT,
                redis_scripts.LEARN,
                redis_scripts.NEWS,
                redis_scripts.DELETE,
                redis_scripts.FORGET,
                redis_scripts.USAGE,
            ),
        )

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
        prompt = ("", b"") if entry.prompt is None else (entry.prompt.group, entry.prompt.sealed)
        given: list[Any] = [label.entry, entry.size, left, *limits, secrets.token_hex(8), *prompt, MOST_PROMPTS]
        with _failing():
            self._put(keys=_KEYS, args=[_PREFIX, *given, *fields, "sealed", entry.sealed])
        return True

    def news(self, group: str, prompts: Seen, learner: str, outcomes: Seen) -> News:
        """See :class:`kvstore.responses.store.Store`."""
        since = prompts.epoch, prompts.number, outcomes.epoch, outcomes.number
        with _failing():
            told, prompt, outcome, found, learnt = self._news(
                keys=_KEYS, args=[_PREFIX, group, learner, *since, NEWS_AT_ONCE, *_FIELDS, "prompt"]
            )
        epoch, last_prompt, last_outcome = told.decode(errors="replace"), int(prompt), int(outcome)
        read: list[tuple[Label, bytes]] = []
        for name, number, fields in found:
            last_prompt = int(number)
            label = _label(name.decode(errors="replace"), fields[:-1])
            if label is not None and fields[-1] is not None and label.expires_at > self._now():
                read.append((label, fields[-1]))
        sealed = []
        for member, number in zip(learnt[::2], learnt[1::2], strict=True):
            last_outcome = int(number)
            sealed.append(member.partition(b":")[2])
        return News(
            tuple(read),
            Seen(epoch, last_prompt),
            tuple(sealed),
            Seen(epoch, last_outcome),
            max(len(found), len(sealed)) == NEWS_AT_ONCE,
        )

    def learn(self, learner: Learner, sealed: bytes, expires_at: float) -> bool:
        """See :class:`kvstore.responses.store.Store`."""
        left = int(1000 * (expires_at - self._now()))
        if len(sealed) > self._limits.outcome_bytes or left <= 0:
            return False
        limits = self._limits.entries, self._limits.bytes, self._limits.outcome_bytes, MOST_OUTCOMES
        label = json.dumps([learner.tenant, learner.key])
        with _failing():
            self._learn(keys=_KEYS, args=[_PREFIX, learner.name, sealed, left, *limits, label, secrets.token_hex(8)])
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

    def groups(self) -> dict[str, str]:
        """See :class:`kvstore.responses.store.Store`."""
        with _failing():
            found = self._redis.hgetall(_GROUPS)
        return {name.decode(errors="replace"): group.decode(errors="replace") for name, group in found.items()}

    def delete(self, choice: Choice) -> int:
        """See :class:`kvstore.responses.store.Store`."""
        names = [label.entry for label in self.labels() if choice.takes(label)]
        gone = 0
        for start in range(0, len(names), _LISTED_AT_ONCE):
            with _failing():
                some = names[start : start + _LISTED_AT_ONCE]
                gone += int(self._delete(keys=_KEYS, args=[_PREFIX, *some]))
        if choice.entry is None:
            self._forget_learners(choice)
        return gone

    def _forget_learners(self, choice: Choice) -> None:
        with _failing():
            learners = self._redis.hgetall(_LEARNERS)
            forgotten = []
            for name, label in learners.items():
                try:
                    learner = Learner(name.decode(), *json.loads(label))
                except (ValueError, TypeError):
                    continue  # not of ours
                if choice.takes_learner(learner):
                    forgotten.append(name)
            self._forget(keys=_KEYS, args=[_PREFIX, secrets.token_hex(8), *forgotten])

    def usage(self) -> Usage:
        """See :class:`kvstore.responses.store.Store`."""
        with _failing():
            found = self._usage(keys=_KEYS, args=[_PREFIX])
        return Usage(*map(int, found))

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
