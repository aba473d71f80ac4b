"""The namespace that a person means: by its model, a label, its whole name, or its fingerprint's first digits."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from kvstore.cli.tables import shown
from kvstore.client.client import Client
from kvstore.client.namespace import Namespace
from kvstore.config.rules import did_you_mean
from kvstore.errors import InvalidRequestError
from kvstore.layout import Layout
from kvstore.status import NamespaceStatus

NAMESPACE = "NAMESPACE"
"""What stands for one in a command's help; completion goes by it."""
_LEAST_DIGITS = 6
_MOST_LISTED = 10


def add_namespace_to(command: argparse.ArgumentParser) -> None:
    """The argument that names a namespace, the same for every command that takes one."""
    command.add_argument(
        "namespace",
        metavar=NAMESPACE,
        help="the model's name or label if only one namespace has it, a namespace's whole name, or at least the first"
        f" {_LEAST_DIGITS} digits of its fingerprint; `kvstore namespaces` lists them",
    )


def find_namespace(client: Client, wanted: str) -> Namespace:
    """The one that is meant, opened.

    Raises:
        InvalidRequestError: as :func:`choose`.
    """
    return client.namespace(Layout.from_json(choose(client.status().namespaces, wanted).layout))


def choose(known: Sequence[NamespaceStatus], wanted: str) -> NamespaceStatus:
    """The one that is meant.

    Raises:
        InvalidRequestError: there is none; the message names the one most like it. Or there are several; it lists them.
    """
    named = [each for each in known if each.name == wanted]
    if not named:
        begins = f"{wanted} · ", f"{wanted}@"
        named = [each for each in known if wanted in each.labels or each.name.startswith(begins)]
    if not named and len(wanted) >= _LEAST_DIGITS:
        named = [each for each in known if each.fingerprint.hex().startswith(wanted.lower())]
    if not named:
        raise InvalidRequestError(unknown_namespace(wanted, [(each.fingerprint, each.name) for each in known]))
    if len(named) > 1:
        listed = listing([(each.fingerprint, each.name) for each in named])
        raise InvalidRequestError(f"{wanted!r} can be any of these namespaces:{listed}")
    return named[0]


def name_and_labels(namespace: NamespaceStatus) -> str:
    """A namespace's name, and what else its model is called, for a terminal."""
    others = ", ".join(map(shown, namespace.labels[1:]))
    return shown(namespace.name) + (f" (also {others})" if others else "")


def unknown_namespace(wanted: str, known: Sequence[tuple[bytes, str]]) -> str:
    """What to say of one that the node does not know: the nearest of those that it knows (fingerprint, name), and
    these themselves, or how many they are."""
    names = [name for _, name in known]
    near = did_you_mean(wanted, short_names(names)) or did_you_mean(wanted, names)
    if len(known) > _MOST_LISTED:
        return f"the node knows no namespace {wanted!r} among its {len(known):,} (`kvstore namespaces`){near}"
    return f"the node knows no namespace {wanted!r}{near or ';'} known:{listing(known) or ' none'}"


def listing(found: Sequence[tuple[bytes, str]]) -> str:
    """Namespaces by fingerprint and name, a line for each, as far as they can be overlooked."""
    lines = [f"\n  {fingerprint.hex()[:12]} {shown(name)}" for fingerprint, name in found[:_MOST_LISTED]]
    if len(found) > _MOST_LISTED:
        lines.append(f"\n  … {len(found) - _MOST_LISTED:,} more: kvstore namespaces")
    return "".join(lines)


def short_names(names: Sequence[str]) -> list[str]:
    """What is enough to name each: its model, or the whole name where others are of the same model."""
    models = Counter(_model(name) for name in names)
    return [model if models[model := _model(name)] == 1 else name for name in names]


def _model(name: str) -> str:
    return name.partition(" · ")[0]
