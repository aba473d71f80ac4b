"""Two hosts that share object storage and nothing else: what the first one's engine stored, the second one's hits when
the first host is gone, with its disk and its arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deployment import Deployment, running
from relays import EngineClient, PageClient

PROMPTS = range(4)
PAGES = 20
"""Full pages of each prompt's 323 tokens, 8 of them common to all."""
NEW = 8 + 12 * len(PROMPTS)


@pytest.fixture(params=["all", "used"])
def shared_bucket(
    request: pytest.FixtureRequest, docker: Callable[..., str], variables: dict[str, str]
) -> Iterator[tuple[Deployment, str]]:
    """The hosts, and what their nodes put into object storage."""
    files = ["tests/compose/objects.yml"]
    with running(Deployment("kvstore-test-objects", files, variables | {"OBJECTS_ADMIT": request.param})) as deployment:
        yield deployment, request.param


def test_what_an_engine_stored_is_hit_when_its_host_is_gone(
    shared_bucket: tuple[Deployment, str], docker: Callable[..., str], eventually: Callable[..., None]
) -> None:
    hosts, admitted = shared_bucket
    client, engine = PageClient(hosts, "engine1"), EngineClient(hosts, "engine1")
    right = [engine.answer(prompt, plain=True)["tokens"] for prompt in PROMPTS]
    assert [engine.answer(prompt)["tokens"] for prompt in PROMPTS] == right
    eventually(lambda: client.counters("arena")["stored"] == NEW, "all pages are stored")
    if admitted == "used":
        assert client.counters("objects")["stored"] == 0, "nobody has used them again"
        another = EngineClient(hosts, "engine1")
        assert [another.answer(prompt)["tokens"] for prompt in PROMPTS] == right
    eventually(lambda: client.counters("objects")["stored"] == NEW, "all pages are in object storage")
    destroy_host(hosts, docker, "1")

    other, there = PageClient(hosts, "engine2"), EngineClient(hosts, "engine2")
    assert other.counters("arena")["stored"] == 0
    eventually(lambda: other.counters("objects")["pages"] == NEW, "the other host's node has heard of them")
    answers: list[dict[str, Any]] = [there.answer(prompt) for prompt in PROMPTS]
    assert [answer["tokens"] for answer in answers] == right
    for answer in answers:
        assert answer["hit"] + answer["loaded"] == PAGES * 16
    assert other.counters("objects")["hit"] == NEW
    assert other.counters("objects")["missed"] == other.counters("arena")["stored"] == 0


def destroy_host(hosts: Deployment, docker: Callable[..., str], number: str) -> None:
    """A host with all that it has: containers, memory, disk."""
    docker("rm", "--force", hosts.container(f"engine{number}"), hosts.container(f"node{number}"))
    docker("volume", "rm", f"{hosts.project}_run{number}", f"{hosts.project}_disk{number}")
