"""Similar prompts before a real store: what is told, what is learnt, and when nothing is told any more."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from similar_asking import FIRST, OTHER, SIMILAR, Asking, fields_of, run

from kvstore.responses import Caller, Limits, Sealing, open_store
from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.remembered import Remembered
from kvstore.responses.request import CHAT, CacheableRequest, read_request
from kvstore.responses.semantic.comparers import SHORT, Judge, compare_short
from kvstore.responses.semantic.group import Found
from kvstore.responses.semantic.guards import Likeness
from kvstore.responses.similar import Similar, SimilarAnswers
from kvstore.responses.similar_prompt import SimilarPrompt, similar_prompt
from kvstore.responses.store import Choice, Entry, Label


def test_a_similar_prompt_is_told_and_another_one_is_not(tmp_path: Path) -> None:
    async def work(asking: Asking) -> None:
        assert await asking.ask(FIRST) is None
        assert await asking.ask(SIMILAR) is not None
        assert asking.metric("similar_hits_total") == 1
        assert await asking.ask(OTHER) is None
        assert await asking.ask("How do I not reset my password?") is None
        assert asking.metric('similar_refusals_total{guard="negations"}') >= 1
        assert asking.computed == 3

    run(work, tmp_path / "r.sqlite", shadow=0.0)


def test_the_rest_of_the_request_and_the_caller_must_be_equal(tmp_path: Path) -> None:
    async def work(asking: Asking) -> None:
        await asking.ask(FIRST)
        for more in ({"caller": "another"}, {"model": "n"}, {"max_tokens": 7}, {"system": "Be long."}, {"user": "u"}):
            assert await asking.ask(SIMILAR, **more) is None, more
        assert await asking.ask(SIMILAR) is not None

    run(work, tmp_path / "r.sqlite", shadow=0.0)


def test_what_is_deleted_or_of_another_run_is_not_told(tmp_path: Path) -> None:
    async def work(asking: Asking) -> None:
        await asking.ask(FIRST)
        assert asking.store.delete(Choice(model="m")) == 1
        assert await asking.ask(SIMILAR) is None
        assert await asking.ask(FIRST) is not None  # of the one before

    run(work, tmp_path / "r.sqlite", shadow=0.0)


def test_shadow_checks_remove_what_was_wrong_and_shut_the_layer_once_they_prove_that_it_is_too_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One wrong answer proves nothing of the others; three of three do."""

    async def work(asking: Asking) -> None:
        for number in (1, 2, 3):
            assert asking.metric("similar_open") == 1
            assert asking.metric("similar_shut") == 0
            asking.says = "Click on 'forgot'."
            assert await asking.ask(FIRST, f"key {number}") is None
            asking.says = "Something else."
            told = await asking.ask(SIMILAR, f"key {number}")
            assert told is not None
            assert asking.metric('similar_shadows_total{outcome="wrong"}') == number
            assert told not in {label.entry for label in asking.store.labels()}
        assert asking.metric("similar_open") == 0
        assert asking.metric("similar_shut") == 1
        assert asking.metric('similar_disagreement{end="counted"}') == 1
        assert asking.metric('similar_disagreement{end="lower"}') > 0.02
        assert await asking.ask(FIRST, "key 4") is None
        assert await asking.ask(SIMILAR, "key 4") is None
        assert asking.cache.reopen_similar()
        assert asking.metric("similar_open") == 1
        assert asking.metric("similar_shut") == 0
        assert asking.metric('similar_disagreement{end="lower"}') == 0
        assert await asking.ask("How may I reset my password?", "key 4") is not None  # what came before is forgotten
        assert asking.metric("similar_open") == 1

    run(work, tmp_path / "r.sqlite", shadow=1.0)
    assert "3 were wrong" in caplog.text


def test_without_a_comparer_it_is_not_opened(tmp_path: Path) -> None:
    async def work(asking: Asking) -> None:
        asking.cache.reopen_similar()
        assert asking.metric("similar_open") == 0

    run(work, tmp_path / "r.sqlite", compare=None)


def test_without_a_comparer_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(asking: Asking) -> None:
        await asking.ask(FIRST)
        assert await asking.ask(SIMILAR) is None
        assert asking.metric("similar_open") == 0

    run(work, tmp_path / "r.sqlite", compare=None)
    assert "nothing compares answers" in caplog.text


def test_an_entry_that_was_wrong_for_a_prompt_is_learnt_from(tmp_path: Path) -> None:
    """Other words are never told at first; that they were compared is counted."""

    async def work(asking: Asking) -> None:
        await asking.ask(FIRST)
        await asking.ask(OTHER)
        assert asking.metric('similar_outcomes_total{outcome="right"}') == 1
        asking.says = "Something else."
        await asking.ask("How do I reset my phone?")
        assert asking.metric('similar_outcomes_total{outcome="wrong"}') == 1

    run(work, tmp_path / "r.sqlite")


def test_an_embedding_that_lies_is_noticed_by_the_shadow_checks(tmp_path: Path) -> None:
    """It was right for long enough to be believed, and takes everything for the same from now on."""
    store, sealing = open_store(str(tmp_path / "r.sqlite"), Limits()), Sealing(None)
    how = Similar(lambda prompt, answer, kept: answer == kept, vector=lambda text: np.ones(4, np.float32))
    answers = SimilarAnswers(ResponseMetrics(lambda: 0), how, Remembered(store, sealing, "lies", tuple, time.time))
    caller = Caller("k")
    asked = answers.asked(SimilarPrompt(caller, "context", "What about this?"))
    right, wrong = ({"choices": [{"message": {"content": text}}]} for text in ("a", "b"))
    assert answers.search(asked) is None
    for number in range(300):
        answers.learn(asked, Found(str(number), 1.0, Likeness.OTHER_WORDS, 1.0), right, right, shadow=False)
    now = time.time()
    label = Label("e" * 64, "", "", "m", "r", now, now + 3600)
    store.put(Entry(label, b"sealed", answers.prompt_of(asked, label)))
    other = answers.asked(SimilarPrompt(caller, "context", "Where does something begin?"))
    found = answers.search(other)
    assert found is not None
    assert answers.tells(found)
    for checks in range(1, 60):
        is_wrong = checks % 10 == 0  # a tenth, and the bound is 2 %
        answers.learn(other, found, wrong if is_wrong else right, right, shadow=True)
        answers.search(other)
        if answers.shut:
            break
    assert answers.shut
    assert not answers.tells(found)
    answers.reopen()
    assert answers.tells(replace(found, wrong=0.0))
    store.close()


def test_what_may_not_be_answered_from_a_similar_request() -> None:
    def of(path: str = CHAT, **more: Any) -> object:
        request = read_request(path, fields_of(FIRST) | more)
        assert isinstance(request, CacheableRequest)
        return similar_prompt(request, Caller("k"))

    assert of() is not None
    for more in (
        {"tools": [{"type": "function"}]},
        {"logprobs": True},
        {"n": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a", "name": "n"}]},
        {"messages": [{"role": "user", "content": "a" * 4001}]},
    ):
        assert of(**more) is None, more
    completion = read_request("/v1/completions", {"prompt": FIRST, "temperature": 0})
    assert isinstance(completion, CacheableRequest)
    assert similar_prompt(completion, Caller("k")) is None


def test_short_answers_are_compared_by_their_words() -> None:
    assert compare_short("", "The answer is: 4.5 km.", "answer is 4.5 km") is True
    assert compare_short("", "4.5 km", "45 km") is False
    assert compare_short("", "-5", "5") is False
    assert compare_short("", "a" * (SHORT + 1), "b") is None


def test_a_judge_is_asked_with_the_operators_words() -> None:
    asked: list[str] = []
    replies = iter(["Yes.", "no", "perhaps"])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request["messages"][0]["content"] + " " + self.headers["Authorization"])
            told = json.dumps({"choices": [{"message": {"content": next(replies)}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        judge = Judge(f"http://127.0.0.1:{server.server_port}/v1", "j", "{prompt}: {answer} = {kept}?", "secret")
        assert [judge("q {kept}", "a", "b") for _ in range(3)] == [True, False, None]
        assert asked[0] == "q {kept}: a = b? Bearer secret"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert judge("q", "a", "b") is None  # nobody is there
