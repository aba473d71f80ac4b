"""Whether two answers say the same: by an operator's judge, or by their words where they are short. They block.

A comparer returns None where it can't tell; nothing is learnt from that.
"""

from __future__ import annotations

import json
import re
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

Compare = Callable[[str, str, str], bool | None]
"""From the prompt that was asked, its answer, and the one that was kept."""

SHORT = 200
"""Characters of answers that are compared by their words."""
_JUDGE_SECONDS = 30.0
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_WORD = re.compile(r"[^\w.,:%$€£+\-/]+|[.,:](?!\d)")


def compare_short(prompt: str, answer: str, kept: str) -> bool | None:
    """Equal but for case, articles, blanks and punctuation; None: one of them is longer than :data:`SHORT`."""
    if max(len(answer), len(kept)) > SHORT:
        return None
    return _plain(answer) == _plain(kept)


def _plain(text: str) -> str:
    lowered = _ARTICLES.sub(" ", unicodedata.normalize("NFKC", text).lower())
    return " ".join(_NO_WORD.sub(" ", lowered).split())


@dataclass(frozen=True, slots=True)
class Judge:
    """A model behind an OpenAI-compatible endpoint that is asked whether two answers say the same.

    Its answer counts by its first word, yes or no; everything else, and every failure, is None.
    """

    url: str
    """Of the API, as ``http://127.0.0.1:8300/v1``."""
    model: str
    instructions: str
    """The operator's prompt, with ``{prompt}``, ``{answer}`` and ``{kept}`` where these belong."""
    api_key: str = ""

    def __call__(self, prompt: str, answer: str, kept: str) -> bool | None:
        """Ask it."""
        asked = self.instructions
        values = {"{prompt}": prompt, "{answer}": answer, "{kept}": kept}
        asked = re.sub(r"\{(?:prompt|answer|kept)\}", lambda found: values[found[0]], asked)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0,
            "max_tokens": 4,
        }
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(  # noqa: S310 - http or https, as the operator's flag was checked
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=_JUDGE_SECONDS) as response:  # noqa: S310
                said = json.loads(response.read(1 << 20))["choices"][0]["message"]["content"]
        except (OSError, ValueError, LookupError, TypeError, urllib.error.URLError):
            return None
        word = re.match(r"\W*(yes|no)\b", str(said).lower())
        return None if word is None else word[1] == "yes"
