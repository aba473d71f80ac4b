"""Time to the first token of a real SGLang server whose pages come from its storage: from kvstore, and from SGLang's
own ``file`` backend on the same prompts in the same run.

For each backend one server, with HiCache and policy ``wait_complete``. Each prompt is new: it is computed and stored,
device and host pool are flushed, and it is asked for again, for one token. Told are medians; the bytes that are copied
for a hit until they are in the host pool (kvstore copies them out of the arena; the ``file`` backend reads a file into
a buffer, which SGLang copies into the pool); and the processor time of all of the server's processes, from the request
until the flush behind it (for kvstore that of the node as well).

A server on a CPU says little of speed: its copies between device and host pool are stand-ins, and its files lie in the
page cache. What can be compared is what the two backends add to the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from made_models import write_llama

import kvstore
from kvstore.cli.bench.node_process import serving
from kvstore.layout import Layout
from tests.sglang.server import PAGE_SIZE, ServerProcess, Starter, backend

ARENA_BYTES = 1 << 30
COPIES = {"kvstore": 1, "file": 2}
"""Of each byte of a hit, on its way into the host pool: counted in the code, not measured."""


@dataclass(slots=True)
class Result:
    """Of one backend; medians."""

    backend: str
    computed_ms: float
    hit_ms: float
    hit_tokens: int
    copied_bytes: int
    hit_processor_ms: float


def processor_seconds(process: int) -> float:
    """Of the node, so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, server: ServerProcess, prompts: list[list[int]], node: int | None) -> Result:
    """Compute each prompt, forget it, and ask for it again."""
    computed, hits, processor, found = [], [], [], []
    for tokens in prompts:
        begin = time.perf_counter()
        cold = server.answer(tokens, most=1)
        computed.append(time.perf_counter() - begin)
        server.flush()
        before = server.processor_seconds() + (processor_seconds(node) if node else 0.0)
        begin = time.perf_counter()
        again = server.answer(tokens, most=1)
        hits.append(time.perf_counter() - begin)
        assert again.tokens == cold.tokens, "a hit changed the answer"
        server.flush()
        processor.append(server.processor_seconds() + (processor_seconds(node) if node else 0.0) - before)
        assert again.stored, f"nothing came from the storage of {name}:\n{server.tail()}"
        found.append(again.stored)
    return Result(
        name,
        statistics.median(computed) * 1e3,
        statistics.median(hits) * 1e3,
        int(statistics.median(found)),
        0,
        statistics.median(processor) * 1e3,
    )


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1200, help="of each prompt (1200)")
    parser.add_argument("--rounds", type=int, default=9, help="prompts for each backend (9)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    dice = random.Random(0)
    prompts = [[dice.randrange(3, 1024) for _ in range(options.tokens)] for _ in range(options.rounds)]
    results: list[Result] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-bench-")))
        url = stack.enter_context(serving(ARENA_BYTES))
        model = write_llama(folder / "model")
        starter = Starter(folder / "starter.log")
        stack.callback(starter.close)

        def server(name: str, **arguments: Any) -> ServerProcess:
            made = ServerProcess(starter, model, folder / f"{name}.log", **arguments)
            stack.callback(made.kill)
            made.start()
            made.answer(prompts[0][:100], most=1)
            made.flush()
            return made

        ours = server("kvstore", extra=backend(url))
        with kvstore.connect(url) as client:
            results.append(measure("kvstore", ours, prompts, client.status().pid))
            page_bytes = Layout.from_json(client.status().namespaces[0].layout).page_bytes
        ours.stop()
        files = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "files")}
        theirs = server("file", storage="file", extra={"prefetch_threshold": PAGE_SIZE}, environment=files)
        results.append(measure("file", theirs, prompts, None))
        theirs.stop()
    for result in results:
        result.copied_bytes = result.hit_tokens // PAGE_SIZE * page_bytes * COPIES[result.backend]
    if options.json:
        print(json.dumps([asdict(each) for each in results], indent=2))
        return
    print(f"{options.rounds} prompts of {options.tokens} tokens, pages of {page_bytes >> 10} KiB")
    print("backend    computed      hit   tokens   MiB copied   processor")
    for each in results:
        print(
            f"{each.backend:9} {each.computed_ms:6.0f} ms {each.hit_ms:5.0f} ms {each.hit_tokens:8}"
            f" {each.copied_bytes / (1 << 20):10.2f} {each.hit_processor_ms:8.0f} ms"
        )


if __name__ == "__main__":
    main()
