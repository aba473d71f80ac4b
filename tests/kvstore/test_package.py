"""``import kvstore`` as a newcomer meets it: what it lists, how objects print, and what ``help`` begins with."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import pydoc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.node.node import Node

ROOT = Path(__file__).parents[2]
LAYOUT = kvstore.Layout(model="acme/chat", block_size=16, page_bytes=64, tenant="search")
HASHES = [bytes([number]) * 32 for number in range(1, 7)]
LIGHT = """
import sys, kvstore
names = dir(kvstore)
heavy = ("numpy", "grpc", "importlib.metadata", "kvstore.client", "kvstore.layout")
print([name for name in heavy if name in sys.modules])
print(names)
print(kvstore.__version__, "grpc" in sys.modules)
"""


def test_dir_lists_what_is_public_and_imports_nothing() -> None:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", LIGHT], env=environment, capture_output=True, text=True, check=True)
    heavy, names, version = done.stdout.splitlines()
    assert heavy == "[]"
    listed = {name for name in ast.literal_eval(names) if not name.startswith("__")}
    assert listed == set(kvstore.__all__) >= {"connect", "Client", "Namespace", "Layout", "hash_blocks", "errors"}
    assert "__version__" in names
    assert version == f"{importlib.metadata.version('kvstore-offload')} False"


def test_every_name_is_there_and_no_other() -> None:
    for name in kvstore.__all__:
        assert getattr(kvstore, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        kvstore.conect  # noqa: B018


def test_objects_say_what_they_are(start_node: Callable[..., Node]) -> None:
    node = start_node()
    url = f"unix://{node.config.socket}"
    with kvstore.connect(f"{url}?arena_dir={node.config.arena_directory}") as client:
        assert repr(client) == f"<kvstore.Client of {url}>"
        pages = client.namespace(LAYOUT)
        assert repr(pages) == "<kvstore.Namespace 'acme/chat · block 16 · group 0 · tenant search', pages of 64 bytes>"
        result = pages.store(HASHES[:4], bytes(4 * 64))
        assert repr(result) == "StoreResult(stored=4, present=0, refused=0)"
        assert repr(pages.lookup(HASHES)) == "<kvstore.Lookup: 4 leading of 6 pages; 4 arena, 2 absent>"
        assert repr(pages.lookup([])) == "<kvstore.Lookup: 0 leading of 0 pages>"
        assert repr(pages.statistics()) == "NamespaceStatistics(loaded={}, stored=4, present=0, refused=0)"
        with pages.prepare_store(HASHES[3:]) as store:
            assert repr(store) == "<kvstore.PendingStore of 3 pages, 2 to write; open>"
        assert repr(store).endswith("; completed>")
        with pages.prepare_load(HASHES) as load:
            assert repr(load) == "<kvstore.PendingLoad of 4 leading pages; open>"


def test_a_layout_is_printed_as_it_is_written() -> None:
    assert repr(LAYOUT) == "Layout(model='acme/chat', block_size=16, page_bytes=64, tenant='search')"
    assert eval(repr(LAYOUT), {"Layout": kvstore.Layout}) == LAYOUT


def test_no_secret_is_printed(short_folder: Path) -> None:
    token, url = short_folder / "token", f"embedded://{short_folder}/e?arena=1MiB&redis=redis://:hunter2@127.0.0.1:1"
    token.write_text("a-token-of-some-length")
    token.chmod(0o600)
    with kvstore.connect(url) as client:
        assert repr(client) == f"<kvstore.Client of embedded://{short_folder}/e>"
    with kvstore.connect("kvs://localhost:1", token_file=token) as client:
        assert "a-token" not in repr(client) + repr(client.namespace(LAYOUT, lazy=True))


def test_help_begins_with_how_to_use_it() -> None:
    text = pydoc.render_doc(kvstore, renderer=pydoc.plaintext)
    first = text[: text.index("PACKAGE CONTENTS")]
    for word in ("kvstore.connect(", ".store(", ".load(", "Layout", "KVStoreError"):
        assert word in first
    for word in ("class Client", "class Namespace", "hash_blocks(", f"VERSION\n    {kvstore.__version__}"):
        assert word in text


def test_public_methods_say_shapes_and_errors() -> None:
    undescribed = []
    for owner in (kvstore.Client, kvstore.Namespace, kvstore.PendingStore, kvstore.PendingLoad):
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if name.startswith("_"):
                continue
            text = inspect.getdoc(method) or ""
            parameters = [each for each in inspect.signature(method).parameters if each != "self"]
            missing = [each for each in parameters if f"{each}: " not in text and name != "observe"]
            if "hashes" in parameters and "32 bytes" not in text and ":meth:" not in text:
                missing.append("length of hashes")
            if {"hashes", "seconds", "queries"} & set(parameters) and "Raises:" not in text:
                missing.append("errors")
            if missing:
                undescribed.append((owner.__name__, name, missing))
    assert not undescribed


def test_what_is_typed_is_what_comes(start_node: Callable[..., Node]) -> None:
    """As docstrings say it: shapes and dtypes of the arrays that are handed out."""
    node = start_node()
    with kvstore.connect(f"unix://{node.config.socket}") as client:
        pages = client.namespace(LAYOUT)
        with pages.prepare_store(HASHES) as store:
            arrays = [each for each in store.pages if each is not None]
            assert {(each.shape, each.dtype) for each in arrays} == {((64,), np.dtype(np.uint8))}
            store.complete()
        with pages.prepare_load(HASHES) as load:
            assert {(each.shape, each.dtype, each.flags.writeable) for each in load.pages} == {
                ((64,), np.dtype(np.uint8), False)
            }
