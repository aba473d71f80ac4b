"""Pages brought up for somebody else: into the node's arena, and nowhere near the client that asked for it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from node_process import NodeProcess

import kvstore
from kvstore.errors import LimitExceededError, PermissionDeniedError
from kvstore.limits import MOST_LOOKUP_PAGES

LAYOUT = kvstore.Layout(model="m", dtype="bfloat16", block_size=16, page_bytes=4096)
HASHES = kvstore.hash_blocks(range(16 * 700), block_size=16)  # more than one batch


@pytest.fixture
def on_disk(node_process: Callable[..., NodeProcess]) -> NodeProcess:
    """A node that has the pages on disk alone."""
    node = node_process()
    with kvstore.connect(node.url) as client:
        client.namespace(LAYOUT).store(HASHES, np.zeros((len(HASHES), 4096), np.uint8))
        client.flush()
    assert node.terminate() == 0
    shutil.rmtree(node.arena_folder)
    node.start()
    return node


@pytest.mark.parametrize("over", ["url", "kv_url"])
def test_pages_come_up_and_nothing_comes_here(on_disk: NodeProcess, over: str) -> None:
    with kvstore.connect(getattr(on_disk, over)) as client:
        pages = client.namespace(LAYOUT)
        assert pages.lookup(HASHES).tiers == ("disk",) * len(HASHES)
        assert pages.prefetch(HASHES) == len(HASHES)
        assert pages.lookup(HASHES).tiers == ("arena",) * len(HASHES)
        assert pages.prefetch(HASHES) == len(HASHES)  # they are there
        assert pages.statistics().loaded == {}
        pages.clear()
        assert client.status().tier("arena").used_bytes == 0  # nobody holds them


def test_it_ends_at_a_page_that_is_nowhere(on_disk: NodeProcess) -> None:
    with kvstore.connect(on_disk.kv_url) as client:
        pages = client.namespace(LAYOUT)
        pages.evict(HASHES[300:301])
        assert pages.prefetch(HASHES) == 300
        assert pages.lookup(HASHES[290:310]).tiers == ("arena",) * 10 + (None,) + ("disk",) * 9
        assert pages.prefetch([]) == 0
        with pytest.raises(LimitExceededError):
            pages.prefetch([HASHES[0]] * (MOST_LOOKUP_PAGES + 1))


def test_an_embedded_store(short_folder: Path) -> None:
    with kvstore.connect(f"embedded://{short_folder}/store?arena=1MiB&disk_limit=16MiB") as client:
        pages = client.namespace(LAYOUT)
        pages.store(HASHES[:8], np.zeros((8, 4096), np.uint8))
        assert pages.prefetch(HASHES[:9]) == 8


@pytest.mark.parametrize("way", ["embedded", "kv"])
def test_the_last_pages_do_not_push_the_first_ones_out(
    node_process: Callable[..., NodeProcess], short_folder: Path, way: str
) -> None:
    """Of more pages than the arena has room for as many leading ones come as half of it has, and stay."""
    url = f"embedded://{short_folder}/store?arena=1MiB&disk_limit=64MiB"
    with kvstore.connect(url if way == "embedded" else node_process(arena="1MiB").kv_url) as client:
        pages = client.namespace(LAYOUT)
        for first in range(0, len(HASHES), 50):
            pages.store(HASHES[first : first + 50], np.zeros((50, 4096), np.uint8))
            client.flush()
        assert set(pages.lookup(HASHES[:100]).tiers) == {"disk"}
        assert pages.prefetch(HASHES) == 128
        assert pages.lookup(HASHES[:129]).tiers == ("arena",) * 128 + ("disk",)
        assert pages.prefetch(HASHES) == 128  # nothing is held any more


def test_with_asyncio(on_disk: NodeProcess) -> None:
    async def prefetch() -> tuple[int, tuple[str | None, ...]]:
        async with kvstore.aio.connect(on_disk.kv_url) as client:
            pages = await client.namespace(LAYOUT)
            return await pages.prefetch(HASHES[:20]), (await pages.lookup(HASHES[:21])).tiers

    assert asyncio.run(prefetch()) == (20, ("arena",) * 20 + ("disk",))


def test_it_needs_the_right_to_read_and_no_other(node_process: Callable[..., NodeProcess], tmp_path: Path) -> None:
    reads, writes, everything = "r" * 32, "w" * 32, "e" * 32
    tokens = tmp_path / "tokens"
    tokens.write_text(f"router:{reads} rights=read\nwriter:{writes} rights=write\nall:{everything}\n")
    for name, secret in (("reads", reads), ("writes", writes), ("all", everything)):
        (tmp_path / name).write_text(secret)
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    node = node_process(token_file=str(tokens))
    with kvstore.connect(node.kv_url, token_file=tmp_path / "all") as client:
        client.namespace(LAYOUT).store(HASHES[:4], np.zeros((4, 4096), np.uint8))
    with kvstore.connect(node.kv_url, token_file=tmp_path / "reads") as client:
        assert client.namespace(LAYOUT).prefetch(HASHES[:4]) == 4
    with (
        kvstore.connect(node.kv_url, token_file=tmp_path / "writes") as client,
        pytest.raises(PermissionDeniedError, match="needs the right 'read'"),
    ):
        client.namespace(LAYOUT).prefetch(HASHES[:4])
