"""LRU and S3-FIFO against plain reimplementations of what they are documented to do."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.catalog.policies import S3FIFO, LeastRecentlyUsed

Step = tuple[str, list[int]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "use", "touch", "remove", "leave"]),
        st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),
    ),
    max_size=60,
)


def key(number: int) -> bytes:
    return number.to_bytes(64, "big")


@given(STEPS)
def test_least_recently_used(steps: list[Step]) -> None:
    policy = LeastRecentlyUsed()
    model: list[int] = []
    for what, slots in steps:
        if what == "insert":
            for slot in slots:
                policy.insert(slot, key(slot))
            model = [slot for slot in model if slot not in slots] + slots
        elif what == "remove":
            policy.remove(slots[0])
            model = [slot for slot in model if slot != slots[0]]
        elif what == "leave":
            policy.remove(next(policy.victims(), 99))
            model = model[1:]
        else:
            (policy.use if what == "use" else policy.touch)(slots)
            used = [slot for slot in reversed(slots) if slot in model]
            model = [slot for slot in model if slot not in used] + used
        assert list(policy.victims()) == model


@given(STEPS)
def test_s3_fifo(steps: list[Step]) -> None:
    """Slot ``n`` always holds key ``n``."""
    policy = S3FIFO()
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    uses: dict[int, int] = {}

    def leave(slot: int) -> None:
        if slot in small:
            small.remove(slot)
            ghosts.append(slot)
            # As many as there are pages left.
            del ghosts[: max(0, len(ghosts) - len(small) - len(main))]
        elif slot in main:
            main.remove(slot)
        uses.pop(slot, None)

    def from_small() -> bool:
        return bool(small) and (not main or 10 * len(small) >= len(small) + len(main))

    for what, slots in steps:
        if what == "insert":
            for slot in slots:
                policy.insert(slot, key(slot))
                leave(slot)
                uses[slot] = 0
                if slot in ghosts:
                    ghosts.remove(slot)
                    main.append(slot)
                else:
                    small.append(slot)
        elif what == "remove":
            policy.remove(slots[0])
            leave(slots[0])
        elif what == "use":
            policy.use(slots)
            for slot in slots:
                if slot in uses:
                    uses[slot] = min(3, uses[slot] + 1)
        elif what == "leave":
            victim = next(policy.victims(), None)
            while small or main:
                queue = small if from_small() else main
                first = queue[0]
                if not uses[first]:
                    break
                main.append(queue.pop(0))
                uses[first] = 0 if queue is small else uses[first] - 1
            front = (small if from_small() else main)[:1]
            assert front == ([] if victim is None else [victim])
            if victim is not None:
                policy.remove(victim)
                leave(victim)
        assert {slot for slot in uses if slot in policy._main} == set(main)
