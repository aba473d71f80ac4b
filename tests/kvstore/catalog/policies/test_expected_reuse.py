"""What expected reuse learns."""

import tracemalloc

from kvstore.catalog.policies import ExpectedReuse, LeastRecentlyUsed
from kvstore.catalog.policies.ghosts import Ghost, Ghosts
from kvstore.cli.bench.replay import Replay, hit_blocks


def key(number: int) -> bytes:
    return number.to_bytes(64, "big")


def test_before_anything_was_wanted_again_it_is_least_recently_used() -> None:
    """With pauses, so that ages fall into different bins."""
    learnt, plain = ExpectedReuse(), LeastRecentlyUsed()
    for slot in range(300):
        for policy in (learnt, plain):
            policy.insert(slot, key(slot))
            policy.touch([slot])
    assert list(learnt.victims()) == list(plain.victims())


def scans(rounds: int) -> list[tuple[int, ...]]:
    """Prompts that come again and again, at a distance that LRU does not bridge, between ones that never do."""
    prompts: list[tuple[int, ...]] = []
    fresh = 10_000
    for round_ in range(rounds):
        for each in range(10):
            again = round_ % 4 * 10 + each
            prompts.append((again * 3, again * 3 + 1, again * 3 + 2))
            prompts.append(tuple(range(fresh, fresh + 5)))
            fresh += 5
    return prompts


def test_it_learns_which_prompts_come_again() -> None:
    prompts = scans(200)
    learnt, plain = (hit_blocks(prompts, 150, policy) for policy in (ExpectedReuse(), LeastRecentlyUsed()))
    assert plain == 0
    assert learnt > 0.4 * 200 * 10 * 3, "a fifth goes by before the order is tried at all"


def test_it_unlearns_what_is_no_longer_so() -> None:
    """The prompts that came again stop; others, of another length, do now."""
    before = scans(200)
    after = [
        tuple(1_000_000 + block for block in prompt)
        if len(prompt) == 5
        else tuple(2_000_000 + place for place in prompt)
        for prompt in scans(200)
    ]
    cache = Replay(ExpectedReuse(), 150)
    for prompt in before:
        cache.request(prompt)
    assert sum(map(cache.request, after)) > 0.4 * 200 * 10 * 3


def test_a_page_in_use_by_a_longer_prompt_waits_for_its_tail() -> None:
    policy = ExpectedReuse()
    for slot, parent in ((1, None), (2, 1)):
        policy.insert(slot, key(slot), parent)
    policy.touch([1, 2])
    policy.insert(3, key(3), 2)
    policy.touch([3])
    for _ in range(300):
        policy.use([3])  # the tail alone, so that by its own record it would outlive the head
    assert list(policy.victims()) == [3, 2, 1]


def test_a_page_whose_parent_was_taken_away_still_leaves() -> None:
    policy = ExpectedReuse()
    for slot, parent in ((1, None), (2, 1), (3, 2)):
        policy.insert(slot, key(slot), parent)
    policy.touch([1, 2, 3])
    policy.remove(2)
    assert list(policy.victims())[-2:] in ([3, 1], [1, 3])
    policy.insert(2, key(2), 1)
    policy.touch([1, 2, 3])
    assert list(policy.victims()) == [3, 2, 1]


def test_only_what_it_chose_to_let_go_is_remembered() -> None:
    policy = ExpectedReuse()
    for lost, uses in ((False, 1), (True, 2)):
        policy.insert(1, key(1))
        policy.remove(1, lost=lost)
        policy.insert(1, key(1))
        assert policy._uses[policy._rows[1]] == uses
        policy.remove(1, lost=False)


def test_an_empty_order_is_small() -> None:
    """There is one for each size of slot, and one for each namespace with a quota."""
    tracemalloc.start()
    policy = ExpectedReuse()
    policy.insert(1, key(1))
    policy.touch([1])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 32 << 10


def test_pages_come_and_go_in_bounded_memory() -> None:
    """Rows, queues and what they name stay as many as there are pages, whatever is done to them."""
    policy = ExpectedReuse()
    for slot in range(100):
        policy.insert(slot, key(slot))
    for number in range(5000):
        slot = number * 37 % 100
        policy.use([slot])
        policy.touch([slot])
        if number % 3 == 0:
            policy.remove(slot)
            policy.insert(slot, key(slot))
    entries = sum(len(queue) for queue in policy._queues)
    assert len(policy._slot) <= 101 + 15, "rows are made sixteen at a time"
    assert entries <= (2 * 100 + 65) * len([queue for queue in policy._queues if queue])


def test_ghosts_are_remembered_once_and_kept_when_their_memory_grows() -> None:
    ghosts = Ghosts(16)
    ghosts.add(5, Ghost(7, 2, 1000))
    ghosts.add(5 + 16, Ghost(8, 3, 2000))
    assert ghosts.take(5) is None, "the newer one is in its place"
    ghosts.add(6, Ghost(9, 4, 3000))
    larger = ghosts.grown()
    assert larger.take(5 + 16) == (5 + 16, Ghost(8, 3, 2000))
    assert larger.take(6) == (6, Ghost(9, 4, 3000))
    assert larger.take(6) is None
