"""What is thought of a caller's prompts before any were compared."""

from __future__ import annotations

from kvstore.responses.semantic.decision import Outcome
from kvstore.responses.semantic.guards import Likeness

_ENTRIES = 160
"""Without a wrong one they prove 1.9 % at most: enough for a bound of 2 %, too few to go on behind a wrong one."""


def beginning() -> list[Outcome]:
    """Outcomes that stand for what prompts showed that guards had not seen: of the same text that was asked for in
    another way, 2 of 565 entries were wrong, 1.1 % at most. Of no other kind of pairs was so little shown; these begin
    with nothing.

    They are of the least similarity: how similar such pairs are says nothing of whether they are right."""
    return [Outcome(f"beginning {number}", Likeness.SAME_TEXT, 0.0, True) for number in range(_ENTRIES)]
