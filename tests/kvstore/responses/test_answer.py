"""Answers of streams at every chunk boundary, and what is not understood."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.connector.proxy.messages import EventSplitter
from kvstore.responses.answer import StreamRecorder, as_body, as_events, finished_body, read_answer
from kvstore.responses.policy import CacheControl, caller_of
from kvstore.responses.request import CHAT, COMPLETIONS, CacheableRequest, NotCacheable, read_request

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def stream(*choices: dict[str, Any], usage: bool = True, end: str = "\n\n") -> bytes:
    events = [HEAD | {"choices": [choice]} for choice in choices]
    events += [HEAD | {"choices": [], "usage": USAGE}] if usage else []
    return b"".join(f"data: {each}{end}".encode() for each in [*map(json.dumps, events), "[DONE]"])


def part(index: int = 0, end: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": end}


WHOLE = (part(role="assistant", content=""), part(content="häl"), part(content="lo"), part(end="stop"))


def test_a_stream_is_put_together_wherever_it_was_cut():
    content = stream(*WHOLE)
    expected = read_answer(content, True, True, 1 << 20)
    assert expected is not None
    assert expected["choices"][0]["message"] == {"role": "assistant", "content": "hällo"}
    assert "id" not in expected and "created" not in expected
    for place in range(len(content) + 1):
        splitter, recorder = EventSplitter(), StreamRecorder(True, 1 << 20)
        for piece in (content[:place], content[place:]):
            for event in splitter.feed(piece):
                recorder.add(event)
            if piece is content[:place] and place < len(content):
                assert recorder.finished() is None
        assert recorder.finished() == expected, place


def test_a_stream_without_its_last_byte_is_not_finished():
    content = stream(*WHOLE)
    end = content.index(b"data: [DONE]") + len(b"data: [DONE]")
    for length in range(end):
        assert read_answer(content[:length], True, True, 1 << 20) is None, length


@pytest.mark.parametrize(
    "choices",
    [
        (part(content="a"),),
        (part(content="a"), part(end="tool_calls")),
        (part(content="a", end="stop"), part(content="b")),
        (part(content="a", of_tomorrow="x"), part(end="stop")),
        (part(content=["a"]), part(end="stop")),
        (part(role="user"), part(end="stop")),
        (part(tool_calls=[{"index": 0}]), part(end="stop")),
        (part(content="a", end="stop"), part(1, content="b")),
        (part(content="a") | {"of_tomorrow": 1}, part(end="stop")),
        (part(content="a") | {"logprobs": [1]}, part(end="stop")),
        ({"index": 0, "text": "a"}, part(end="stop")),
    ],
)
def test_a_stream_that_is_not_understood_is_not_kept(choices):
    assert read_answer(stream(*choices), True, True, 1 << 20) is None


@pytest.mark.parametrize("tail", [b"data: {}\n\n", b"data: x\n\n", b'data: {"error": {"code": 500}}\n\n'])
def test_nothing_comes_behind_the_end_or_instead_of_an_event(tail):
    assert read_answer(stream(*WHOLE) + tail, True, True, 1 << 20) is None
    assert read_answer(tail + stream(*WHOLE), True, True, 1 << 20) is None


def test_a_stream_that_is_too_long_is_not_kept():
    content = stream(*WHOLE)
    assert read_answer(content, True, True, len(content) - 1) is None
    recorder = StreamRecorder(True, len(content) - 1)
    for event in EventSplitter().feed(content):
        recorder.add(event)
    assert recorder.finished() is None


def test_log_probabilities_reasoning_and_several_choices_go_there_and_back():
    logprobs = [{"content": [{"token": each, "logprob": -1.0}]} for each in "ab"]
    choices = (
        part(0, role="assistant", content=""),
        part(1, role="assistant", content=""),
        part(1, reasoning_content="hm"),
        part(0, content="a") | {"logprobs": logprobs[0]},
        part(0, content="b") | {"logprobs": logprobs[1]},
        part(1, content="c", end="length"),
        part(0, end="stop") | {"stop_reason": 7},
    )
    kept = read_answer(stream(*choices), True, True, 1 << 20)
    assert kept is not None
    first, second = kept["choices"]
    assert first["logprobs"] == {"content": [*logprobs[0]["content"], *logprobs[1]["content"]]}
    assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == ("ab", "stop", 7)
    assert (second["message"]["content"], second["message"]["reasoning_content"]) == ("c", "hm")
    events = as_events(kept, True, True)
    assert events is not None
    assert read_answer(events, True, True, 1 << 20)["choices"] == kept["choices"]
    body = as_body(kept, True)
    assert body is not None
    assert finished_body(body)["choices"] == kept["choices"]


def test_what_can_t_be_told_in_the_other_form_is_not_told_in_it():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    body = {"choices": [{"index": 0, "message": call, "finish_reason": "stop"}], "usage": USAGE}
    kept = finished_body(json.dumps(body).encode())
    assert as_events(kept, True, False) is None
    assert json.loads(as_body(kept, True))["choices"] == body["choices"]
    kept = read_answer(stream(*WHOLE, usage=False), True, True, 1 << 20)
    assert as_body(kept, True) is None
    assert as_events(kept, True, True) is None
    assert as_events(kept, True, False) is not None


def test_equal_requests_have_one_canonical_form_and_others_another():
    def form(path=CHAT, **fields):
        request = read_request(path, {"messages": ["x"], "prompt": "x", "temperature": 0} | fields)
        return request.canonical if isinstance(request, CacheableRequest) else request.reason

    base = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
    first, second = (read_request(CHAT, dict(items)) for items in (base.items(), reversed(base.items())))
    assert first == second
    forms = {first.canonical}
    for fields in ({"temperature": 0.0}, {"seed": 1}, {"seed": 2}, {"stop": []}, {"messages": [{"role": "user"}]}):
        forms.add(read_request(CHAT, base | fields).canonical)
    forms.add(read_request(COMPLETIONS, {"prompt": "x", "temperature": 0}).canonical)
    forms.add(read_request(COMPLETIONS, {"prompt": ["x"], "temperature": 0}).canonical)
    assert len(forms) == 8
    for order in ("ab", "ba"):  # in which an answer has them, too
        schema = {"properties": {name: {} for name in order}}
        forms.add(read_request(CHAT, base | {"response_format": schema}).canonical)
    assert len(forms) == 10
    assert form(CHAT, prompt="x") == "unknown_field"
    assert form("/v1/embeddings") == "path"
    assert read_request(CHAT, base | {"stream": True}).canonical == first.canonical


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no_prompt"),
        ({"prompt": ""}, "no_prompt"),
        ({"prompt": {}}, "no_prompt"),
        ({"prompt": "x", "stream": 1}, "unknown_field"),
        ({"prompt": "x", "stream_options": [1]}, "unknown_field"),
        ({"prompt": "x", "cache_salt": "s"}, "unknown_field"),
        ({"prompt": "x", "temperature": float("nan")}, "not_json"),
        ({"prompt": "x" * (1 << 20)}, "too_long"),
    ],
)
def test_why_a_request_is_not_cached(fields, reason):
    request = read_request(COMPLETIONS, fields)
    assert isinstance(request, NotCacheable)
    assert request.reason == reason


@pytest.mark.parametrize(
    ("part", "cached"),
    [
        ({"type": "text", "text": "https://a/b"}, True),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, True),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, True),
        ({"type": "image_url", "image_url": {"url": "https://a/b.png"}}, False),
        ({"type": "image_url", "image_url": "https://a/b.png"}, False),
        ({"type": "video_url", "video_url": {"url": "file:///a.mp4"}}, False),
        ({"audio_url": {}}, False),
    ],
)
def test_what_lies_at_an_address_is_not_taken_to_stay_as_it_is(part, cached):
    text = {"role": "user", "content": [{"type": "text", "text": "x"}, part]}
    request = read_request(CHAT, {"messages": [{"role": "system", "content": "x"}, text], "temperature": 0})
    assert isinstance(request, CacheableRequest) if cached else request.reason == "elsewhere"


@pytest.mark.parametrize(
    ("header", "control"),
    [
        ("", CacheControl()),
        ("No-Store", CacheControl(no_store=True)),
        ("no-cache, max-age=5", CacheControl(no_cache=True, max_age=5)),
        ("max-age=9,max-age=5", CacheControl(max_age=5)),
        ("max-age=-1, max-age=x, private", CacheControl()),
        ('max-age="7"', CacheControl(max_age=7)),
    ],
)
def test_cache_control_is_read(header, control):
    assert CacheControl.read(header) == control


def test_callers_who_differ_in_anything_that_tells_them_apart_share_nothing():
    tenants = {"a": "t", "b": "t", "c": "a"}
    headers: list[tuple[dict[str, str], str]] = [
        ({}, ""),
        ({"Authorization": "Bearer x"}, ""),
        ({"Authorization": "Basic x"}, ""),
        ({"api-key": "x"}, ""),
        ({"X-API-Key": "x"}, ""),
        ({"Cookie": "x"}, ""),
        ({"Authorization": "Bearer x", "OpenAI-Project": "p"}, ""),
        ({}, "certificate"),
        ({"Authorization": "Bearer a"}, ""),
        ({"authorization": "bearer c"}, ""),
    ]
    scopes = [caller_of(each, tenants, certificate).scope for each, certificate in headers]
    assert len(set(scopes)) == len(headers)
    assert caller_of({"AUTHORIZATION": "Bearer b"}, tenants).scope == ("tenant", "t") == scopes[8]
    assert caller_of({"Authorization": "Bearer tenant"}, {}).scope != ("tenant", "")
