"""Prefill on host 1, decode on host 2, which loads from host 1's node; and what breaks between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deployment import RUN

TOKENS = 323
"""Of each prompt: 20 full pages and 3 tokens."""
NUMBERS = itertools.count((1000 + 1000 * RUN) * 100, 100)
"""Prompts that no other test has, and that have no page in common."""


@pytest.fixture(scope="module")
def prefill(engine: Callable[..., Any]) -> Any:
    return engine("engine1", "host1")


@pytest.fixture(scope="module")
def decode(engine: Callable[..., Any]) -> Any:
    return engine("decode2", "host2", "host1=kv://node1:7420")


@pytest.fixture
def hand_over(prefill: Any, decode: Any) -> Iterator[Callable[..., dict[str, Any]]]:
    """A prompt computed on host 1 and answered on host 2, with something done in between. The answer is right."""

    def run(between: Callable[[], object] = lambda: None) -> dict[str, Any]:
        prompt = next(NUMBERS)
        ticket = prefill.answer(prompt, transfer={"do_remote_decode": True})["ticket"]
        between()
        answer: dict[str, Any] = decode.answer(prompt, transfer=ticket)
        assert answer["tokens"] == decode.answer(prompt, plain=True)["tokens"]
        return answer

    return run


def whole(answer: dict[str, Any]) -> bool:
    """Whether all but the last token of the prompt came from host 1."""
    return bool(answer["loaded"] == TOKENS - 1)


def test_decode_on_host_2_loads_what_host_1_has_computed(hosts: Any, hand_over: Any) -> None:
    before = hosts.status("node1"), hosts.status("node2")
    for _ in range(3):
        assert whole(hand_over())
    assert hosts.status("node1")["arena"]["hit"] - before[0]["arena"]["hit"] >= 3 * 21
    # What came is kept on host 2, but for the partial blocks.
    assert hosts.status("node2")["arena"]["stored"] - before[1]["arena"]["stored"] == 3 * 20


def test_host_1s_node_is_killed_with_the_pages(
    hosts: Any, hand_over: Any, docker: Any, eventually: Any, back_to_normal: Any
) -> None:
    assert whole(hand_over())
    hand_over(lambda: docker("kill", hosts.container("node1")))
    docker("start", hosts.container("node1"))
    eventually(lambda: whole(hand_over()), "prompts are handed over again")
    back_to_normal()


def test_host_1s_node_stops_for_a_while(
    hosts: Any, hand_over: Any, docker: Any, eventually: Any, back_to_normal: Any
) -> None:
    hand_over(lambda: docker("pause", hosts.container("node1")))
    docker("unpause", hosts.container("node1"))
    eventually(lambda: whole(hand_over()), "prompts are handed over again")
    back_to_normal()


@pytest.mark.parametrize("direction", ["both", "to host 1", "from host 1"])
def test_the_hosts_are_cut_off_from_each_other(
    direction: str, hosts: Any, hand_over: Any, docker: Any, cut: Any, eventually: Any, back_to_normal: Any
) -> None:
    if direction == "both":
        network = hosts.network("clients")
        hand_over(lambda: docker("network", "disconnect", network, hosts.container("node1")))
        docker("network", "connect", "--alias", "node1", network, hosts.container("node1"))
    else:
        ends = ("decode2", "node1") if direction == "to host 1" else ("node1", "decode2")
        hand_over(lambda: cut(*ends, "clients"))
        cut.mend()
    eventually(lambda: whole(hand_over()), "prompts are handed over again")
    back_to_normal()


def test_prefill_dies_with_its_answer(
    hosts: Any, prefill: Any, decode: Any, docker: Any, back_to_normal: Callable[[], None]
) -> None:
    prompt = next(NUMBERS)
    answer = prefill.answer(prompt, transfer={"do_remote_decode": True})
    docker("exec", hosts.container("engine1"), "python", "-c", f"import os; os.kill({answer['pid']}, 9)")
    right = decode.answer(prompt, plain=True)["tokens"]
    assert decode.answer(prompt, transfer=answer["ticket"])["tokens"] == right
    back_to_normal()
