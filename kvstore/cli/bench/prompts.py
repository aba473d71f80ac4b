"""Prompts of 512 pages of 4 KiB that a benchmark's node holds, named alike in every process that asks for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import kvstore

if TYPE_CHECKING:
    from kvstore.client.namespace import Namespace

PROMPT_PAGES = 512
PAGE_BYTES = 4096


def prompt_layout() -> kvstore.Layout:
    """The layout of their pages."""
    return kvstore.Layout(model="benchmark", block_size=16, page_bytes=PAGE_BYTES)


def prompt_hashes(prompt: int) -> list[bytes]:
    """The page hashes of one of many prompts: made fast, for what counts here is that they are all different."""
    joined = hashlib.shake_128(prompt.to_bytes(8, "big")).digest(PROMPT_PAGES * 32)
    return [joined[start : start + 32] for start in range(0, len(joined), 32)]


def arena_for(pages: int) -> int:
    """Bytes of an arena that holds so many of them."""
    return pages * PAGE_BYTES * 11 // 10 + (1 << 20)


def store_prompts(namespace: Namespace, prompts: int, progress: Callable[[int], None]) -> None:
    """Store the first so many prompts, and touch the mapping of all of them.

    Raises:
        AssertionError: the arena is too small for them.
    """
    for prompt in range(prompts):
        stored = namespace.store(prompt_hashes(prompt), bytes(PROMPT_PAGES * PAGE_BYTES))
        assert not stored.refused, "the arena is too small"
        progress(PROMPT_PAGES)
    for prompt in range(prompts):
        assert namespace.lookup(prompt_hashes(prompt)).prefix == PROMPT_PAGES, "the arena is too small"
