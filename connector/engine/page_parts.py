"""The parts of a page, one a rank or more: at whose node each is, and which worker stores it."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvstore.errors import ResourceError
from kvstore.layout import Layout


@dataclass(frozen=True, slots=True)
class Part:
    """Of each page: what one rank has of it, or less."""

    host: str
    """Whose node it is at; empty: the scheduler's."""
    layouts: tuple[Layout, ...]
    """By group."""
    worker: int = 0
    """Number of the worker that stores it: the first one at its node that holds it."""


def check_urls(urls: Iterable[str]) -> None:
    """Whether all processes of an engine use one node, where each has found it by itself.

    Raises:
        ResourceError: they do not.
    """
    if len(found := sorted(set(urls))) > 1:
        raise ResourceError(f"its processes have found different nodes ({', '.join(found)}): name one by url")


def parts_of(
    workers: Sequence[tuple[str, Sequence[Sequence[str]]]], expected: int, url: str, rank_nodes: Collection[str]
) -> list[Part]:
    """What the workers keep: the parts of a page, each once where several workers hold the same at one node.

    Args:
        workers: for each rank its machine's name, and its layouts by part and group, as JSON.
        expected: how many there are.
        url: of the workers' node: of one that all of them use, or of one on each host.
        rank_nodes: machines whose node is known to be another one.

    Raises:
        ResourceError: a worker is missing, or nobody knows where its node is.
    """
    if len(workers) != expected:
        raise ResourceError(f"{len(workers)} of {expected} workers could describe their pages")
    unknown = {host for host, _ in workers} - {"", socket.gethostname(), *rank_nodes}
    if unknown and url.startswith("unix:"):
        raise ResourceError(
            f"there are workers on {', '.join(sorted(unknown))}, and {url} is a socket of this machine alone;"
            " name their hosts' nodes in rank_nodes, or one node by kv:// or kvs:// for all of them"
        )
    told: dict[tuple[str, tuple[str, ...]], int] = {}
    for worker, (host, parts) in enumerate(workers):
        for texts in parts:
            told.setdefault((host if host in rank_nodes else "", tuple(texts)), worker)
    return [Part(host, tuple(map(Layout.from_json, texts)), worker) for (host, texts), worker in told.items()]
