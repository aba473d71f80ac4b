"""The connector's options: what a user sets in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvstore.client.connect import TIMEOUT
from kvstore.client.default_node import located
from kvstore.connector.blocks.extra_keys import SharedPrefix
from kvstore.connector.scheduler import LOOKUP_BUDGET
from kvstore.connector.worker import LOAD_DEADLINE, STORE_DEADLINE
from kvstore.errors import ConfigError
from kvstore.hashing import HASH_BYTES
from kvstore.security.secret_files import read_key_file

RECOMPUTE = "recompute"
KEEP = "keep"
EACH_HEAD = "heads"

_logger = logging.getLogger("kvstore.connector")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the connector, checked. Every one has a default."""

    url: str = ""
    """Where the pages are: ``unix:///run/kvstore.sock``, ``kv://host:port`` or ``kvs://host:port``. Empty: where
    :meth:`located` finds a node."""
    async_load: bool = True
    """Whether requests wait for their pages while others are computed; False: the step that computes them waits."""
    store_threshold: int = 1
    """How often a prefix must have been seen before it is stored."""
    lookup_budget_ms: float = LOOKUP_BUDGET * 1000
    """Milliseconds for which a request may wait for its lookup."""
    load_deadline_ms: float = LOAD_DEADLINE * 1000
    """Milliseconds for which a request may wait for its pages."""
    store_deadline_ms: float = STORE_DEADLINE * 1000
    """Milliseconds for which a finished request's blocks are held for its stores."""
    load_failure_policy: str = RECOMPUTE
    """``"recompute"``: blocks that could not be loaded are computed; ``"keep"``: as vLLM's own setting has it."""
    most_keep_minutes: int = 60
    """For how long a request may ask to have its prefix kept; 0: not at all."""
    tenant: str = ""
    """Whose pages: tenants never hit each other's."""
    shared_prefixes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name the beginnings of prompts that requests with different salts may share: ``tokens``, how many, and
    ``hash``, of all of them as one block, in hexadecimal digits."""
    kv_parts: int | str = 0
    """Into how many parts the KV heads of a page are cut, so that engines of another tensor-parallel size read it: the
    largest size among these engines; ``"heads"``: one for each, for engines of every size. 0: a part a rank, for
    engines of the same size."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """URL by node id: where a decode instance may load from."""
    rank_nodes: Mapping[str, str] = field(default_factory=dict)
    """URL by host name: the nodes that ranks on other hosts have for their ``url``, as the scheduler reaches them."""
    ticket_key_file: str = ""
    """A file with the key that signs tickets between prefill and decode instances."""
    traces: str = ""
    """Where OpenTelemetry's spans of calls to nodes go, as OTLP over gRPC: ``http://127.0.0.1:4317``."""
    node_id: str = ""
    """What ``peers`` of others call this engine's node. Empty: engines on one machine with the same ``url`` agree."""

    @property
    def call_timeout(self) -> float:
        """Seconds that one call to a node may take: as long as the most patient of those who wait for it."""
        patience = max(self.lookup_budget_ms, self.load_deadline_ms, self.store_deadline_ms) / 1000
        return max(TIMEOUT, patience)

    @property
    def prefixes(self) -> dict[str, SharedPrefix]:
        """:attr:`shared_prefixes`, as requests know them."""
        return {
            name: SharedPrefix(identifier=prefix["hash"].lower(), num_tokens=prefix["tokens"])
            for name, prefix in self.shared_prefixes.items()
        }

    @property
    def ticket_key(self) -> bytes | None:
        """The key in ``ticket_key_file``.

        Raises:
            ConfigError: it can't be read, others can read it, or it holds no key.
        """
        return read_key_file(Path(self.ticket_key_file)) if self.ticket_key_file else None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """The options that a user gave.

        Raises:
            ConfigError: a key that is unknown, or a value that can't be used; the message names it.
        """
        known = {each.name: each for each in fields(cls)}
        for key in given:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(known)}"
                raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}{hint}")
        for key, value in given.items():
            _check_type(key, value)
        options = cls(**given)
        if options.url.startswith("embedded:"):
            raise ConfigError(
                f"kv_connector_extra_config: url {options.url!r}: an embedded store belongs to one process, vLLM has"
                " several; start a node with 'kvstore serve' and name its socket"
            )
        if options.traces and not options.traces.startswith(("http://", "https://")):
            raise ConfigError(
                f"kv_connector_extra_config: traces: {options.traces!r} is not an http:// or https:// URL"
            )
        if options.load_failure_policy not in (RECOMPUTE, KEEP):
            raise ConfigError(
                f"kv_connector_extra_config: load_failure_policy must be {RECOMPUTE!r} or {KEEP!r},"
                f" got {options.load_failure_policy!r}"
            )
        return options

    def located(self, environment: Mapping[str, str]) -> Options:
        """The same with a URL: where none was given, that of the node that commands find here, too.

        Raises:
            ConfigError: none is to be found, as :func:`kvstore.client.default_node.default_node` says.
        """
        return replace(self, url=located(self.url, environment, _logger))


_HASH = re.compile(rf"[0-9a-fA-F]{{{2 * HASH_BYTES}}}")
_WHOLE = {"store_threshold": 1, "most_keep_minutes": 0, "kv_parts": 0}
_NUMBERS = {"lookup_budget_ms": 0.0, "load_deadline_ms": 1.0, "store_deadline_ms": 1.0}
"""Lowest values."""


def _check_type(key: str, value: Any) -> None:
    if key == "async_load":
        right, wanted = isinstance(value, bool), "true or false"
    elif key == "kv_parts" and isinstance(value, str):
        right, wanted = value == EACH_HEAD, f"a whole number of at least 0, or {EACH_HEAD!r}"
    elif key in _WHOLE:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= _WHOLE[key]
        wanted = f"a whole number of at least {_WHOLE[key]}"
    elif key in _NUMBERS:
        right = isinstance(value, int | float) and not isinstance(value, bool) and _NUMBERS[key] <= value <= 3_600_000
        wanted = f"milliseconds between {_NUMBERS[key]:g} and 3600000"
    elif key in ("peers", "rank_nodes"):
        right = isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
        wanted = "an object of names and URLs"
    elif key == "shared_prefixes":
        right = isinstance(value, Mapping) and all(map(_is_prefix, value.values()))
        wanted = (
            f"""an object of names, each with {{"tokens": at least 1, "hash": {2 * HASH_BYTES} hexadecimal digits}}"""
        )
    else:
        right, wanted = isinstance(value, str), "a string"
    if not right:
        raise ConfigError(f"kv_connector_extra_config: {key} must be {wanted}, got {value!r}")


def _is_prefix(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"tokens", "hash"}:
        return False
    tokens, digits = value["tokens"], value["hash"]
    counts = isinstance(tokens, int) and not isinstance(tokens, bool) and 1 <= tokens < 1 << 31
    return counts and isinstance(digits, str) and _HASH.fullmatch(digits) is not None
