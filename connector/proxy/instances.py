"""The choice of the instance that the proxy asks next. Pure: whoever speaks HTTP tells it what happened."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import InvalidRequestError

FAILED_CHECKS = 3
"""Checks in a row that an instance may leave unanswered before it is out of service."""

_TOO_BUSY = (408, 425, 429)


class Role(StrEnum):
    """What an instance is there for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Instance:
    """An OpenAI-compatible server."""

    url: str
    """Without a slash at its end, and without ``/v1``."""
    role: Role
    in_flight: int = 0
    """Requests that it works on for this proxy."""
    in_service: bool = True
    """Until a check, or a connection, says otherwise."""
    failed_checks: int = 0
    """In a row."""
    returns: int = 0
    """How often it was in service again."""
    chosen_at: int = 0
    """Of all choices so far, which one was the last of this instance."""


class Instances:
    """Those at these URLs, in service or not.

    Raises:
        InvalidRequestError: no such URL, one twice, or no instance for one of the roles.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.all: list[Instance] = []
        for role, urls in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            if not urls:
                raise InvalidRequestError(f"no {role} instance: name at least one")
            for url in urls:
                checked = _checked(url)
                if any(instance.url == checked for instance in self.all):
                    raise InvalidRequestError(
                        f"{checked} is named twice: an instance has one role, and is asked as one"
                    )
                self.all.append(Instance(checked, role))
        self._choices = 0

    @property
    def serving(self) -> bool:
        """Whether a request can be answered: any instance can do all of it, if slower."""
        return any(instance.in_service for instance in self.all)

    def choose(self, role: Role, tried: Collection[Instance]) -> Instance | None:
        """The instance to ask next: that with the fewest requests; of several the one that was not asked for longest.

        Args:
            role: prefill: only instances of that role, in service. Decode: also, when those are used up, prefill
                instances, which compute everything themselves; and at last those out of service, since it may not
                be known yet that they are back.
            tried: not these again.
        """
        ranks = [(Role.PREFILL, True)] if role is Role.PREFILL else _DECODE_RANKS
        for wanted, in_service in ranks:
            candidates = [
                instance
                for instance in self.all
                if instance.role is wanted and instance.in_service is in_service and instance not in tried
            ]
            if candidates:
                self._choices += 1
                chosen = min(candidates, key=lambda instance: (instance.in_flight, instance.chosen_at))
                chosen.chosen_at = self._choices
                return chosen
        return None

    @contextmanager
    def busy(self, instance: Instance) -> Iterator[None]:
        """Around a request to it."""
        instance.in_flight += 1
        try:
            yield
        finally:
            instance.in_flight -= 1

    def states(self) -> list[dict[str, object]]:
        """Of each instance, for people: ``url``, ``role``, ``in_service``, and requests ``in_flight``."""
        return [
            {"url": each.url, "role": each.role.value, "in_service": each.in_service, "in_flight": each.in_flight}
            for each in self.all
        ]

    def unreachable(self, instance: Instance) -> bool:
        """Nobody listens there, or it says that it does not serve. Returns whether that is news."""
        news, instance.in_service = instance.in_service, False
        return news

    def check_failed(self, instance: Instance) -> bool:
        """It left a check unanswered, as one does that is merely busy. Returns whether it is out of service now, and
        was not before."""
        instance.failed_checks += 1
        return instance.failed_checks >= FAILED_CHECKS and self.unreachable(instance)

    def check_passed(self, instance: Instance) -> bool:
        """It answered that it serves. Returns whether that is news."""
        news, instance.in_service, instance.failed_checks = not instance.in_service, True, 0
        instance.returns += news
        return news


_DECODE_RANKS = [(Role.DECODE, True), (Role.PREFILL, True), (Role.DECODE, False), (Role.PREFILL, False)]


def may_retry(status: int) -> bool:
    """Whether another instance may answer better than with this HTTP status: it tells of the instance, not of the
    request."""
    return status >= 500 or status in _TOO_BUSY


def is_busy(status: int) -> bool:
    """Whether an instance that answers with this HTTP status has not begun with the request."""
    return status == 503 or status in _TOO_BUSY


def _checked(url: str) -> str:
    """The URL without a slash at its end."""
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username or not url.isprintable() or " " in url:
        raise InvalidRequestError(f"not the URL of an instance: {url!r}; write http://host:port")
    url = url.rstrip("/")
    if url.endswith("/v1"):
        raise InvalidRequestError(f"{url}: write it without /v1, which the proxy adds")
    return url
