"""Explains why a prompt missed: names its first missing block, and the field of the block's key that differs.

A page's key is its namespace (every field of the layout) and its block's hash (tokens before and in the block, extra
keys). So a miss is one of four: another namespace, other tokens, other extra keys, or the page is not there any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvstore.cli.prompts import Prompt
from kvstore.layout import Layout

AskNode = Callable[[bytes, Sequence[bytes]], Sequence[tuple[str | None, bool]]]
"""Given a namespace's fingerprint and hashes: for each its tier, and whether it is known to have left."""
_NEAREST = 3
_MORE_ROOM = (
    "a larger arena, disk or Redis keeps more (`kvstore plan` says how much), or a larger quota where the namespace has"
    " one; `kvstore pin` keeps a prefix"
)
_ONE_NAME = (
    "nothing was stored for this model yet, or it was cleared; if both names mean one model, let both engines name it"
    " alike"
)
_ONE_REVISION = (
    "nothing was stored for these weights and settings yet, or it was cleared; vLLM's revision is a fingerprint of the"
    " weights, of every setting that changes numbers (dtype, quantization, overrides), and of code that"
    " --trust-remote-code runs: let these agree"
)


@dataclass(frozen=True, slots=True)
class Known:
    """A namespace of the node."""

    layout: Layout
    fingerprint: bytes
    name: str = ""
    """As the node shows it; empty: as the layout has it."""
    labels: tuple[str, ...] = ()
    """What its model is called there."""

    @property
    def shown_name(self) -> str:
        """For people."""
        return self.name or self.layout.name

    def is_of_another_model(self, other: Known) -> bool:
        """Whether another namespace's model has another name, or other weights and no name in common."""
        if self.layout.model != other.layout.model:
            return True
        named = bool(self.labels and other.labels) and not set(self.labels) & set(other.labels)
        return named and self.layout.revision != other.layout.revision


@dataclass(frozen=True, slots=True)
class Why:
    """Why a prompt missed, or that it did not."""

    asked: int = 0
    """Blocks of the prompt."""
    present: int = 0
    """Leading blocks that are there, in the namespace that is asked."""
    block: int | None = None
    """The first one that is not; None: all are."""
    key_field: str = ""
    """What of its key differs: a field of the layout, ``tokens``, ``extra_keys``. Empty: nothing that is known."""
    reason: str = ""
    """In words."""
    advice: str = ""
    tiers: dict[str, int] = field(default_factory=dict)
    """Tier → leading blocks that are there."""


def different_fields(one: Layout, other: Layout) -> dict[str, tuple[Any, Any]]:
    """Each field in which two layouts differ, and its values."""
    a, b = asdict(one), asdict(other)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def why_missed(prompt: Prompt, namespace: Known | None, known: Sequence[Known], ask: AskNode) -> Why:
    """Why an engine that asks for this prompt in this namespace misses.

    Args:
        prompt: what is asked for.
        namespace: where; None: the node does not know the layout in the prompt.
        known: every namespace of the node.
        ask: asks the node.
    """
    if namespace is None:
        return _unknown_namespace(prompt, known, ask)
    hashes = prompt.hashes(namespace.layout.block_size)
    found = ask(namespace.fingerprint, hashes)
    present = next((place for place, (tier, _) in enumerate(found) if tier is None), len(found))
    tiers: dict[str, int] = {}
    for tier, _ in found[:present]:
        tiers[tier or ""] = tiers.get(tier or "", 0) + 1
    why = Why(len(hashes), present, tiers=tiers)
    if not hashes:
        size = namespace.layout.block_size
        return replace(why, reason=f"the prompt has no full block of {size} tokens: only full blocks are kept")
    if present == len(hashes):
        return replace(why, reason="every block is there: an engine that asks so hits")
    behind = sum(tier is not None for tier, _ in found[present:])
    more = f"; {behind} blocks behind it are there, of no use without it" if behind else ""
    why = replace(why, block=present)
    if found[present][1]:  # what this namespace had itself explains more than what another one has
        reason = f"it was there: the arena, or a quota, was full, and so it left to make room{more}"
        return replace(why, reason=reason, advice=_MORE_ROOM)
    if (other := _elsewhere(hashes[present], namespace, known, ask)) is not None:
        name, values = next(iter(different_fields(namespace.layout, other.layout).items()))
        if namespace.is_of_another_model(other):
            model = other.labels[0] if other.labels else other.layout.model
            more += f"; the model {model!r} has pages of the same tokens, which are of no use to another model"
            return _never_seen(why, prompt, namespace, known, ask, more)
        return replace(
            why,
            key_field=name,
            reason=f"another namespace has it: {other.shown_name!r}, which differs in"
            f" {_shown(different_fields(namespace.layout, other.layout))}{more}",
            advice=f"let both engines agree on {name} ({values[0]!r} is asked for, {values[1]!r} is stored)",
        )
    return _never_seen(why, prompt, namespace, known, ask, more)


def _never_seen(why: Why, prompt: Prompt, namespace: Known, known: Sequence[Known], ask: AskNode, more: str) -> Why:
    """The node remembers nothing of the block; is the prompt there under another block size, or with other keys?"""
    if prompt.tokens is not None:
        for other in known:
            size = other.layout.block_size
            if size != namespace.layout.block_size and (hashes := prompt.hashes(size)):
                hits = sum(tier is not None for tier, _ in ask(other.fingerprint, hashes))
                if hits:
                    return replace(
                        why,
                        key_field="block_size",
                        reason=f"{hits} of its blocks are there in blocks of {size} tokens: {other.shown_name!r}",
                        advice=f"give engines one block size (--block-size {size})",
                    )
        if prompt.extra_keys:
            bare = Prompt(tokens=prompt.tokens).hashes(namespace.layout.block_size)
            if ask(namespace.fingerprint, bare[why.present : why.present + 1])[0][0] is not None:
                return replace(
                    why,
                    key_field="extra_keys",
                    reason="the same tokens are there without extra keys:"
                    f" {list(prompt.keys_of(why.present))!r} are asked for",
                    advice="a LoRA adapter, multimodal input or cache salt makes other pages: is it meant?",
                )
    if why.present:
        size = namespace.layout.block_size
        start = why.present * size
        reason = (
            f"nothing stored has these tokens behind the {why.present} blocks that are there: from token {start} on"
            f" (to {start + size - 1}) the prompt differs from what was stored, or more was never stored{more}"
        )
        advice = "compare with the prompt that was stored: --against FILE names the first token that differs"
        return replace(why, key_field="tokens", reason=reason, advice=advice)
    reason = f"nothing is known of its first block: never stored, cleared, or gone too long ago{more}"
    advice = (
        "does the engine store (kv_role, store_threshold, its log)? A first token that differs (a date in the system"
        " prompt), a LoRA adapter or a salt changes every block: --against FILE compares two prompts"
    )
    return replace(why, reason=reason, advice=advice)


def _unknown_namespace(prompt: Prompt, known: Sequence[Known], ask: AskNode) -> Why:
    """The node never saw the layout that is asked for, or dropped it."""
    assert prompt.layout is not None
    layout = prompt.layout
    hashes = prompt.hashes(layout.block_size)
    nearest = sorted(known, key=lambda each: len(different_fields(layout, each.layout)))[:_NEAREST]
    why = Why(len(hashes), 0, 0 if hashes else None)
    for each in nearest:
        same_size = each.layout.block_size == layout.block_size
        there = prompt.hashes(each.layout.block_size) if prompt.tokens is not None or same_size else []
        if there and ask(each.fingerprint, there[:1])[0][0] is not None:
            nearest = [each]
            break
    if not nearest:
        return replace(
            why, reason="the node has no namespace at all", advice="nothing was stored yet, or it was cleared"
        )
    differ = different_fields(layout, nearest[0].layout)
    return replace(
        why,
        key_field=next(iter(differ), ""),
        reason=f"the node has no namespace {layout.name!r}; the nearest is {nearest[0].shown_name!r}, which differs in"
        f" {_shown(differ)}",
        advice=_ONE_NAME
        if "model" in differ
        else _ONE_REVISION
        if "revision" in differ
        else "let both engines agree on that, or fill this namespace first",
    )


def _elsewhere(block_hash: bytes, namespace: Known, known: Sequence[Known], ask: AskNode) -> Known | None:
    """A namespace that has this block: of the same model before others, the one that differs least first."""

    def distance(other: Known) -> tuple[bool, int]:
        return namespace.is_of_another_model(other), len(different_fields(namespace.layout, other.layout))

    others = [each for each in known if each.fingerprint != namespace.fingerprint]
    for each in sorted(others, key=distance):
        if ask(each.fingerprint, [block_hash])[0][0] is not None:
            return each
    return None


def compare(asked: Prompt, stored: Prompt) -> Why:
    """Where two prompts part: the field of the layout, or the first block, and in it the token or the extra key.

    Args:
        asked: the one that missed.
        stored: the one that it should have found.
    """
    if asked.layout is not None and stored.layout is not None and asked.layout != stored.layout:
        differ = different_fields(asked.layout, stored.layout)
        reason = f"they ask different namespaces, which differ in {_shown(differ)}: no block is the same page"
        return Why(0, 0, 0, next(iter(differ)), reason, "let both engines agree on that")
    layout = asked.layout or stored.layout
    size = layout.block_size if layout is not None else 16
    mine, theirs = asked.hashes(size), stored.hashes(size)
    block = next((place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    why = Why(len(mine), block if block is not None else min(len(mine), len(theirs)), block)
    if block is None:
        if len(mine) > len(theirs):
            why = replace(why, block=len(theirs), key_field="tokens")
            return replace(why, reason=f"the first {len(theirs)} blocks are the same; the stored prompt ends there")
        return replace(why, reason="every block that is asked for is the same")
    if asked.tokens is not None and stored.tokens is not None:
        pairs = zip(asked.tokens[: (block + 1) * size], stored.tokens[: (block + 1) * size], strict=False)
        token = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if token is not None:
            values = f"{asked.tokens[token]} is asked for, {stored.tokens[token]} was stored"
            return replace(why, key_field="tokens", reason=f"token {token} differs: {values}")
        keys = f"{list(asked.keys_of(block))!r} is asked for, {list(stored.keys_of(block))!r} was stored"
        return replace(why, key_field="extra_keys", reason=f"the tokens are the same, the extra keys differ: {keys}")
    reason = "its hash differs: other tokens in it or before it, or other extra keys (LoRA, multimodal input, salt)"
    return replace(
        why, key_field="tokens or extra_keys", reason=reason, advice="give both files tokens to know the token"
    )


def _shown(differ: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} ({asked!r} asked, {stored!r} there)" for name, (asked, stored) in differ.items())
