"""Who may be answered with what: the scope of an entry, and what ``Cache-Control`` allows. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.responses.request import CacheableRequest, NotCacheable

_CREDENTIALS = ("authorization", "api-key", "x-api-key", "cookie", "openai-organization", "openai-project")
"""Headers by which an instance may tell callers apart."""
_MAX_AGE = re.compile(r"max-age=\"?(\d{1,10})\"?")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, as far as entries are shared.

    Entries of a tenant are shared by its keys; a key without a tenant has its own, and so have all who show none.
    """

    key: str
    """The API key; empty: none was shown. It leaves the process as a digest only."""
    tenant: str = ""
    also: tuple[str, ...] = ()
    """Whatever else tells callers apart: other credentials, a client's certificate."""

    @property
    def scope(self) -> tuple[str, ...]:
        """Equal for those who share entries, and for nobody else."""
        if self.tenant:
            return ("tenant", self.tenant, *self.also)
        return ("key", self.key, *self.also)


def caller_of(headers: Mapping[str, str], tenants: Mapping[str, str], certificate: str = "") -> Caller:
    """Who sent these headers.

    Args:
        headers: by name, whatever its case.
        tenants: the tenant of each API key that has one.
        certificate: what is known of a client by its TLS certificate.
    """
    told = {name.lower(): value for name, value in headers.items() if name.lower() in _CREDENTIALS}
    kind, _, rest = told.get("authorization", "").partition(" ")
    key = rest.strip() if kind.lower() == "bearer" else ""
    also = [f"{name}:{told[name]}" for name in _CREDENTIALS if name in told and not (key and name == "authorization")]
    if certificate:
        also.append(f"certificate:{certificate}")
    return Caller(key, tenants.get(key, "") if key else "", tuple(also))


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What a request's ``Cache-Control`` says."""

    no_store: bool = False
    """Neither looked up nor kept."""
    no_cache: bool = False
    """Computed anew, and kept."""
    max_age: int | None = None
    """Seconds that an answer may be old. Above 0 the caller asks for cached answers."""

    @classmethod
    def read(cls, header: str) -> CacheControl:
        """From the header; what is not known in it says nothing."""
        words = {word.strip().lower() for word in header.split(",")}
        ages = [int(found[1]) for found in map(_MAX_AGE.fullmatch, words) if found]
        return cls("no-store" in words, "no-cache" in words, min(ages, default=None))

    @property
    def looks_up(self) -> bool:
        """Whether an answer that was given before will do."""
        return not self.no_store and not self.no_cache and self.max_age != 0


def refusal(request: CacheableRequest, control: CacheControl) -> NotCacheable | None:
    """Why a request of known fields is neither looked up nor kept; None: it is."""
    if control.no_store:
        return NotCacheable("no_store", "Cache-Control says no-store")
    if not request.determined and not control.max_age:
        return NotCacheable(
            "not_determined",
            "it does not determine its answer: it says neither temperature 0 nor a seed, nor asks for an answer that"
            " was given before (Cache-Control: max-age=SECONDS)",
        )
    return None
