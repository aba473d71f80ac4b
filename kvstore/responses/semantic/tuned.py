"""What is known of the lexical embedding before a place has outcomes of its own."""

from __future__ import annotations

import json
from importlib.resources import files

from kvstore.responses.semantic.decision import Outcome
from kvstore.responses.semantic.guards import Likeness

FILE = "lexical_outcomes.json"


def tuned_outcomes() -> list[Outcome]:
    """Outcomes of the prompts that guards and embedding were tuned on, each intent as one entry. They are made by
    ``benchmarks/similar/evaluate.py --learn``."""
    text = files(__package__).joinpath(FILE).read_text()
    return [
        Outcome(f"tuned {intent}", Likeness(likeness), similarity, right)
        for intent, likeness, similarity, right in json.loads(text)
    ]
