"""Grants: a token's tenant and rights, and what these allow. Decisions only; knows neither the wire nor files.

A namespace belongs to the tenant that its layout names. Whoever has a tenant's token sees that tenant's namespaces and
those of the names that the token *shares*, and can't tell any other namespace from one that does not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvstore.errors import ConfigError

READ, WRITE, ADMIN = "read", "write", "admin"
RIGHTS = (READ, WRITE, ADMIN)
"""Read: look up, load, see the own status and metrics. Write: store and evict. Admin: pin and clear."""
EVERY_TENANT = "*"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TENANT, _RIGHTS, _SHARE = "tenant", "rights", "share"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What whoever calls may do."""

    name: str = ""
    """What people call the token."""
    tenant: str = EVERY_TENANT
    """Whose namespaces: those whose layouts name this tenant (empty: name none), or ``EVERY_TENANT``."""
    rights: frozenset[str] = frozenset(RIGHTS)
    shares: frozenset[str] = frozenset()
    """Names that layouts may have for their tenant as well: namespaces that several tenants agreed to share."""

    @property
    def every(self) -> bool:
        """Whether all tenants' namespaces may be seen."""
        return self.tenant == EVERY_TENANT

    @property
    def all_of_it(self) -> bool:
        """Whether nothing is kept from this caller."""
        return self.every and self.rights.issuperset(RIGHTS)

    def sees(self, tenant: str) -> bool:
        """Whether namespaces of this tenant are there for the caller."""
        return self.every or tenant == self.tenant or tenant in self.shares


EVERYTHING = Grant()
"""Who is let in without a token: over the Unix socket, or where the node knows no tokens."""


def parse_grant(name: str, words: list[str]) -> Grant:
    """What stands behind a token: ``tenant=NAME``, ``rights=read,write,admin`` and ``share=NAME,…``, each once at most.

    Without a tenant it is for every tenant, without rights it has all of them.

    Raises:
        ConfigError: something else stands there.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in (_TENANT, _RIGHTS, _SHARE) or not equals:
            # Not said: it may be the end of a token that somebody wrote with a space.
            raise ConfigError(
                "a token may be followed by tenant=NAME, rights=read,write,admin and share=NAME, nothing else"
            )
        if key in given:
            raise ConfigError(f"{key} is given twice")
        given[key] = value
    tenant = given.get(_TENANT, EVERY_TENANT)
    if tenant not in ("", EVERY_TENANT):
        check_name(_TENANT, tenant)
    rights = given[_RIGHTS].split(",") if _RIGHTS in given else RIGHTS
    for right in rights:
        if right not in RIGHTS:
            raise ConfigError(f"{right!r} is not a right; the rights are {', '.join(RIGHTS)}")
    shares = given[_SHARE].split(",") if _SHARE in given else []
    for share in shares:
        check_name(_SHARE, share)
    if shares and tenant == EVERY_TENANT:
        raise ConfigError("a token of every tenant sees all namespaces: share is for tokens of one tenant")
    return Grant(name=name, tenant=tenant, rights=frozenset(rights), shares=frozenset(shares))


def check_together(grants: list[Grant]) -> None:
    """Whether a file's tokens go together: what one of them shares is no tenant of another's.

    Raises:
        ConfigError: they don't.
    """
    tenants = {grant.tenant for grant in grants}
    for grant in grants:
        if both := sorted(grant.shares & tenants):
            raise ConfigError(
                f"{grant.name}: share={both[0]}: that is a tenant, whose pages are its own; a shared namespace needs a"
                " name that no tenant has"
            )


def check_name(key: str, name: str) -> None:
    """Whether a tenant may have this name. ``key``: what it is given as.

    Raises:
        ConfigError: it may not.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{key}={name}: a name has 1 to 64 letters, digits, dots, dashes or underscores, a letter or digit first"
        )
