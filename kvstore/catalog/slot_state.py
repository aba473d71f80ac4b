"""The states of a slot of the arena, as a table of what may happen to it.

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
from typing import TypeAlias

Slot: TypeAlias = int
"""A slot in use, by its number: its place in the columns of :class:`kvstore.catalog.slot_table.SlotTable`."""


class SlotState(enum.IntEnum):
    """Where a slot stands; see the picture above."""

    FREE = 0
    RESERVED = 1
    LAPSED = 2
    RESIDENT = 3
    RETIRED = 4


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


TRANSITIONS: dict[tuple[int, Event], SlotState] = {
    (SlotState.FREE, Event.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, Event.PUBLISH): SlotState.RESIDENT,
    (SlotState.RESERVED, Event.ABORT): SlotState.FREE,
    (SlotState.RESERVED, Event.LAPSE): SlotState.LAPSED,
    (SlotState.LAPSED, Event.LET_GO): SlotState.FREE,
    (SlotState.RESIDENT, Event.RETIRE_UNHELD): SlotState.FREE,
    (SlotState.RESIDENT, Event.RETIRE_HELD): SlotState.RETIRED,
    (SlotState.RETIRED, Event.LAST_HOLD_ENDED): SlotState.FREE,
}
