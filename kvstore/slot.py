"""A slot of the arena and the page in it: its states, as a table of what may happen to it.

A page is absent, or in a slot that went through these states::

              reserve              publish                 retire
    (free) ───────────► RESERVED ───────────► RESIDENT ───────────► RETIRED
       ▲                 │    │ lapse            │ retire,             │ last hold
       │           abort │    ▼                  │ no holds            │ ends
       ├─────────────────┘  LAPSED               │                     │
       │       writer let go  │                  │                     │
       └──────────────────────┴──────────────────┴─────────────────────┘

* RESERVED: somebody is writing the payload; nobody finds it. Several slots may be reserved for one key.
* LAPSED: the writer is past its deadline. The page can't be published any more, and the slot is nobody else's until
  the writer has let go or is dead: it may still be writing.
* RESIDENT: complete and findable. Holds keep it where it is while somebody copies from it.
* RETIRED: not findable any more, but somebody still copies from it.

``TRANSITIONS`` is that picture as a table; every change goes through it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SlotState(enum.Enum):
    """Where a slot stands; see the picture above."""

    FREE = "free"
    RESERVED = "reserved"
    LAPSED = "lapsed"
    RESIDENT = "resident"
    RETIRED = "retired"


class Event(enum.Enum):
    """What can happen to a slot."""

    RESERVE = "reserve"
    PUBLISH = "publish"
    ABORT = "abort"
    LAPSE = "lapse"
    LET_GO = "let go"
    RETIRE_UNHELD = "retire, no holds"
    RETIRE_HELD = "retire, held"
    LAST_HOLD_ENDED = "last hold ended"


TRANSITIONS: dict[tuple[SlotState, Event], SlotState] = {
    (SlotState.FREE, Event.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, Event.PUBLISH): SlotState.RESIDENT,
    (SlotState.RESERVED, Event.ABORT): SlotState.FREE,
    (SlotState.RESERVED, Event.LAPSE): SlotState.LAPSED,
    (SlotState.LAPSED, Event.LET_GO): SlotState.FREE,
    (SlotState.RESIDENT, Event.RETIRE_UNHELD): SlotState.FREE,
    (SlotState.RESIDENT, Event.RETIRE_HELD): SlotState.RETIRED,
    (SlotState.RETIRED, Event.LAST_HOLD_ENDED): SlotState.FREE,
}


@dataclass(slots=True, eq=False)
class Slot:
    """A slot in use and the page in it."""

    frame: int
    frames: int
    key: bytes
    """64 bytes: fingerprint and block hash."""
    namespace: int
    length: int
    owner: int = 0
    """The client that may write into it; 0: the node's own threads."""
    state: SlotState = SlotState.FREE
    holds: int = 0
    used: int = 0
    """When it was used last, on the catalog's clock."""
    dirty: bool = False
    checksum: int | None = None
    parent: bytes = b""
    """The key of the page before it in its chain; empty where nobody says."""
    pinned: bool = False
    at_risk: bool = False
    """Whether it must not leave before a tier below has it: it is written for, or dirty in, a durable namespace."""

    @property
    def may_leave(self) -> bool:
        """Whether eviction may propose it."""
        return self.state is SlotState.RESIDENT and not self.pinned and not self.at_risk

    def apply(self, event: Event) -> None:
        """Follow the table.

        Raises:
            AssertionError: the event can't happen in this state.
        """
        after = TRANSITIONS.get((self.state, event))
        assert after is not None, f"slot {self.frame}: {event.value!r} can't happen to a {self.state.value} slot"
        self.state = after
