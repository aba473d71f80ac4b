"""Host 2's clock is days away from that of host 1 and Redis, and jumps while nodes, clients and engines work."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import ROOT, RUN, run_docker, wait_until
from traffic import Traffic

ADHERES = {
    "LD_PRELOAD": "/clock/libfaketime.so.1",
    "FAKETIME_TIMESTAMP_FILE": "/clock/offset",
    "FAKETIME_CACHE_DURATION": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
}
"""Environment of a process whose clock is that of host 2."""


@pytest.fixture(scope="module")
def set_clock(hosts: Any, docker: Any) -> Iterator[Callable[[str], None]]:
    """``set_clock("+3d")``: the clock of host 2 is so far away from now on. Its node runs by that clock."""
    folder = Path(hosts.variable("CLOCK"))
    recipe = (ROOT / "tests/compose/clock.Dockerfile").read_text()
    build = ["docker", "build", "--quiet", "--tag", "kvstore-clock", "-"]
    subprocess.run(build, input=recipe, text=True, check=True, capture_output=True, timeout=600)
    copy = "cp /usr/lib/*/faketime/libfaketime.so.1 /clock"
    run_docker("run", "--rm", "--volume", f"{folder}:/clock", "kvstore-clock", "sh", "-c", copy)

    def run(offset: str) -> None:
        fresh = folder / "fresh"
        fresh.write_text(offset + "\n")
        fresh.rename(folder / "offset")  # at once: nobody reads half of it
        seconds = "import time; print(int(time.time()))"
        days = int(offset.rstrip("d")) if offset != "+0" else 0

        def has_come() -> bool:
            there = int(hosts.compose("exec", "-T", "node2", "python", "-c", seconds))
            here = int(hosts.compose("exec", "-T", "node1", "python", "-c", seconds))
            return abs(there - here - days * 86400) < 3600

        wait_until(has_come, f"node 2 is {days} days away")

    (folder / "offset").write_text("+0\n")
    hosts.recreate("node2", NODE2_PRELOAD=ADHERES["LD_PRELOAD"])
    yield run
    (folder / "offset").write_text("+0\n")
    hosts.recreate("node2", NODE2_PRELOAD="")


def test_everything_goes_on_while_clocks_differ_and_jump(
    set_clock: Callable[[str], None],
    hosts: Any,
    clients: Any,
    engines: Any,
    page_client: Any,
    right_answers: Any,
    name: str,
    back_to_normal: Callable[[], None],
) -> None:
    by_that_clock = page_client("engine2", environment=ADHERES)
    wait_until(lambda: "error" not in clients[1].call(do="lookup", prompt="-", pages=1), "node 2 is back")
    with Traffic([clients[0], by_that_clock], engines, right_answers, name, breaking=()) as load:
        for place, offset in enumerate(("+3d", "-3d", "+0")):
            set_clock(offset)
            load.more(3)
            for here, there in ((clients[0], by_that_clock), (by_that_clock, clients[0])):
                prompt = f"{name}/{place}/{here is by_that_clock}"
                assert here.store(prompt, 8)["stored"] == 8
                wait_until(
                    lambda there=there, prompt=prompt: there.load(prompt, 8)["tiers"] in ({"redis": 8}, {"arena": 8}),
                    "pages come over",
                )
            back_to_normal()
    for node in ("node1", "node2"):
        assert hosts.status(node)["arena"]["lapsed"] == 0


@pytest.mark.parametrize("days", [3, -3])
def test_a_prompt_is_handed_over_between_clocks_that_differ(days: int, hosts: Any, engine: Callable[..., Any]) -> None:
    """A ticket is good for minutes. Where it is out of date by the clock there, the prompt is computed; and no more."""
    prefill = engine("engine1", "host1")
    ahead = {"CLOCK_AHEAD": str(days * 86400)}
    decode = engine("decode2", "host2", "host1=kv://node1:7420", environment=ahead)
    for prompt in (100 * RUN + 50 + days, 100 * RUN + 60 + days):
        right = prefill.answer(prompt, plain=True)["tokens"]
        ticket = prefill.answer(prompt, transfer={"do_remote_decode": True})["ticket"]
        answer = decode.answer(prompt, transfer=ticket)
        assert answer["tokens"] == right
        # Only who takes the ticket has the prompt's last, partial block as well: what is not yet out of date is taken.
        assert (answer["hit"] + answer["loaded"] == 322) == (days < 0), answer
