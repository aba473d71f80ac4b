"""The protocol between node, readers, writer and restart (docs/architecture/arena.md), checked in all interleavings.

The model has one slot, which holds page A. Two readers look for pages; the node evicts A and lends the slot to a client
that writes page B; at any moment the node may be killed, and the next one takes the memory over and may store page C in
the slot; the writer may die, and a reader may pass its deadline and go on all the same. Each step touches shared memory
once. A reader's announcement waits in its processor's store buffer until it is flushed, as on x86-64; all other
orders are those of the program there.

Two promises are checked in every state:

* what a reader accepts is the page that it looked for, whole;
* nobody writes into the slot while a reader that is in time has found its page there.

The rules can be weakened one by one; each weakening must then break a promise, or the model would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

# Where a reader stands.
READ_EPOCH, ANNOUNCE, FENCE, PROBE, GENERATION, KEY, COPY_HEAD, COPY_TAIL, CHECK, OVER = range(10)
# What a node does next.
EVICT, CLEAR_WORD, ADVANCE, WAIT_FIRST, WAIT_SECOND, LEND, LENT, KEY_B, EVEN_B, WORD_B, IDLE, DEAD = range(12)
TAKE_OVER, REBUILD, WAIT_AGAIN_FIRST, WAIT_AGAIN_SECOND, HEAD_C, TAIL_C, KEY_C, EVEN_C, WORD_C = range(12, 21)
# Where the writer stands.
WAITING, WRITE_HEAD, WRITE_TAIL, ASK, ASKED, GONE = range(6)

NOWHERE = 0
"""In a line: reads nothing."""


class Rules(NamedTuple):
    """The protocol, and what can be left out of it."""

    odd_first: bool = True
    """Before a slot is lent, its generation is odd."""
    even_last: bool = True
    """A page's generation is even only when its key is written."""
    wait_for_readers: bool = True
    """A slot is lent when no reader reads at its epoch or before."""
    fence: bool = True
    """A reader looks only when its announcement can be seen."""
    compare_keys: bool = True
    """The header decides, not the word."""
    generation_before_key: bool = True
    """The generation is noted before the key is compared."""
    check_generation: bool = True
    """What was copied counts only if the generation is still the same."""
    new_generations: bool = True
    """A generation is never used twice."""
    quarantine: bool = True
    """A new node leaves a slot alone into which a living client may write."""
    odd_is_free: bool = True
    """A new node takes no slot for a page whose generation is odd."""
    epoch_goes_on: bool = True
    """A new node's epochs are behind those of the old one, and what is free waits for the readers that are there."""


class Reader(NamedTuple):
    """One reader, looking for one page."""

    target: str
    at: int = READ_EPOCH
    epoch: int = 0
    generation: int = 0
    head: str = ""
    buffered: bool = False
    """Whether its announcement can't be seen yet."""
    overdue: bool = False
    """Whether the node waits for it no longer."""


class State(NamedTuple):
    """Everything: shared memory, node, writer, readers."""

    readers: tuple[Reader, Reader]
    lines: tuple[int, int] = (NOWHERE, NOWHERE)
    head: str = "A"
    tail: str = "A"
    key: str = "A"
    generation: int = 2
    word: str = "A"
    owned: bool = False
    epoch: int = 1
    retired_at: int = 0
    """Of the node's own memory: when the slot's page left."""
    node: int = EVICT
    restarted: bool = False
    writer: int = WAITING
    broken: str = ""


def steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Everything that can happen next."""
    for number in (0, 1):
        for name, after in reader_steps(state, number, rules):
            yield f"reader {number}: {name}", after
    for name, after in node_steps(state, rules):
        yield f"node: {name}", after
    for name, after in writer_steps(state, rules):
        yield f"writer: {name}", after
    if not state.restarted:
        yield "the node is killed", state._replace(restarted=True, node=TAKE_OVER, retired_at=0)


def reader_steps(state: State, number: int, rules: Rules) -> Iterator[tuple[str, State]]:
    reader = state.readers[number]

    def to(at: int, **changes: object) -> State:
        readers = list(state.readers)
        readers[number] = reader._replace(at=at, **changes)
        return state._replace(readers=tuple(readers))

    def line(epoch: int) -> tuple[int, int]:
        return (epoch, state.lines[1]) if number == 0 else (state.lines[0], epoch)

    if reader.at == OVER:
        return
    if number == 0 and reader.at >= PROBE and not reader.overdue:
        yield "passes its deadline", to(reader.at, overdue=True)
    if reader.buffered:
        yield "its announcement is seen", to(reader.at, buffered=False)._replace(lines=line(reader.epoch))
    gone = to(OVER, buffered=False)._replace(lines=line(NOWHERE))
    second, third = (GENERATION, KEY) if rules.generation_before_key else (KEY, GENERATION)
    match reader.at:
        case 0:
            yield "reads the epoch", to(ANNOUNCE, epoch=state.epoch)
        case 1:
            yield "announces", to(FENCE if rules.fence else PROBE, buffered=True)
        case 2:
            if not reader.buffered:
                yield "goes on behind the fence", to(PROBE)
        case 3:
            yield "probes", to(second) if state.word == reader.target else gone
        case at if at == GENERATION:
            after = to(third if at == second else COPY_HEAD, generation=state.generation)
            yield "notes the generation", gone if state.generation % 2 else after
        case at if at == KEY:
            same = state.key == reader.target or not rules.compare_keys
            yield "compares the key", to(third if at == second else COPY_HEAD) if same else gone
        case 6:
            yield "copies the head", to(COPY_TAIL, head=state.head)
        case 7:
            yield "copies the tail", to(CHECK, head=reader.head + state.tail)
        case 8:
            accepted = state.generation == reader.generation or not rules.check_generation
            wrong = accepted and reader.head != reader.target * 2
            broken = f"accepts {reader.head} as {reader.target}" if wrong else state.broken
            yield "checks and ends", gone._replace(broken=broken)


def node_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    even = state.generation + 2 & ~1 if rules.new_generations else 2
    match state.node:
        case 0:
            generation = 3 if rules.odd_first else state.generation
            yield "evicts: odd", state._replace(node=CLEAR_WORD, generation=generation)
        case 1:
            yield "evicts: out of the index", state._replace(node=ADVANCE, word="")
        case 2:
            yield "moves the epoch on", state._replace(node=WAIT_FIRST, retired_at=state.epoch, epoch=state.epoch + 1)
        case at if at in (WAIT_FIRST, WAIT_SECOND, WAIT_AGAIN_FIRST, WAIT_AGAIN_SECOND):
            number = 0 if at in (WAIT_FIRST, WAIT_AGAIN_FIRST) else 1
            if passed(state, number) or not rules.wait_for_readers:
                yield f"waits no more for reader {number}", state._replace(node=at + 1)
        case 5:
            # Owner and odd generation lie in the header before the client knows.
            yield "lends", state._replace(node=LENT, owned=True, writer=WRITE_HEAD)
        case 6:
            if state.writer == ASKED:
                first = KEY_B if rules.even_last else EVEN_B
                yield "hears the writer", state._replace(node=first)
            if state.writer == GONE:
                yield "finds the writer dead", state._replace(node=DEAD, owned=False)
        case 7:
            yield "writes the key", state._replace(node=EVEN_B if rules.even_last else WORD_B, key="B", owned=False)
        case 8:
            yield "even", state._replace(node=WORD_B if rules.even_last else KEY_B, generation=even)
        case 9:
            yield "into the index", state._replace(node=IDLE, word="B", writer=GONE)
        case 12:
            epoch = state.epoch + 1 if rules.epoch_goes_on else 1
            yield "takes over: clears the index", state._replace(node=REBUILD, word="", epoch=epoch)
        case 13:
            if state.generation % 2 == 0 or not rules.odd_is_free:
                # What is here stays: nothing more happens to it.
                generation = state.generation + 1 & ~1
                yield "takes over: a page", state._replace(node=IDLE, word=state.key, generation=generation)
            elif not state.owned or state.writer == GONE or not rules.quarantine:
                retired_at = state.epoch - 1 if rules.epoch_goes_on else 0
                after = state._replace(node=WAIT_AGAIN_FIRST, owned=False, retired_at=retired_at)
                yield "takes over: free", after
        case at if at in (HEAD_C, TAIL_C):
            half = "head" if at == HEAD_C else "tail"
            yield f"stores C: {half}", written(state, half, "C")._replace(node=at + 1)
        case 18:
            yield "stores C: key", state._replace(node=EVEN_C, key="C")
        case 19:
            yield "stores C: even", state._replace(node=WORD_C, generation=even)
        case 20:
            yield "stores C: into the index", state._replace(node=IDLE, word="C")


def writer_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    if state.writer in (WRITE_HEAD, WRITE_TAIL):
        half = "head" if state.writer == WRITE_HEAD else "tail"
        yield f"writes the {half}", written(state, half, "B")._replace(writer=state.writer + 1)
    if state.writer == ASK:
        yield "asks to publish", state._replace(writer=ASKED)
    if state.writer in (WRITE_HEAD, WRITE_TAIL, ASK):
        yield "dies", state._replace(writer=GONE)


def passed(state: State, number: int) -> bool:
    """Whether the node need not wait for a reader."""
    line = state.lines[number]
    return line == NOWHERE or line > state.retired_at or state.readers[number].overdue


def written(state: State, half: str, page: str) -> State:
    """A half of the slot is written: by now nobody may rely on it."""
    disturbed = [reader for reader in state.readers if GENERATION <= reader.at <= CHECK and not reader.overdue]
    state = state._replace(**{half: page})
    return state._replace(broken=f"writes {page} under a reader of {disturbed[0].target}") if disturbed else state


def check(rules: Rules, targets: str, *, disturb: bool = True, timely: bool = False) -> tuple[list[str], int]:
    """Walk through every state.

    Args:
        rules: of the protocol.
        targets: the page that each reader looks for.
        disturb: whether it counts that a reader is written under.
        timely: leave out late readers and the restart.

    Returns:
        The shortest way to a broken promise, empty when none can be broken; and how many states were seen.
    """
    start = State((Reader(targets[0]), Reader(targets[1])))
    came: dict[State, tuple[State, str] | None] = {start: None}
    border = [start]
    while border:
        coming: list[State] = []
        for state in border:
            for name, after in steps(state, rules):
                if timely and ("deadline" in name or "killed" in name):
                    continue
                if not disturb and after.broken.startswith("writes"):
                    after = after._replace(broken="")
                if after in came:
                    continue
                came[after] = (state, name)
                if after.broken:
                    way, at = [after.broken], came[after]
                    while at is not None:
                        way.append(at[1])
                        at = came[at[0]]
                    return way[::-1], len(came)
                coming.append(after)
        border = coming
    return [], len(came)


@pytest.mark.parametrize("targets", ["AB", "AA", "AC"])
def test_no_interleaving_breaks_a_promise(targets: str) -> None:
    way, states = check(Rules(), targets)
    assert not way, "\n".join(way)
    assert states > 10_000


@pytest.mark.parametrize(
    ("weaker", "targets", "promise"),
    [
        ({"odd_first": False}, "AB", "accepts"),
        ({"even_last": False}, "AB", "accepts"),
        ({"compare_keys": False}, "AB", "accepts"),
        ({"generation_before_key": False}, "AB", "accepts"),
        ({"check_generation": False}, "AB", "accepts"),
        ({"new_generations": False}, "AB", "accepts"),
        ({"quarantine": False}, "AC", "accepts"),
        ({"odd_is_free": False}, "AB", "accepts"),
        ({"wait_for_readers": False}, "AB", "writes"),
        ({"fence": False}, "AB", "writes"),
        ({"epoch_goes_on": False}, "AB", "writes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_every_rule_is_needed(weaker: dict[str, bool], targets: str, promise: str) -> None:
    way, _ = check(Rules(**weaker), targets, disturb=promise == "writes")
    assert way, "the model does not see what this rule is for"
    assert way[-1].startswith(promise), "\n".join(way)


def test_generations_alone_keep_readers_from_wrong_bytes() -> None:
    """Epochs spare readers a miss, and let a device read slots directly; they are not what keeps bytes right."""
    way, _ = check(Rules(wait_for_readers=False), "AB", disturb=False)
    assert not way, "\n".join(way)


def test_without_deadlines_and_restarts_epochs_alone_would_do() -> None:
    """So the generation is the backstop: for readers that are late, and for what nobody thought of."""
    way, _ = check(Rules(check_generation=False), "AB", timely=True)
    assert not way, "\n".join(way)
