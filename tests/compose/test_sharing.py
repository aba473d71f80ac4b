"""What is stored on one host is found on the other one, through Redis, and counted truly on both."""

from __future__ import annotations

from typing import Any

from deployment import RUN
from relays import HANG
from traffic import check_metrics

PAGES = 20
"""Full pages of each prompt's 323 tokens."""
NEW = range(100 * (1 + RUN), 100 * (1 + RUN) + 8)
"""Prompts that no other test has. They have 8 pages in common."""


def test_an_engine_hits_what_an_engine_elsewhere_stored(
    hosts: Any, clients: Any, engines: Any, eventually: Any
) -> None:
    before = hosts.status("node1"), hosts.status("node2")
    right = [engines[1].answer(prompt, plain=True)["tokens"] for prompt in NEW]

    def moved(host: int, tier: str, counter: str) -> int:
        return int(clients[host].counters(tier)[counter] - before[host][tier][counter])

    here = [engines[0].answer(prompt) for prompt in NEW]
    assert [answer["tokens"] for answer in here] == right
    new = 8 + 12 * len(NEW)
    eventually(lambda: moved(0, "arena", "shared") == new, f"all {new} pages are in Redis")
    assert moved(0, "arena", "stored") == new

    there = [engines[1].answer(prompt) for prompt in NEW]
    assert [answer["tokens"] for answer in there] == right
    for answer in there:
        assert answer["hit"] + answer["loaded"] == PAGES * 16
        assert answer["computed"] == 323 + 8 - 1 - PAGES * 16
    assert moved(1, "redis", "hit") == new
    assert moved(1, "redis", "missed") == moved(1, "redis", "corrupt") == moved(1, "arena", "stored") == 0
    assert hosts.status("node2")["redis"]["hit"] - before[1]["redis"]["hit"] == new  # the command says the same


def test_bytes_go_both_ways(clients: Any, name: str, eventually: Any) -> None:
    for here, there in (clients, clients[::-1]):
        prompt = f"{name}/{here.where}"
        shared, loaded = here.counters("arena")["shared"], there.counters("redis")
        assert here.store(prompt, 40)["stored"] == 40
        eventually(lambda: here.counters("arena")["shared"] == shared + 40, "40 pages are in Redis")  # noqa: B023
        assert there.load(prompt, 40)["tiers"] == {"redis": 40}
        assert there.load(prompt, 40)["tiers"] == {"arena": 40}
        moved = there.counters("redis") - loaded
        assert (moved["asked"], moved["hit"], moved["read_bytes"]) == (40, 40, 40 * (128 << 10))


def test_fifty_clients_at_once(hosts: Any, page_client: Any, name: str, back_to_normal: Any) -> None:
    groups = [
        page_client("engine1"),
        page_client("engine2"),
        page_client("remote", "kv://node1:7420"),
    ]
    before = hosts.status("node1"), hosts.status("node2")
    for group, clients in zip(groups, (20, 20, 10), strict=True):
        group.send(crowd={"name": f"{name}/{group.where}", "clients": clients})
    replies = [reply for group in groups for reply in group.receive(120.0)["replies"]]
    assert len(replies) == 50 * 4 * 4
    assert [reply for reply in replies if "error" in reply or reply.get("wrong")] == []
    assert [reply for reply in replies if reply["seconds"] > HANG] == []
    assert all(reply["loaded"] == 4 for reply in replies if "loaded" in reply)
    stored = sum(reply.get("stored", 0) for reply in replies)
    after = hosts.status("node1"), hosts.status("node2")
    assert stored == sum(
        then["arena"]["stored"] - now["arena"]["stored"] for now, then in zip(before, after, strict=True)
    )
    back_to_normal()


def test_a_scrape_from_another_host_says_what_the_node_says(hosts: Any, clients: Any, name: str) -> None:
    stored = hosts.status("node1")["arena"]["stored"]
    assert clients[0].store(name, 8)["stored"] == 8
    for node in ("node1", "node2"):
        check_metrics(hosts, node)
    assert f'kvstore_pages_total{{event="stored",tier="arena"}} {stored + 8:.1f}' in hosts.scrape("node1")
