"""A node in a process that forks: it serves on, and its children have no part in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from forked import descriptors_below, in_child

import kvstore
from kvstore.errors import UnavailableError
from kvstore.store.leases import NODE
from kvstore.store.store import Store

PAGE = 4096
LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=PAGE)
HASHES = [bytes([number]) * 32 for number in range(8)]


def stored(url: str) -> np.ndarray:
    with kvstore.connect(url) as client:
        data = np.random.default_rng(0).integers(0, 256, (8, PAGE), dtype=np.uint8)
        client.namespace(LAYOUT).store(HASHES, data)
        client.flush()
    return data


def loaded(url: str) -> np.ndarray:
    into = np.zeros((8, PAGE), np.uint8)
    with kvstore.connect(url) as client:
        assert client.namespace(LAYOUT).load(HASHES, into) == 8
    return into


@pytest.mark.parametrize("by", ["unix", "kv"])
def test_a_child_does_nothing_to_its_parents_node(start_node, short_folder, shm_folder, by: str) -> None:
    node = start_node(metrics="0")
    url = f"unix://{node.config.socket}" if by == "unix" else f"kv://127.0.0.1:{node.port}"
    data = stored(url)
    known = next(iter(node.store.namespaces.known()))

    def use(store: Store) -> int:
        calls = [
            lambda: store.open_namespace(LAYOUT),
            lambda: store.prepare_store(NODE, known.fingerprint, HASHES, 1.0, direct=True),
            lambda: store.prepare_load(NODE, known.fingerprint, HASHES, 1.0),
            lambda: store.evict(known.fingerprint, HASHES),
            lambda: store.pin(known.fingerprint, HASHES, 60),
            lambda: store.clear(known.fingerprint),
            lambda: store.flush(),
            lambda: node.reload(node.config),
        ]
        for call in calls:
            with pytest.raises(UnavailableError, match="the parent process's"):
                call()
        store.close()
        assert node.stop()
        for tier in store.lower_tiers.own:
            tier.close()
            tier.remove([known.fingerprint + HASHES[0]])
        return len(calls)

    assert in_child(lambda: use(node.store)) == 8
    assert in_child(lambda: descriptors_below(str(short_folder), str(shm_folder))) == []
    assert np.array_equal(loaded(url), data)
    with node.store.write_back.writing:
        node.store.check_integrity()


@pytest.mark.parametrize("how", ["os._exit(0)", "sys.exit(0)"])
def test_a_nodes_child_ends(short_folder: Path, shm_folder: Path, how: str) -> None:
    script = f"""
        import os, sys
        from pathlib import Path
        from kvstore.config.node import NodeConfig
        from kvstore.node.node import Node
        folder, shm = Path({str(short_folder)!r}), Path({str(shm_folder)!r})
        node = Node(NodeConfig(socket=folder / "s", arena=1 << 20, arena_dir=shm / "a", disk_limit=0, listen="0"))
        if not os.fork():
            {how}
        assert os.wait()[1] == 0
        assert node.stop()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_a_killed_nodes_socket_is_free_while_its_child_lives(start_node, short_folder: Path, shm_folder: Path) -> None:
    """Socket, ports, arena and disk; and who was connected is told that it is gone."""
    script = f"""
        import os, time
        from pathlib import Path
        from kvstore.config.node import NodeConfig
        from kvstore.node.node import Node
        folder, shm = Path({str(short_folder)!r}), Path({str(shm_folder)!r})
        node = Node(NodeConfig(
            socket=folder / "s", arena=1 << 20, arena_dir=shm / "a", disk=folder / "disk", disk_limit=64 << 20,
            listen="127.0.0.1:0", metrics="127.0.0.1:0",
        ))
        print(node.port, node.bulk_port, node.metrics_port, flush=True)
        input()
        if not os.fork():
            os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = 0
    clients: list[kvstore.Client] = []
    try:
        port, bulk_port, metrics_port = map(int, parent.stdout.readline().split())
        for url in (f"unix://{short_folder}/s", f"kv://127.0.0.1:{port}"):
            clients.append(kvstore.connect(url))
            clients[-1].namespace(LAYOUT).store(HASHES, np.ones((8, PAGE), np.uint8))
        parent.stdin.write("\n")
        parent.stdin.close()
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        for client in clients:
            with pytest.raises(UnavailableError):
                client.flush()
        again = start_node(
            arena=1 << 20,
            arena_dir=shm_folder / "a",
            listen=f"127.0.0.1:{port}",
            bulk_port=bulk_port,
            metrics=f"127.0.0.1:{metrics_port}",
        )
        assert (loaded(f"unix://{again.config.socket}") == 1).all()
        os.kill(child, 0)  # it is still there
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.stdout.close()
        for client in clients:
            client.close()
