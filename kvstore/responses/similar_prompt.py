"""What of a request may differ from one that was answered, and what of an answer is compared. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvstore.responses.policy import Caller
from kvstore.responses.request import CacheableRequest

MOST_PROMPT = 4000
"""Characters of a prompt that is compared."""
_NOT_WITH = ("tools", "tool_choice", "logprobs", "top_logprobs")


@dataclass(frozen=True, slots=True)
class SimilarPrompt:
    """The last user turn of a request, and all of the rest."""

    caller: Caller
    context: str
    """Equal for requests in which the last user turn alone differs."""
    text: str


def similar_prompt(request: CacheableRequest, caller: Caller) -> SimilarPrompt | None:
    """What may be answered from a similar request; None: this one may not, as :func:`not_compared` says."""
    if not_compared(request) is not None:
        return None
    path, said = json.loads(request.canonical)
    last = said["messages"].pop()
    return SimilarPrompt(caller, json.dumps([path, said, caller.scope]), last["content"])


def not_compared(request: CacheableRequest) -> str | None:
    """Why a request is answered by an equal one alone, for people; None: it may be by a similar one."""
    if not request.chat:
        return "it is no chat, which has turns"
    _, said = json.loads(request.canonical)
    messages = said["messages"]
    if (given := next((name for name in _NOT_WITH if said.get(name)), None)) is not None:
        return f"it has {given}"
    if said.get("n") not in (None, 1):
        return f"it asks for {said['n']} choices"
    if not isinstance(messages, list) or not all(_is_text(message) for message in messages):
        return "a turn of it is more than text"
    last = messages[-1]
    if last["role"] != "user" or set(last) != {"role", "content"}:
        return "it does not end with a user's turn of text alone"
    if not 0 < len(last["content"]) <= MOST_PROMPT:
        return f"its last turn has {len(last['content'])} characters, and 1 to {MOST_PROMPT} are compared"
    return None


def _is_text(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("content"), str) and isinstance(message.get("role"), str)
    )


def text_of(answer: dict[str, Any]) -> str | None:
    """What a chat's only choice says; None: something else."""
    try:
        (choice,) = answer["choices"]
        content = choice["message"]["content"]
    except (LookupError, TypeError, ValueError):
        return None
    return content if isinstance(content, str) else None
