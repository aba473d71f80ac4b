"""When a certificate ends, read from its PEM file, and how urgent that is."""

from __future__ import annotations

import enum
import logging
import re
import ssl
import time
from datetime import UTC, datetime
from typing import NamedTuple

DAY = 86_400.0
_WARN_DAYS, _URGENT_DAYS = 30.0, 7.0
"""From so many days before its end on, somebody is told; a certificate of days gets a part of its life instead."""
_WARN_PART, _URGENT_PART = 1 / 3, 1 / 10
_FIRST = re.compile(rb"-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+)-----END")
_INTEGER, _SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x02, 0x30, 0xA0, 0x17, 0x18
_log = logging.getLogger(__name__)


class Validity(NamedTuple):
    """From when to when a certificate holds: seconds since 1970."""

    begins: float
    ends: float


def validity_of(pem: bytes) -> Validity | None:
    """That of the first certificate in a PEM file: the one that is shown, its chain behind it.

    The standard library tells of authorities' certificates alone, so the few bytes before the dates are read here
    (DER, RFC 5280 4.1): ``SEQUENCE { SEQUENCE { [0] version, serial, algorithm, issuer, SEQUENCE { begins, ends } …``.

    Returns:
        None where it can't be read: whether a certificate can be used is OpenSSL's to say.
    """
    found = _FIRST.search(pem)
    if found is None:
        return None
    try:
        body = b"".join(found[2].split()).decode()
        der = ssl.PEM_cert_to_DER_cert(f"{ssl.PEM_HEADER}\n{body}\n{ssl.PEM_FOOTER}")
        content = _inside(_inside(der, _SEQUENCE)[0], _SEQUENCE)[0]
        if content[:1] == bytes([_VERSION]):
            content = _inside(content, _VERSION)[1]
        for kind in (_INTEGER, _SEQUENCE, _SEQUENCE):
            content = _inside(content, kind)[1]
        dates = _inside(content, _SEQUENCE)[0]
        begins, dates = _date(dates)
        return Validity(begins, _date(dates)[0])
    except (ValueError, IndexError):
        return None


def _inside(der: bytes, kind: int) -> tuple[bytes, bytes]:
    """What the first element holds, which is of this kind, and what stands behind it."""
    if der[0] != kind:
        raise ValueError(f"an element of kind {der[0]}, not {kind}")
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    if len(der) < start + length:
        raise ValueError("an element that is cut off")
    return der[start : start + length], der[start + length :]


def _date(der: bytes) -> tuple[float, bytes]:
    """The date that comes first, and what stands behind it."""
    kind = _UTC_TIME if der[0] == _UTC_TIME else _TIME
    text, rest = _inside(der, kind)
    form = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
    date = datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC)
    if kind == _UTC_TIME and date.year >= 2050:  # RFC 5280: two digits from 50 on are of the last century
        date = date.replace(year=date.year - 100)
    return date.timestamp(), rest


class Urgency(enum.Enum):
    """Whether somebody has to see to a certificate."""

    NONE = enum.auto()
    SOON = enum.auto()
    """It ends within 30 days, and within the last third of its life."""
    URGENT = enum.auto()
    """Within 7 days, and within the last tenth."""
    ENDED = enum.auto()
    NOT_YET = enum.auto()
    """It does not hold yet."""


def urgency_of(validity: Validity, now: float) -> Urgency:
    """How urgent it is, the same wherever it is said. Where the begin is not known (0), the days alone count.

    Args:
        validity: the certificate's.
        now: seconds since 1970, on the clock of whoever shows it.
    """
    left, life = validity.ends - now, validity.ends - validity.begins
    if left <= 0:
        return Urgency.ENDED
    if now < validity.begins:
        return Urgency.NOT_YET
    if left < min(_URGENT_DAYS * DAY, _URGENT_PART * life):
        return Urgency.URGENT
    return Urgency.SOON if left < min(_WARN_DAYS * DAY, _WARN_PART * life) else Urgency.NONE


def words_of(validity: Validity, now: float) -> str:
    """When a certificate ends, or holds at all, for people: ``ends in 12 days, on 2026-03-01 09:30 UTC``."""
    if validity.ends <= now:
        return f"ended {_span(now - validity.ends)} ago, on {_day(validity.ends)}"
    if now < validity.begins:
        return f"holds from {_day(validity.begins)} on only"
    return f"ends in {_span(validity.ends - now)}, on {_day(validity.ends)}"


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _span(seconds: float) -> str:
    number, unit = (int(seconds // DAY), "day") if seconds >= DAY else (int(seconds // 3600), "hour")
    return f"{number} {unit}{'' if number == 1 else 's'}"


def tell_of_end(what: str, validity: Validity | None, now: float | None = None) -> None:
    """Log when a certificate that others verify ends, if that is soon, or was.

    Args:
        what: names it, for people.
        validity: its own; None: nobody knows, and nothing is said.
        now: seconds since 1970; None: the present.
    """
    if validity is None:
        return
    now = time.time() if now is None else now
    words, urgency = words_of(validity, now), urgency_of(validity, now)
    if urgency is Urgency.ENDED:
        _log.error("%s %s: clients that verify it refuse to connect; put a new one in place and reload", what, words)
    elif urgency is Urgency.NOT_YET:
        _log.error("%s %s: clients that verify it refuse to connect until then", what, words)
    elif urgency is not Urgency.NONE:
        level = logging.ERROR if urgency is Urgency.URGENT else logging.WARNING
        _log.log(level, "%s %s: put a new one in place and reload before", what, words)
