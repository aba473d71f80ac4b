"""What a simulated node tells and offers Redis, and what that costs which shard."""

from __future__ import annotations

import pytest

from kvstore.cli.plan import redis_side
from kvstore.cli.plan.parts import Part, Rates, seconds_of, step_of
from kvstore.cli.plan.redis_side import RedisSide, server_of_entry
from kvstore.cli.plan.sharing import Sharing
from kvstore.store.write_back import MOST_UNSHARED_PAGES

PAGE = 64 << 10
PROMPT = tuple(range(100))


def test_what_was_used_again_and_again_is_told_once() -> None:
    sharing = Sharing(1 << 30, PAGE, 1)
    sharing.use(PROMPT, 3)
    sharing.use(PROMPT, 2)
    assert list(sharing.take_used()) == [0, 1, 2]
    assert not sharing


def test_what_waits_is_offered_once_and_what_left_the_arena_is_not() -> None:
    sharing = Sharing(1 << 30, PAGE, 1)
    sharing.offer(PROMPT, [1, 2, 3])
    sharing.offer(PROMPT, [3, 4])
    assert sharing.take({1, 3, 4}) == ([(PROMPT, [1, 3, 4])], 1)
    assert not sharing.offers


def test_the_oldest_are_passed_over_where_too_many_wait() -> None:
    sharing = Sharing(1 << 30, PAGE, MOST_UNSHARED_PAGES // 10)
    assert sharing.offer(PROMPT, range(13)) == 3
    taken, _ = sharing.take(range(100))
    assert taken[0][1][0] == 3


def side(shards: int, *, block: int = PAGE, limit: int = 1 << 30) -> RedisSide:
    return RedisSide(shards, limit, block, min(block, 2 << 20), Rates())


def test_each_shard_is_asked_for_the_entries_that_it_has() -> None:
    redis = side(8)
    redis.look_up(0.0, PROMPT)
    asked = [shard.thread.operations for shard in redis.shards]
    assert asked == [sum(server_of_entry(block, 8) == shard for block in PROMPT) for shard in range(8)]


def test_a_prefix_that_all_ask_for_is_asked_of_the_shards_that_have_it() -> None:
    redis = side(64)
    done, [write], _ = redis.begin_write(0.0, [(PROMPT[:4], PROMPT[:4])])
    assert redis.end_write(done, write) == 4
    before = [shard.thread.bytes for shard in redis.shards]
    for _ in range(100):
        redis.load(done, PROMPT[:4])
    sent = sorted(shard.thread.bytes - then for shard, then in zip(redis.shards, before, strict=True))
    assert sent[-1] > 100 * 4 * PAGE  # one chunk, on one shard
    assert sent[-2] < 100 * PAGE


@pytest.mark.parametrize("block", [PAGE, 4 << 20, 64 << 20])
def test_shards_share_what_one_would_do(block: int) -> None:
    sizes = []
    for shards in (1, 6, 64):
        redis = side(shards, block=block, limit=64 << 30)
        done, [write], _ = redis.begin_write(0.0, [(PROMPT[:20], PROMPT[:20])])
        assert redis.end_write(done, write) == 20
        sizes.append(sum(shard.thread.bytes for shard in redis.shards))
    assert all(size == pytest.approx(sizes[0], rel=0.02) for size in sizes)


def test_what_another_node_is_sending_is_offered_again_when_it_has() -> None:
    redis = side(3)
    done, [first], none = redis.begin_write(0.0, [(PROMPT, PROMPT)])
    told, [second], claims = redis.begin_write(0.0, [(PROMPT, PROMPT)])
    assert none == []
    assert (second.blocks, second.chunks) == ([], [])
    assert [block for claim in claims for block in claim.chunk.blocks] == list(PROMPT)
    assert told < done
    assert not any(redis.look_at_claim(done / 2, claim) for claim in claims)
    assert redis.end_write(done, first) == 100
    assert all(redis.look_at_claim(done, claim) for claim in claims)
    later, [again], none = redis.begin_write(done, [(PROMPT, PROMPT)])
    assert (again.blocks, again.chunks, none) == (list(PROMPT), [], [])
    assert redis.end_write(later, again) == 100


def test_a_claim_ends_with_the_time_of_a_write() -> None:
    redis = side(3)
    redis.begin_write(0.0, [(PROMPT, PROMPT)])
    _, _, claims = redis.begin_write(0.0, [(PROMPT, PROMPT)])
    assert not any(redis.look_at_claim(1.9, claim) for claim in claims)
    assert all(redis.look_at_claim(2.5, claim) for claim in claims)
    _, [write], none = redis.begin_write(2.5, [(PROMPT, PROMPT)])
    assert none == []
    assert sum(len(chunk.blocks) for chunk in write.chunks) == 100


def test_what_is_set_aside_is_queued_once_and_taken_first() -> None:
    sharing = Sharing(1 << 30, PAGE, 1)
    sharing.set_aside([1, 2])
    sharing.offer(PROMPT, [1, 3])
    sharing.put_back(PROMPT, [1, 2])
    assert sharing.take(range(100)) == ([(PROMPT, [1, 2, 3])], 0)


def test_runs_in_a_ring() -> None:
    assert redis_side._spread([1, 0, 0, 2], 3, 1) == [4, 4, 2, 3]


def test_a_wait_is_kept_within_nine_per_cent() -> None:
    for seconds in (1e-6, 3.3e-5, 0.02, 7.0, 1000.0):
        assert seconds_of(step_of(seconds)) == pytest.approx(seconds, rel=0.09)
    assert seconds_of(step_of(0.0)) == 0.0


def test_what_is_small_waits_for_a_piece_of_what_is_large() -> None:
    part = Part()
    assert part.visit(0.0, 1.0) == 1.0
    assert part.visit(0.5, 1e-5) == pytest.approx(0.504, abs=1e-3)
    assert part.visit(2.0, 1e-5) == pytest.approx(2.0, abs=1e-4)
    assert part.unqueued == 2
