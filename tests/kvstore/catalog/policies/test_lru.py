"""The order in which pages leave."""

from kvstore.catalog.policies import LeastRecentlyUsed


def order(policy: LeastRecentlyUsed) -> list[int]:
    return list(policy.victims())


def test_the_oldest_use_leaves_first() -> None:
    policy = LeastRecentlyUsed()
    for slot in (1, 2, 3):
        policy.insert(slot, b"%d" % slot)
    policy.touch([1])
    assert order(policy) == [2, 3, 1]


def test_within_one_use_the_tail_leaves_before_the_head() -> None:
    policy = LeastRecentlyUsed()
    for slot in range(5):
        policy.insert(slot, b"%d" % slot)
    policy.touch([1, 2, 3])
    assert order(policy) == [0, 4, 3, 2, 1]


def test_looking_at_the_victims_changes_nothing() -> None:
    policy = LeastRecentlyUsed()
    for slot in (1, 2):
        policy.insert(slot, b"%d" % slot)
    assert next(policy.victims()) == 1
    assert order(policy) == [1, 2]


def test_what_left_is_no_victim() -> None:
    policy = LeastRecentlyUsed()
    for slot in (1, 2, 3):
        policy.insert(slot, b"%d" % slot)
    policy.remove(2)
    policy.remove(2)
    policy.touch([2, 3, 1])
    assert order(policy) == [1, 3]


def test_a_slot_that_is_used_again_is_new() -> None:
    policy = LeastRecentlyUsed()
    for slot in (1, 2, 1):
        policy.insert(slot, b"%d" % slot)
    assert order(policy) == [2, 1]
