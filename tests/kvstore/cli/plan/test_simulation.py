"""The simulated fleet: what more of something must bring, and what must not depend on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.cli.bench.trace import TracedRequest
from kvstore.cli.bench.workloads import chat
from kvstore.cli.main import main
from kvstore.cli.plan.parts import Rates
from kvstore.cli.plan.report import Report, report
from kvstore.cli.plan.simulation import Fleet, Simulation
from kvstore.cli.plan.workload import FleetRequest, forking_agents, trace_copies

BLOCK = 64 << 10
FLEET = Fleet(4, 2, 200 * BLOCK, 4000 * BLOCK, BLOCK, BLOCK, 512)


def made_trace(requests: int) -> list[TracedRequest]:
    """Chats, five requests a second."""
    return [
        TracedRequest(200.0 * number, 512 * len(prompt), 10, prompt) for number, prompt in enumerate(chat(requests, 7))
    ]


def copies(number: int, requests: int = 150) -> list[FleetRequest]:
    return list(trace_copies(made_trace(requests), number, requests, common_tokens=2000, block_tokens=512))


def simulated(fleet: Fleet, requests: Sequence[FleetRequest]) -> Report:
    return report(Simulation(fleet).run(requests))


def test_every_block_is_a_hit_of_one_tier_or_computed() -> None:
    outcome = Simulation(FLEET).run(copies(4))
    counts = outcome.counts
    assert counts.requests == 600
    assert counts.arena_hits > 0
    assert counts.redis_hits > 0
    hits = counts.arena_hits + counts.redis_hits + counts.object_hits
    assert counts.tokens - counts.computed_tokens == 512 * hits


def test_what_is_the_same_every_time() -> None:
    assert simulated(FLEET, copies(4)) == simulated(FLEET, copies(4))


def test_one_node_with_room_for_all_hits_what_an_unbounded_cache_would() -> None:
    requests = copies(1)
    seen: set[int] = set()
    hits = 0
    for request in requests:
        for block in request.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(request.blocks)
    slow = [replace_time(request, 1000.0 * number) for number, request in enumerate(requests)]
    found = Simulation(replace(FLEET, nodes=1, shards=0, arena_bytes=1 << 40)).run(slow)
    assert found.counts.arena_hits == hits


def replace_time(request: FleetRequest, time: float) -> FleetRequest:
    """The same request at another time: behind all that came before it."""
    return replace(request, time=time)


def test_redis_gives_a_fleet_what_random_routing_takes() -> None:
    requests = copies(4)
    alone = simulated(replace(FLEET, shards=0), requests)
    shared = simulated(FLEET, requests)
    assert shared.saved_tokens > alone.saved_tokens + 0.05


def test_routing_by_prefix_finds_more_in_arenas_than_any_node_does() -> None:
    requests = copies(4)
    assert (
        simulated(replace(FLEET, router="prefix"), requests).arena_hits > simulated(FLEET, requests).arena_hits + 0.05
    )


def test_more_shards_do_the_same_work_with_less_each() -> None:
    requests = copies(4)
    few, many = simulated(FLEET, requests), simulated(replace(FLEET, shards=8), requests)
    busy = [next(part.busy for part in each.parts if part.name == "shard") for each in (few, many)]
    assert busy[1] < busy[0]


def test_what_is_given_up_or_waits_is_wanted_all_the_same() -> None:
    """By far too few shards: what is done of the work does not say with how many nodes they would saturate."""
    block = 16 << 20
    fleet = Fleet(8, 1, 64 * block, 1 << 40, block, 2 << 20, 512)
    requests = copies(8, 60)
    slow, fast = (
        next(part for part in simulated(replace(fleet, shards=shards), requests).parts if part.name == "shard")
        for shards in (1, 64)
    )
    assert fast.busy == pytest.approx(fast.wanted, rel=0.1)  # they keep up
    assert slow.wanted > 2 * slow.busy
    assert slow.wanted == pytest.approx(64 * fast.wanted, rel=0.3)
    few, many = slow.most_nodes(8), fast.most_nodes(8)
    assert few is not None
    assert many is not None
    assert few <= 1
    assert many == pytest.approx(8 * 0.8 / fast.wanted, abs=1)


def test_what_is_computed_behind_the_last_request_is_none_of_its_seconds() -> None:
    """More than the engines compute comes: a second has what they do in one, and the end has all of it."""
    rates = replace(FLEET.rates, prefill_tokens=1000.0)
    fleet = replace(FLEET, rates=rates)
    outcome = Simulation(fleet).run(copies(4))
    found = report(outcome)
    most = fleet.nodes * rates.engines * rates.prefill_tokens
    assert outcome.counts.computed_tokens / outcome.seconds > 2 * most
    assert 0.5 * most < found.computed_tokens <= most
    assert 0 < found.stored_gigabytes * 1e9 <= most / 512 * BLOCK


def test_objects_hold_what_redis_has_let_go() -> None:
    requests = copies(4)
    small = replace(FLEET, redis_bytes=200 * BLOCK)
    assert simulated(replace(small, objects=True), requests).object_hits > 0.05


def test_of_nodes_that_compute_the_same_at_once_one_sends_it() -> None:
    fleet = replace(FLEET, nodes=16, redis_bytes=1 << 30)
    same = [FleetRequest(0.0, number, 512 * 8, tuple(range(8))) for number in range(50)]
    counts = Simulation(fleet).run(same).counts
    assert counts.computed_tokens == 50 * 512 * 8  # all came before any was computed
    assert counts.sent == 8
    assert 8 < counts.shared <= 16 * 8


def test_agents_fork_and_have_their_past_in_common() -> None:
    requests = list(forking_agents(8, 200, 1, common_tokens=2000, block_tokens=512))
    assert len(requests) == 200
    assert all(request.blocks[:4] == (-1, -2, -3, -4) for request in requests)
    behind = [request.blocks[:-2] for request in requests if len(request.blocks) > 6]
    assert len(set(behind)) < len(behind)


def write_trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    lines = [
        {"timestamp": each.timestamp, "input_length": each.input_length, "output_length": 1, "hash_ids": each.hash_ids}
        for each in made_trace(60)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_command_says_what_saturates_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ["--fleet", "4", "--shards", "2", "--redis", "64GiB", "--requests", "240"]
    assert main(["plan", str(write_trace(tmp_path)), *fleet, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 240
    assert found["first"] in {"shard", "shard's link", "node's link", "object storage", "router"}
    assert found["changes"][0]["change"] == "1 GiB more of each arena"
    shards = next(part for part in found["parts"] if part["name"] == "shard")
    assert len(shards["each"]) == 2
    assert shards["wanted"] >= shards["busy"]
    assert max(busy for busy, _, _ in shards["each"]) == shards["busy"]
    assert main(["plan", str(write_trace(tmp_path)), *fleet]) == 0
    said = capsys.readouterr().out
    assert "of all tokens not computed" in said
    assert "first: " in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fleet", "0"], "--fleet is 0, it must be from 1 to 1000"),
        (["--fleet", "1001"], "--fleet is 1001"),
        (["--fleet", "2", "--shards", "65"], "--shards is 65, it must be from 0 to 64"),
        (["--fleet", "2", "--arena", "1MiB"], "--arena is 1 MiB, the least for blocks of 64 MiB is 256 MiB"),
        (["--fleet", "2", "--engine-page", "0"], "--engine-page is 0"),
        (["--fleet", "2", "--requests", "0"], "--requests is 0"),
    ],
)
def test_wrong_flags_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["plan", str(write_trace(tmp_path)), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_fleet_is_asked_the_trace_once_or_a_copy_for_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of copies nothing is in common, so more is computed."""
    trace, found = write_trace(tmp_path), {}
    flags = ["--fleet", "4", "--shards", "2", "--redis", "64GiB", "--common", "0", "--requests", "240", "--json"]
    for workload in ("trace", "copies", "agents"):
        assert main(["plan", str(trace), *flags, "--workload", workload]) == 0
        found[workload] = json.loads(capsys.readouterr().out)
    assert {workload: each["requests"] for workload, each in found.items()} == {
        "trace": 60,
        "copies": 240,
        "agents": 240,
    }
    assert found["trace"]["computed_tokens"] < found["copies"]["computed_tokens"]


def test_the_largest_fleet() -> None:
    fleet = replace(FLEET, nodes=1000, shards=64, redis_bytes=4 << 30, rates=Rates(engines=1))
    found = simulated(fleet, copies(1000, 1))
    assert found.requests == 1000
    assert [part.parts for part in found.parts] == [64, 64, 1000, 1, 1, 1000]
