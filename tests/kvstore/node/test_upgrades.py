"""What another version left behind: older is read or set aside with words; newer is refused, and nothing is changed."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash
from node_process import ROOT

import kvstore
from kvstore.arena import format as fmt
from kvstore.errors import FormatError
from kvstore.node.node import Node
from kvstore.store import formats

LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=5000)
HASHES = [bytes([number]) * 32 for number in range(20)]
StartNode = Callable[..., Node]


def store(node: Node) -> None:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=30.0) as client:
        pages = client.namespace(LAYOUT)
        assert pages.store(HASHES, np.ones((20, 5000), np.uint8)).stored == 20
        client.flush()
        assert pages.pin(HASHES[:2], 1000) == 2


def tiers(node: Node) -> set[str | None]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=30.0) as client:
        return set(client.namespace(LAYOUT).lookup(HASHES).tiers)


def contents(*folders: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock" and path.name not in ("lock", "readers")
    }


def newer_segment(folder: Path) -> None:
    [path] = folder.glob("*.segment")
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 16, 99)
    struct.pack_into("<Q", data, 8, xxhash.xxh3_64_intdigest(bytes(data[16:4096])))
    path.write_bytes(data)


def newer_register(folder: Path) -> None:
    path = folder / "namespaces.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))


def newer_pins(folder: Path) -> None:
    path = folder / "pins"
    path.write_bytes(msgpack.packb(msgpack.unpackb(path.read_bytes()) | {"version": 99}))


@pytest.mark.parametrize("make_newer", [newer_segment, newer_register, newer_pins])
def test_what_a_newer_version_left_on_disk_is_refused_and_nothing_is_changed(
    start_node: StartNode, make_newer: Callable[[Path], None]
) -> None:
    node = start_node()
    store(node)
    assert node.stop()
    arena, disk = node.config.arena_directory, node.config.disk
    make_newer(disk)
    # The arena of that version as well, which is of no use to this one: not even that goes.
    with (arena / "headers").open("r+b") as headers:
        headers.seek(len(fmt.MAGIC))
        headers.write(struct.pack("<I", 99))
    before = contents(arena, disk)
    with pytest.raises(FormatError, match=r"format version 99; this version of kvstore reads up to \d. Nothing was"):
        start_node()
    assert contents(arena, disk) == before


def test_the_command_says_so_and_ends(node_process) -> None:
    node = node_process()
    with kvstore.connect(node.url, timeout=30.0) as client:
        client.namespace(LAYOUT).store(HASHES, np.ones((20, 5000), np.uint8))
    assert node.terminate() == 0
    newer_register(node.disk)
    done = subprocess.run(
        [*node.command, "serve", *(f"--{name}={value}" for name, value in node.options.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done
    said = done.stderr
    assert "kvstore serve: " in said
    assert "Start that newer kvstore, or give this one another --disk" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("version", [1, 99])
def test_an_arena_of_another_version_is_set_aside_with_words_and_pages_come_from_disk(
    start_node: StartNode, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    node = start_node()
    store(node)
    assert node.stop()
    with (node.config.arena_directory / "headers").open("r+b") as headers:
        headers.seek(len(fmt.MAGIC))
        headers.write(struct.pack("<I", version))
    with caplog.at_level("WARNING"):
        again = start_node()
    assert "its size or format has changed: the pages in it are dropped" in caplog.text
    assert tiers(again) == {"disk"}


def test_a_register_of_an_older_version_has_its_namespaces(start_node: StartNode) -> None:
    """As it was before it said how old a namespace is."""
    node = start_node()
    store(node)
    assert node.stop()
    for folder in (node.config.arena_directory, node.config.disk):
        path = folder / "namespaces.json"
        register = json.loads(path.read_text())
        for entry in register["namespaces"]:
            del entry["created"], entry["idle"]
        path.write_text(json.dumps(register))
    again = start_node()
    assert again.store.kept_pages == 20
    assert tiers(again) == {"arena"}


def test_what_cannot_be_read_is_left_to_who_opens_it(tmp_path: Path) -> None:
    (tmp_path / "namespaces.json").write_text("[]")
    (tmp_path / "pins").write_bytes(b"\xc1")
    (tmp_path / "0000000000000001.segment").write_bytes(b"short")
    (tmp_path / "notes.segment").mkdir()
    formats.refuse_newer(tmp_path)
    formats.refuse_newer(tmp_path / "none")
