"""Prefill and decode on two hosts, each with two ranks and a node of its own; between them TLS and a token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from tests.vllm.engine import PATIENT, TWO_RANKS, EngineError, Prompt, transfer_config

MAX_TOKENS = 12
ASK = {"do_remote_decode": True}


@pytest.fixture
def hosts(short_folder: Path, shm_folder: Path) -> Iterator[tuple[NodeProcess, NodeProcess, dict[str, str]]]:
    """Their nodes, and what clients of the first one need in their environment."""
    certificates = pytest.importorskip("certificates", reason="makes certificates, for which cryptography is missing")
    authority = certificates.Authority(short_folder)
    certificate, key = authority.sign("node", "127.0.0.1")
    token, tokens = short_folder / "token", short_folder / "tokens"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    tokens.write_text(f"decode:{token.read_text().strip()} rights=read\n")
    for file in (token, tokens):
        file.chmod(0o600)
    nodes = []
    secured = {"tls-cert": str(certificate), "tls-key": str(key), "token-file": str(tokens)}
    try:
        for name, options in (("1", secured), ("2", {})):
            for folder in (short_folder, shm_folder):
                (folder / name).mkdir()
            nodes.append(NodeProcess(short_folder / name, shm_folder / name, **options))
            nodes[-1].start()
        yield nodes[0], nodes[1], {"KVSTORE_CONNECT_CA": str(authority.ca), "KVSTORE_CONNECT_TOKEN_FILE": str(token)}
    finally:
        for node in nodes:
            node.kill()


def holds_nothing(node: NodeProcess) -> bool:
    """Whether all that a node has can be dropped: nobody reads or writes any of it."""
    with kvstore.connect(node.url, timeout=60.0) as client:
        for told in client.status().namespaces:
            client.namespace(kvstore.Layout.from_json(told.layout)).clear()
        return client.status().tier("arena").used_bytes == 0


def test_two_ranks_hand_over_to_two_ranks(
    hosts: tuple[NodeProcess, NodeProcess, dict[str, str]],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    eventually: Callable[..., None],
    key: Path,
) -> None:
    first, second, environment = hosts
    prompts = [prompt(length, seed) for seed, length in enumerate((40, 129, 300, 333, 200, 150))]
    expected = plain(prompts, max_tokens=MAX_TOKENS).tokens
    started: dict[str, Any] = {}

    def start(name: str, node: NodeProcess, **extra: Any) -> None:
        transfer = transfer_config(node.url, ticket_key_file=str(key), **PATIENT, **extra)
        started[name] = start_engine(transfer=transfer, environment=environment, **TWO_RANKS)

    peer = {"peers": {"host 1": f"kvs://127.0.0.1:{first.port}"}}
    both = [
        threading.Thread(target=start, args=("prefill", first), kwargs={"node_id": "host 1"}),
        threading.Thread(target=start, args=("decode", second), kwargs=peer),
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    prefill, decode = started["prefill"], started["decode"]

    tickets = [answer.params for answer in prefill.run([Prompt(tokens, 1, ASK) for tokens in prompts]).answers]
    asked = [Prompt(tokens, MAX_TOKENS, params) for tokens, params in zip(prompts, tickets, strict=True)]
    answers = decode.run(asked[:3])
    assert answers.tokens == expected[:3]
    assert answers.external_hits == sum(len(tokens) - 1 for tokens in prompts[:3])

    # Aborted while it loads, or a little later: whoever comes next has what there is of it.
    decode.run(asked[3:4], abort_after=2)
    assert decode.run(asked[3:4]).tokens == expected[3:4]
    # Prefill dies: its node has the pages.
    prefill.kill()
    answers = decode.run(asked[4:5])
    assert answers.tokens == expected[4:5]
    assert answers.external_hits == len(prompts[4]) - 1
    # Its node dies as well: decode computes.
    first.kill()
    assert decode.run(asked[5:]).tokens == expected[5:]
    first.start()
    # Decode dies in the middle of its work.
    began = threading.Event()

    def work() -> None:
        began.set()
        with pytest.raises(EngineError):
            decode.run(asked * 20)

    worker = threading.Thread(target=work)
    worker.start()
    began.wait()
    decode.kill()
    worker.join()
    for node in (first, second):
        eventually(lambda node=node: holds_nothing(node))
