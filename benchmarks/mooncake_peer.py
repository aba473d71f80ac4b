"""Mooncake's store on the same work as `users.py`: a client that shares memory with its store's process, arena full.

Runs in a Python that has `mooncake-transfer-engine-non-cuda` (`make mooncake`), with CUDA's runtime library on
LD_LIBRARY_PATH. Prints one JSON object: for each shape the GB/s of bursts of new pages, the median call, and the share
that was refused (its master evicts by a watermark; what comes before that is refused).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPES = ((1, 2 << 20), (8, 2 << 20), (64, 64 << 10))
SOURCE = 256 << 20
STARTS_WITHIN = 60.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nobody listens at port {port}: exit code {process.poll()}")


def measure(arena: int, burst: int, rounds: int) -> list[dict[str, float]]:
    import mooncake
    import mooncake.store

    binaries = Path(mooncake.__file__).parent
    master_port, client_port, metrics_port, http_port = (free_port() for _ in range(4))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started: list[subprocess.Popen[bytes]] = []
    try:
        master = [str(binaries / "mooncake_master"), f"--rpc_port={master_port}", f"--metrics_port={metrics_port}"]
        started.append(subprocess.Popen([*master, "--default_kv_lease_ttl=0"], **quiet))  # type: ignore[call-overload]
        wait_for(master_port, started[-1])
        client = [str(binaries / "mooncake_client"), "--host=127.0.0.1", f"--global_segment_size={arena >> 20} MB"]
        client += [f"--master_server_address=127.0.0.1:{master_port}", "--metadata_server=P2PHANDSHAKE"]
        client += [f"--port={client_port}", "--threads=2", f"--http_port={http_port}"]
        started.append(subprocess.Popen(client, **quiet))  # type: ignore[call-overload]
        wait_for(client_port, started[-1])
        store = mooncake.store.MooncakeDistributedStore()
        failed = store.setup_dummy(SOURCE + (64 << 20), 16 << 20, f"127.0.0.1:{client_port}")
        if failed:
            raise SystemExit(f"the client does not attach: {failed}")
        source = store.alloc_from_mem_pool(SOURCE)
        if failed := store.register_buffer(source, SOURCE):
            raise SystemExit(f"the memory to store from can't be shared: {failed}")
        ctypes.memset(source, 1, SOURCE)
        return [measure_shape(store, source, pages, size, burst, rounds) for pages, size in SHAPES]
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def measure_shape(store: object, source: int, pages: int, page_bytes: int, burst: int, rounds: int) -> dict[str, float]:
    number, refused, stored = 0, 0, 0
    speeds: list[float] = []
    calls: list[float] = []
    for turn in range(-1, rounds):
        total = 0.0  # of whole calls: one that is refused in part has moved less
        done = 0
        for _ in range(burst // (pages * page_bytes)):
            number += 1
            at = number * pages * page_bytes % SOURCE
            keys = [f"{page_bytes}-{number}-{page}" for page in range(pages)]
            pointers = [source + at + page * page_bytes for page in range(pages)]
            start = time.perf_counter()
            results = store.batch_put_from(keys, pointers, [page_bytes] * pages)  # type: ignore[attr-defined]
            seconds = time.perf_counter() - start
            good = sum(result == 0 for result in results)
            if turn < 0:
                continue
            refused += pages - good
            stored += good
            if good == pages:
                calls.append(seconds * 1e3)
                total += seconds
                done += good
        if total:
            speeds.append(done * page_bytes / 1e9 / total)
    return {
        "pages": pages,
        "page_bytes": page_bytes,
        "gbps": statistics.median(speeds) if speeds else 0.0,
        "p50_ms": statistics.median(calls) if calls else 0.0,
        "refused": refused / max(1, refused + stored),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arena", type=int, default=512 << 20)
    parser.add_argument("--burst", type=int, default=2 << 30)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    out = os.dup(1)
    os.dup2(2, 1)  # its libraries print where they like
    found = measure(options.arena, options.burst, options.rounds)
    os.write(out, json.dumps(found).encode() + b"\n")
    sys.stdout.flush()
    os._exit(0)  # its threads outlive its objects


if __name__ == "__main__":
    main()
