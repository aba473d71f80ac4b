"""The options of SGLang's backend: what a user sets in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.client.url import parse_url
from kvstore.errors import ConfigError, InvalidRequestError

FLAG = "hicache-storage-backend-extra-config"

SGLANGS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
"""Keys beside ours that SGLang reads itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the backend, checked."""

    url: str = ""
    """Where the pages are: ``unix:///run/kvstore.sock``, ``kv://host:port`` or ``kvs://host:port``. Empty:
    :func:`kvstore.client.default_node.located` finds a node."""
    tenant: str = ""
    """Whose pages: tenants never hit each other's."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """The options that a user gave, among those that are SGLang's.

        Raises:
            ConfigError: a key that is unknown, or a value that can't be used; the message names it.
        """
        own = [each.name for each in fields(cls)]
        for key in given:
            if key not in own and key not in SGLANGS:
                nearest = difflib.get_close_matches(key, [*own, *SGLANGS], 1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join([*own, *SGLANGS])}"
                raise ConfigError(f"{FLAG}: unknown key {key!r}{hint}")
        if not given.get("interface_v1"):
            raise ConfigError(f"{FLAG}: 'interface_v1' must be 1, got {given.get('interface_v1')!r}")
        for key in own:
            if not isinstance(given.get(key, ""), str):
                raise ConfigError(f"{FLAG}: {key} must be a string, got {given[key]!r}")
        options = cls(**{key: given[key] for key in own if key in given})
        if options.url.startswith("embedded:"):
            raise ConfigError(
                f"{FLAG}: url {options.url!r}: an embedded store belongs to one process, SGLang's ranks are several;"
                " start a node with 'kvstore serve' and name its socket"
            )
        if options.url:
            try:
                parse_url(options.url)
            except InvalidRequestError as error:
                raise ConfigError(
                    f"{FLAG}: url must be as unix:///run/kvstore.sock, kv://host:port or kvs://host:port (TLS), got"
                    f" {options.url!r}"
                ) from error
        return options
