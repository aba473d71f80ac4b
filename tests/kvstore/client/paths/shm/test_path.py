"""What only clients that map the arena can meet."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.paths.shm.attachment import Attachment
from kvstore.errors import UnavailableError


@pytest.fixture
def node(start_node):
    return start_node()


@pytest.fixture
def near(node):
    with kvstore.connect(f"unix://{node.config.socket}") as client:
        yield client


@pytest.mark.parametrize("missing", ["pages", "clients"])
def test_an_arena_that_cannot_be_mapped_is_reached_by_streams(node, near, layout, hashes, payload, missing, caplog):
    hidden = node.store.arena.directory / missing
    hidden.rename(hidden.with_name("hidden"))
    pages = near.namespace(layout)
    hidden.with_name("hidden").rename(hidden)
    assert "pages go through the socket instead of shared memory" in caplog.text
    data = payload(4)
    assert pages.store(hashes(4), data).stored == 4
    into = np.zeros_like(data)
    assert pages.load(hashes(4), into) == 4
    assert np.array_equal(into, data)
    assert near.arena is None
    assert near.status().clients == 0


def test_an_arena_that_goes_away_later_is_unavailable_until_it_is_back(node, near, layout, hashes, payload, eventually):
    pages = near.namespace(layout)
    pages.store(hashes(1), payload(1))
    directory = node.store.arena.directory
    near._session.path._attachment.retire()
    hidden = directory.with_name("hidden")
    directory.rename(hidden)
    with pytest.raises(UnavailableError, match="no arena there"):
        pages.store(hashes(2), payload(2))
    hidden.rename(directory)
    assert pages.store(hashes(2), payload(2)).stored == 1


def test_a_lock_file_swept_away_while_attaching_is_tried_again(node, near, layout, hashes, payload, monkeypatch):
    """A node that starts clears its folder of files that nobody holds; a client may attach just then."""
    original, calls = Attachment.__init__, []

    def attach(self, connection, directory, timeout) -> None:
        calls.append(1)
        stub_attach = connection.stub.Attach

        def swept(request, timeout, metadata):
            if len(calls) == 1:
                (directory / "clients" / request.lock_name).unlink()
            return stub_attach(request, timeout=timeout, metadata=metadata)

        connection.stub.Attach = swept
        try:
            original(self, connection, directory, timeout)
        finally:
            connection.stub.Attach = stub_attach

    monkeypatch.setattr(Attachment, "__init__", attach)
    pages = near.namespace(layout)
    assert len(calls) == 2
    assert pages.store(hashes(1), payload(1)).stored == 1
    assert near.status().clients == 1


def test_an_empty_file_where_the_pages_should_be(node, near, layout, hashes, payload):
    """A node that is making its files may be met in the middle."""
    pages = near.namespace(layout)
    file = node.store.arena.directory / "pages"
    near._session.path._attachment.retire()
    file.rename(file.with_name("aside"))
    file.touch()
    with pytest.raises(UnavailableError):
        pages.store(hashes(1), payload(1))
    file.with_name("aside").rename(file)
    assert pages.store(hashes(1), payload(1)).stored == 1


def test_a_closed_client_leaves_nothing_behind(node, layout, hashes, payload, eventually):
    arena = node.store.arena.directory

    def open_files() -> int:
        links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.is_relative_to(arena) for link in links)

    before = open_files()
    for _ in range(3):
        with kvstore.connect(f"unix://{node.config.socket}") as client:
            client.namespace(layout).store(hashes(1), payload(1))
            assert node.store.statistics().clients == 1
            assert open_files() > before
        eventually(lambda: node.store.statistics().clients == 0)
    del client
    assert open_files() == before
    assert not list((arena / "clients").iterdir())


def test_many_namespaces_share_one_attachment(node, near, hashes):
    for group in range(5):
        layout = kvstore.Layout(model="m", group=group, block_size=16, page_bytes=64)
        near.namespace(layout).store(hashes(1), bytes(64))
    assert near.status().clients == 1


def test_two_clients_in_one_process_are_two(node, layout, hashes, payload, eventually, monkeypatch):
    """The end of one frees what is its own, at once: it is not taken for one that died."""
    monkeypatch.setattr("kvstore.store.residency.QUARANTINE_SECONDS", math.inf)
    one, two = (kvstore.connect(f"unix://{node.config.socket}") for _ in range(2))
    mine, theirs = (client.namespace(layout).prepare_store(hashes(2, name=n)) for n, client in enumerate((one, two)))
    assert one.status().clients == 2
    one.close()
    with pytest.raises(UnavailableError):
        mine.complete()
    eventually(lambda: node.store.statistics().arena_used_bytes == 2 * 8192)
    assert theirs.complete().stored == 2
    two.close()


def test_the_arena_is_really_shared(node, near, layout, hashes, payload):
    """The bytes lie in the node's file: no copy of them went over the socket."""
    data = payload(1)
    near.namespace(layout).store(hashes(1), data)
    at = (node.store.arena.directory / "pages").read_bytes().find(data.tobytes())
    assert at >= 0
    assert at % 4096 == 0


def test_a_removed_arena_folder_of_a_stopped_node(node, near, layout, hashes, payload):
    pages = near.namespace(layout)
    node.stop()
    shutil.rmtree(node.store.arena.directory)
    with pytest.raises(UnavailableError):
        pages.store(hashes(1), payload(1))
