"""What the proxy reads in, and writes into, bodies of requests and answers."""

from __future__ import annotations

import json

import pytest

from kvstore.connector.proxy.messages import (
    MOST_EVENT_BYTES,
    EventKind,
    EventSplitter,
    decode_request,
    has_several_prompts,
    kind_of,
    parse_request,
    prefill_request,
    ticket_of,
)
from kvstore.errors import FormatError, InvalidRequestError, LimitExceededError

ASKED = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 100,
    "min_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 3,
    "best_of": 4,
    "logprobs": 2,
    "temperature": 0.7,
    "of_tomorrow": {"deep": [1, None]},
    "kv_transfer_params": {"kvstore_store": False, "ticket": "forged", "do_remote_prefill": True},
}


def test_prefill_is_asked_for_one_token_of_the_same_prompt():
    assert prefill_request(ASKED) == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "stream": False,
        "n": 1,
        "temperature": 0.7,
        "of_tomorrow": {"deep": [1, None]},
        "kv_transfer_params": {"kvstore_store": False, "do_remote_decode": True},
    }
    chat = prefill_request({"messages": [], "max_completion_tokens": 9})
    assert (chat["max_tokens"], chat["max_completion_tokens"]) == (1, 1)


def test_decode_is_asked_what_the_client_asked_and_gets_the_ticket():
    asked = decode_request(ASKED, {"do_remote_prefill": True, "ticket": "t"})
    assert asked.pop("kv_transfer_params") == {"kvstore_store": False, "do_remote_prefill": True, "ticket": "t"}
    assert asked == {key: value for key, value in ASKED.items() if key != "kv_transfer_params"}


@pytest.mark.parametrize(
    ("prompt", "several"),
    [
        ("a", False),
        (["a"], False),
        ([1, 2], False),
        ([[1, 2]], False),
        ([], False),
        (["a", "b"], True),
        ([[1], [2]], True),
    ],
)
def test_prompts_that_are_several(prompt, several):
    assert has_several_prompts({"prompt": prompt}) is several
    assert not has_several_prompts({"messages": [{}, {}]})


def test_a_ticket_that_the_client_brought_along_goes_nowhere():
    assert decode_request(ASKED, None)["kv_transfer_params"] == {"kvstore_store": False}
    assert "kv_transfer_params" not in decode_request({"kv_transfer_params": {"ticket": "forged"}}, None)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"temperature": NaN}', b'{"kv_transfer_params": 1}', b"\xff"])
def test_what_is_no_request_is_refused(body):
    with pytest.raises(InvalidRequestError):
        parse_request(body)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {}}', b'{"kv_transfer_p']
)
def test_an_answer_without_a_ticket_has_none(answer):
    with pytest.raises(FormatError):
        ticket_of(answer)


def test_a_ticket_has_a_limit():
    assert ticket_of(b'{"kv_transfer_params": {"ticket": "t"}}') == {"ticket": "t"}
    with pytest.raises(FormatError, match="longer than"):
        ticket_of(json.dumps({"kv_transfer_params": {"ticket": "t" * 70_000}}).encode())


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_events_come_whole_however_they_are_cut(end, size):
    events = [b"data: {}" + end, b": ping" + end, b"event: x\ndata: 1" + end]
    data = b"".join(events) + b"data: half"
    splitter = EventSplitter()
    got = [event for start in range(0, len(data), size) for event in splitter.feed(data[start : start + size])]
    assert got == events


def test_an_event_has_a_limit():
    splitter = EventSplitter()
    with pytest.raises(LimitExceededError):
        for _ in range(MOST_EVENT_BYTES // (1 << 20) + 1):
            splitter.feed(b"x" * (1 << 20))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, EventKind.EMPTY),
        ({"choices": [], "usage": {}}, EventKind.EMPTY),
        ({"choices": [{"text": ""}]}, EventKind.EMPTY),
        ({"choices": [{"text": "a"}]}, EventKind.TOKEN),
        ({"choices": [{"delta": {}}, {"delta": {"content": "a"}}]}, EventKind.TOKEN),
        ({"choices": [{"delta": {"tool_calls": [{}]}}]}, EventKind.TOKEN),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, EventKind.TOKEN),
        ({"error": {"code": 500}}, EventKind.FAILED),
        ({"error": "dead"}, EventKind.FAILED),
        ({"error": {"code": 400}}, EventKind.TOKEN),
        ({"of_tomorrow": 1}, EventKind.TOKEN),
    ],
)
def test_what_an_event_says(fields, kind):
    assert kind_of(b"data: " + json.dumps(fields).encode() + b"\n\n") is kind


def test_what_an_event_says_that_has_no_object():
    assert kind_of(b": ping\n\n") is EventKind.EMPTY
    assert kind_of(b"data: [DONE]\r\n\r\n") is EventKind.DONE
    assert kind_of(b"data: {broken\n\n") is EventKind.TOKEN
    assert kind_of(b"data: 7\n\n") is EventKind.TOKEN
