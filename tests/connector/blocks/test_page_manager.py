"""The manager in pages. Pages hold 4 tokens; a request's text has one token a letter, blanks only for the reader."""

from collections.abc import Callable

import numpy as np
import pytest
from dice import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.connector.blocks import hashing, page_manager
from kvstore.connector.blocks.cache_config import KVCacheConfig, KVCacheGroupSpec
from kvstore.connector.blocks.extra_keys import PrefixKeys
from kvstore.connector.blocks.manager import KVCacheManager
from kvstore.connector.blocks.page_manager import PageManager
from kvstore.connector.blocks.specs import CrossAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvstore.errors import InvalidRequestError

PAGE_SIZE = 4


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text if letter != " "]


def new_kv_manager(num_pages: int, window: int | None = None) -> KVCacheManager:
    """With this many usable pages, and a group of sliding windows besides the full one where a window is given."""
    groups = [KVCacheGroupSpec(("full",), FullAttentionSpec(block_size=PAGE_SIZE, token_bytes=8))]
    if window is not None:
        spec = SlidingWindowSpec(block_size=PAGE_SIZE, token_bytes=8, sliding_window=window)
        groups.append(KVCacheGroupSpec(("sliding",), spec))
    return KVCacheManager(KVCacheConfig(num_pages + 1, tuple(groups)), 128, enable_kv_cache_events=True)


@pytest.fixture
def new_pages() -> Callable[..., PageManager]:
    return lambda num_pages, **options: PageManager(new_kv_manager(num_pages, **options))


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """How many tokens each call gave to be hashed."""
    counts: list[int] = []

    class CountingChain(hashing.BlockHashChain):
        def extend(self, token_ids) -> None:
            super().extend(token_ids)
            counts.append(len(token_ids))

    monkeypatch.setattr(page_manager, "BlockHashChain", CountingChain)
    return counts


def prefill(pages: PageManager, request_id: str, text: str, keys: PrefixKeys | None = None) -> int | None:
    """Looks a request up, gives it pages for all its tokens, computes them. The tokens that hit; None: too few free."""
    hit, num_hit = pages.get_computed_pages(request_id, tokens(text), keys)
    if pages.allocate_pages(request_id, len(tokens(text)) - num_hit, num_hit, hit) is None:
        return None
    pages.set_computed_tokens(request_id, len(tokens(text)))
    pages.manager.check_integrity()
    return num_hit


class TestARequestsWay:
    def test_equal_prefixes_share_pages(self, new_pages):
        pages = new_pages(8)
        assert prefill(pages, "a", "SSSS pppp x") == 0
        assert prefill(pages, "b", "SSSS pppp y") == 8
        assert pages.get_page_ids("a") == ([1, 2, 3],)
        assert pages.get_page_ids("b") == ([1, 2, 4],)
        assert pages.get_num_common_prefix_pages("a") == [2]
        assert pages.usage == 0.5

    def test_generated_tokens_can_be_hit_once_their_page_is_full(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pp")
        for count, letter in enumerate("qrs", start=7):
            pages.append_tokens("a", tokens(letter))
            assert pages.allocate_pages("a", 1) is not None
            pages.set_computed_tokens("a", count)
        assert prefill(pages, "b", "SSSS ppqr x") == 8

    def test_a_prompt_may_be_computed_chunk_by_chunk(self, new_pages):
        pages = new_pages(8)
        pages.get_computed_pages("a", tokens("SSSS pppp qq"))
        pages.allocate_pages("a", 5)
        pages.set_computed_tokens("a", 5)
        assert pages.get_page_ids("a") == ([1, 2],)
        pages.allocate_pages("a", 5)
        assert pages.get_page_ids("a") == ([1, 2, 3],)

    def test_rejected_drafts_take_the_computed_tokens_back(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pp")
        pages.append_tokens("a", tokens("q"))
        pages.allocate_pages("a", 3)  # one token and two drafts
        pages.set_computed_tokens("a", 9, num_in_flight_tokens=3)
        pages.set_computed_tokens("a", 7)
        pages.append_tokens("a", tokens("r"))
        assert pages.allocate_pages("a", 1).get_block_ids() == ([],)  # the third page is there already

    def test_without_room_nothing_changes(self, new_pages):
        pages = new_pages(3)
        prefill(pages, "a", "SSSS pppp")
        assert prefill(pages, "b", "TTTT tttt") is None
        assert pages.get_page_ids("b") == ([],)
        pages.finish("a")
        assert prefill(pages, "b", "TTTT tttt") == 0

    @pytest.mark.parametrize(
        ("options", "page_ids"),
        [
            ({}, [1]),
            ({"num_lookahead_tokens": 1}, [1, 2]),
            ({"reserved_pages": 2}, [1]),
            ({"reserved_pages": 3}, None),
            ({"full_sequence_must_fit": True}, None),
        ],
    )
    def test_what_an_engine_asks_for_counts(self, new_pages, options, page_ids):
        pages = new_pages(3)
        pages.get_computed_pages("a", tokens("SSSS pppp qqqq r"))
        added = pages.allocate_pages("a", 4, **options)
        assert (None if added is None else added.get_block_ids()[0]) == page_ids

    def test_an_encoder_s_tokens_have_pages_of_their_own(self):
        cross = KVCacheGroupSpec(("cross",), CrossAttentionSpec(block_size=PAGE_SIZE, token_bytes=8))
        full = KVCacheGroupSpec(("full",), FullAttentionSpec(block_size=PAGE_SIZE, token_bytes=8))
        pages = PageManager(KVCacheManager(KVCacheConfig(9, (full, cross)), 128, enable_caching=False))
        pages.get_computed_pages("a", tokens("SSSS"))
        pages.allocate_pages("a", 4, num_encoder_tokens=9)
        assert [len(group) for group in pages.get_page_ids("a")] == [1, 3]

    def test_pages_may_be_shared_later_than_they_are_given(self, new_pages):
        pages = new_pages(8)
        pages.get_computed_pages("a", tokens("SSSS pppp x"))
        pages.allocate_pages("a", 9, delay_cache_pages=True)
        assert pages.get_computed_pages("b", tokens("SSSS pppp x"))[1] == 0
        pages.cache_pages("a", 7)
        assert pages.get_computed_pages("b", tokens("SSSS pppp x"))[1] == 4
        assert pages.estimate_cached_tokens("a") == 4
        assert [block.block_hash is None for block in pages.get_pages("a").blocks[0]] == [False, True, True]

    def test_evicted_pages_are_found_no_longer(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pppp x")
        pages.evict_pages([2])
        assert pages.get_computed_pages("b", tokens("SSSS pppp x"))[1] == 4

    def test_a_request_may_skip_the_cache(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pppp x")
        hit = pages.get_computed_pages("b", tokens("SSSS pppp x"), skip_reading_prefix_cache=True)
        assert hit[1] == 0

    def test_pages_are_shared_under_equal_keys_alone(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS x", PrefixKeys(cache_salt="mine"))
        assert prefill(pages, "b", "SSSS x", PrefixKeys(cache_salt="yours")) == 0
        assert prefill(pages, "c", "SSSS x") == 0
        assert prefill(pages, "d", "SSSS x", PrefixKeys(cache_salt="mine")) == 4

    def test_pages_outside_the_window_are_freed(self, new_pages):
        pages = new_pages(20, window=4)
        prefill(pages, "a", "SSSS pppp qqqq r")
        pages.remove_skipped_pages("a", 13)
        full, sliding = pages.get_page_ids("a")
        assert 0 not in full
        assert sliding[:2] == [0, 0] != sliding[2:]
        pages.manager.check_integrity()

    def test_pages_that_a_step_still_reads_are_not_freed(self, new_pages):
        pages = new_pages(20, window=4)
        pages.get_computed_pages("a", tokens("SSSS pppp qqqq r"))
        pages.allocate_pages("a", 8)
        pages.set_computed_tokens("a", 8, num_in_flight_tokens=8)
        pages.allocate_pages("a", 4)
        assert 0 not in pages.get_page_ids("a")[1]
        pages.set_computed_tokens("a", 12, num_in_flight_tokens=4)
        pages.allocate_pages("a", 1)
        assert [page_id == 0 for page_id in pages.get_page_ids("a")[1]] == [True, False, False, False]

    def test_arrays_are_tokens_too(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS x")
        prompt = np.array(tokens("SSSS y"))
        assert pages.get_computed_pages("b", prompt)[1] == 4
        assert pages.get_computed_pages("b", prompt)[1] == 4


class TestHashes:
    def test_a_preempted_request_finds_its_pages_without_hashing_again(self, new_pages, hashed):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pppp x")
        assert hashed == [9]
        hashes = list(pages.get_block_hashes("a"))
        pages.free_pages("a")
        assert pages.get_page_ids("a") == ([],)
        assert pages.get_block_hashes("a") == hashes
        assert prefill(pages, "a", "SSSS pppp x") == 8
        assert hashed == [9]

    def test_tokens_that_were_generated_before_a_preemption_are_known_behind_it(self, new_pages, hashed):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS ppp")
        pages.append_tokens("a", tokens("p"))
        pages.allocate_pages("a", 1)
        pages.set_computed_tokens("a", 8)
        pages.append_tokens("a", tokens("q"))
        pages.free_pages("a")
        assert prefill(pages, "a", "SSSS pppp q") == 8
        assert hashed == [7, 1, 1]

    def test_a_request_that_waits_for_room_is_hashed_once(self, new_pages, hashed):
        pages = new_pages(1)
        for _ in range(3):
            assert prefill(pages, "a", "SSSS pppp") is None
        assert hashed == [8]
        assert pages.num_requests == 1

    def test_a_finished_request_leaves_nothing(self, new_pages, hashed):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pppp x")
        pages.finish("a")
        assert pages.num_requests == 0
        assert pages.usage == 0
        prefill(pages, "a", "SSSS")
        assert hashed == [9, 4]

    def test_a_request_may_finish_before_it_was_given_pages(self, new_pages):
        pages = new_pages(8)
        pages.get_computed_pages("a", tokens("SSSS"))
        pages.finish("a")
        assert pages.num_requests == 0

    def test_a_reset_leaves_hashes(self, new_pages, hashed):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pppp x")
        assert not pages.reset_prefix_cache()
        pages.free_pages("a")
        assert pages.reset_prefix_cache()
        assert prefill(pages, "a", "SSSS pppp x") == 0
        pages.free_pages("a")
        assert prefill(pages, "a", "SSSS pppp x") == 8
        assert hashed == [9]


class TestPreemption:
    def test_it_is_counted_apart(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pppp x")
        pages.free_pages("a")
        prefill(pages, "a", "SSSS pppp x")
        stats = pages.make_prefix_cache_stats()
        assert (stats.requests, stats.queries, stats.hits) == (1, 9, 0)
        assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 9, 8)

    def test_a_request_without_pages_is_not_preempted(self, new_pages):
        pages = new_pages(8)
        pages.get_computed_pages("a", tokens("SSSS x"))
        pages.free_pages("a")
        prefill(pages, "a", "SSSS x")
        assert pages.make_prefix_cache_stats().preempted_requests == 0

    def test_pages_that_a_copy_still_reads_are_given_to_nobody(self, new_pages):
        pages = new_pages(3)
        prefill(pages, "a", "SSSS pppp x")
        popped = pages.pop_pages_for_free("a")
        pages.finish("a")
        assert prefill(pages, "b", "TTTT") is None
        pages.free_popped(popped)
        assert prefill(pages, "b", "TTTT") == 0


class TestLoads:
    def start(self, pages: PageManager) -> None:
        """Request a hits a page here and two of kvstore."""
        prefill(pages, "z", "SSSS z")
        pages.get_computed_pages("a", tokens("SSSS pppp qqqq r"))
        hit, num_local, num_external = pages.get_computed_pages_with("a", {0: [True, True, True]})
        assert (num_local, num_external) == (4, 8)
        pages.allocate_pages("a", 0, num_local, hit, num_external_computed_tokens=num_external, delay_cache_pages=True)
        pages.manager.check_integrity()

    def test_loaded_pages_are_shared_when_they_have_come(self, new_pages):
        pages = new_pages(10)
        self.start(pages)
        ((first, second),) = pages.get_pages_to_load("a")
        assert (first[0], second[0]) == (1, 2)
        assert pages.get_page_ids("a") == ([1, first[1].block_id, second[1].block_id],)
        assert pages.get_computed_pages("b", tokens("SSSS pppp qqqq r"))[1] == 4
        assert pages.complete_load("a") == 12
        assert pages.get_computed_pages("b", tokens("SSSS pppp qqqq r"))[1] == 12
        assert pages.allocate_pages("a", 1) is not None
        assert len(pages.get_page_ids("a")[0]) == 4

    def test_a_page_that_did_not_come_is_computed(self, new_pages):
        pages = new_pages(10)
        self.start(pages)
        ((_, second),) = pages.get_pages_to_load("a")
        assert pages.complete_load("a", [second[1].block_id]) == 8
        assert pages.allocate_pages("a", 5) is not None
        pages.set_computed_tokens("a", 13)
        pages.manager.check_integrity()

    def test_a_load_that_fails_from_the_start_on_takes_all_pages(self, new_pages, hashed):
        pages = new_pages(10)
        pages.get_computed_pages("a", tokens("SSSS p"))
        hit, num_local, num_external = pages.get_computed_pages_with("a", {0: [True]})
        pages.allocate_pages("a", 0, num_local, hit, num_external_computed_tokens=num_external, delay_cache_pages=True)
        (((_, page),),) = pages.get_pages_to_load("a")
        assert pages.complete_load("a", [page.block_id]) == 0
        assert pages.usage == 0
        with pytest.raises(InvalidRequestError, match="request a: 1 tokens can't be computed"):
            pages.set_computed_tokens("a", 1)
        assert prefill(pages, "a", "SSSS p") == 0
        assert hashed == [5]


class TestErrors:
    @pytest.mark.parametrize(
        "call",
        [
            lambda pages: pages.get_computed_pages_with("b", {}),
            lambda pages: pages.get_block_hashes("b"),
            lambda pages: pages.allocate_pages("b", 1),
            lambda pages: pages.append_tokens("b", [1]),
            lambda pages: pages.set_computed_tokens("b", 1),
            lambda pages: pages.get_pages_to_load("b"),
            lambda pages: pages.complete_load("b"),
            lambda pages: pages.cache_pages("b", 1),
            lambda pages: pages.remove_skipped_pages("b", 1),
            lambda pages: pages.free_pages("b"),
            lambda pages: pages.pop_pages_for_free("b"),
            lambda pages: pages.finish("b"),
            lambda pages: pages.get_pages("b"),
            lambda pages: pages.get_page_ids("b"),
            lambda pages: pages.get_num_common_prefix_pages("b"),
            lambda pages: pages.estimate_cached_tokens("b"),
        ],
    )
    @pytest.mark.parametrize("finished", [False, True])
    def test_a_request_that_is_not_known_is_named(self, new_pages, call, finished):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS")
        if finished:
            prefill(pages, "b", "SSSS")
            pages.finish("b")
        with pytest.raises(InvalidRequestError, match="request b is not known: it was never looked up, or is finished"):
            call(pages)
        assert pages.num_requests == 1

    @pytest.mark.parametrize(
        ("text", "first"), [("SSSS xppp x", 4), ("SSSS ppp", 7), ("SSSS pppp xx", 9), ("", 0), ("SSSS pppp y", 8)]
    )
    def test_tokens_given_again_must_be_those_known(self, new_pages, text, first):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pppp x")
        pages.free_pages("a")
        message = (
            f"request a: the {len(tokens(text))} tokens given are not its 9 tokens so far: they differ from"
            f" token {first} on"
        )
        with pytest.raises(InvalidRequestError, match=message):
            pages.get_computed_pages("a", tokens(text))
        assert prefill(pages, "a", "SSSS pppp x") == 8

    @pytest.mark.parametrize("keys", [None, PrefixKeys(cache_salt="yours")])
    def test_keys_given_again_must_be_those_known(self, new_pages, keys):
        pages = new_pages(8)
        pages.get_computed_pages("a", tokens("SSSS"), PrefixKeys(cache_salt="mine"))
        with pytest.raises(InvalidRequestError, match="request a: the keys given are not those of its first lookup"):
            pages.get_computed_pages("a", tokens("SSSS"), keys)
        pages.get_computed_pages("a", tokens("SSSS"), PrefixKeys(cache_salt="mine"))

    @pytest.mark.parametrize(("prompt", "message"), [([], "at least 1 token is needed"), ([1, -1], "got -1")])
    def test_a_prompt_that_is_refused_leaves_no_request(self, new_pages, prompt, message):
        pages = new_pages(8)
        with pytest.raises(InvalidRequestError, match=f"request a: .*{message}"):
            pages.get_computed_pages("a", prompt)
        assert pages.num_requests == 0

    def test_tokens_that_are_refused_are_not_taken(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS")
        with pytest.raises(InvalidRequestError, match="request a: token ids must"):
            pages.append_tokens("a", [1, -1])
        pages.free_pages("a")
        assert prefill(pages, "a", "SSSS") == 0

    @pytest.mark.parametrize(("computed", "in_flight"), [(6, 0), (4, 5), (-1, 0), (4, -1)])
    def test_no_more_tokens_are_computed_than_have_pages(self, new_pages, computed, in_flight):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS p")
        with pytest.raises(
            InvalidRequestError, match=f"request a: {computed} tokens can't be computed with {in_flight}"
        ):
            pages.set_computed_tokens("a", computed, in_flight)

    def test_the_pages_of_the_last_step_are_what_counts(self, new_pages):
        pages = new_pages(8)
        prefill(pages, "a", "SSSS pp")
        pages.append_tokens("a", tokens("q"))
        pages.allocate_pages("a", 3, num_lookahead_tokens=1)
        pages.set_computed_tokens("a", 10, num_in_flight_tokens=4)
        pages.set_computed_tokens("a", 7)
        pages.append_tokens("a", tokens("r"))
        pages.allocate_pages("a", 1)
        with pytest.raises(InvalidRequestError, match="it was given pages for 8"):
            pages.set_computed_tokens("a", 9)


class DirectRequest:
    """What an engine with request objects of its own would give the manager."""

    def __init__(self, request_id: str, token_ids: list[int], hash_block_size: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.skip_reading_prefix_cache = False
        self.num_preemptions = 0
        self.prefix_keys = None
        self.token_ids: list[int] = []
        self._chain = hashing.BlockHashChain(hash_block_size)
        self.append(token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self) -> list[hashing.BlockHash]:
        return self._chain.hashes

    def append(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self._chain.extend(token_ids)


class Pair:
    """The same calls through both doors; each operation checks that both answer the same."""

    def __init__(self, num_pages: int, window: int | None) -> None:
        self.direct = new_kv_manager(num_pages, window)
        self.pages = PageManager(new_kv_manager(num_pages, window))
        self.requests: dict[str, DirectRequest] = {}

    def check(self) -> None:
        self.direct.check_integrity()
        self.pages.manager.check_integrity()
        assert self.pages.num_requests == len(self.requests)
        assert self.pages.usage == self.direct.usage
        assert self.pages.take_events() == self.direct.take_events()
        assert self.pages.make_prefix_cache_stats() == self.direct.make_prefix_cache_stats()
        for request_id in self.requests:
            assert self.pages.get_page_ids(request_id) == self.direct.get_block_ids(request_id)
            assert self.pages.get_block_hashes(request_id) == self.requests[request_id].block_hashes

    def run(self, request_id: str, action: str, length: int, letter: int) -> None:
        request = self.requests.get(request_id)
        if request is None:
            prompt = [1] * (length // 2) + [letter] * (length - length // 2)
            request = self.requests[request_id] = DirectRequest(request_id, prompt, self.direct.hash_block_size)
            self.pages.get_computed_pages(request_id, prompt)
        holds = any(self.direct.get_block_ids(request_id))
        loads = any(self.direct.get_blocks_to_load(request_id))
        match action:
            case "finish":
                self.direct.free(self.requests.pop(request_id))
                self.pages.finish(request_id)
            case "preempt" if holds:
                self.direct.free(request)
                self.pages.free_pages(request_id)
                request.num_computed_tokens = 0
                request.num_preemptions += 1
            case "evict":
                self.direct.evict_blocks([letter])
                self.pages.evict_pages([letter])
            case "reset":
                assert self.pages.reset_prefix_cache() == self.direct.reset_prefix_cache()
            case "compute" if loads:
                invalid = [block.block_id for group in self.direct.get_blocks_to_load(request_id) for _, block in group]
                invalid = invalid[letter:]
                request.num_computed_tokens = self.direct.complete_load(request, invalid)
                assert self.pages.complete_load(request_id, invalid) == request.num_computed_tokens
            case "compute" if holds:
                if request.num_computed_tokens == request.num_tokens:
                    request.append([letter])
                    self.pages.append_tokens(request_id, [letter])
                num_new = min(length, request.num_tokens - request.num_computed_tokens)
                self.allocated(request, self.direct.allocate_slots(request, num_new), num_new)
            case "compute":
                hit, num_hit = self.direct.get_computed_blocks(request)
                pages, num_hit_pages = self.pages.get_computed_pages(request_id, request.token_ids)
                assert (num_hit_pages, pages.get_block_ids()) == (num_hit, hit.get_block_ids())
                num_new = min(length, request.num_tokens - num_hit)
                added = self.direct.allocate_slots(request, num_new, num_hit, hit)
                self.allocated(request, added, num_new, num_hit, pages)
            case "load" if not holds:
                self.load(request, {group: [True] * length for group in (0, 1)})

    def allocated(self, request: DirectRequest, added, num_new: int, num_hit: int = 0, hit=None) -> None:
        mine = self.pages.allocate_pages(request.request_id, num_new, num_hit, hit)
        if added is None:
            assert mine is None
            return
        assert mine is not None
        assert mine.get_block_ids() == added.get_block_ids()
        request.num_computed_tokens += num_hit + num_new
        self.pages.set_computed_tokens(request.request_id, request.num_computed_tokens)

    def load(self, request: DirectRequest, presence: dict[int, list[bool]]) -> None:
        hit, local, external = self.direct.get_computed_blocks_with(request, presence)
        pages, *counts = self.pages.get_computed_pages_with(request.request_id, presence)
        assert counts == [local, external]
        assert pages.get_block_ids() == hit.get_block_ids()
        if not external:
            return
        options = {"num_external_computed_tokens": external}
        added = self.direct.allocate_slots(request, 0, local, hit, **options, delay_cache_blocks=True)
        mine = self.pages.allocate_pages(request.request_id, 0, local, pages, **options, delay_cache_pages=True)
        assert (mine is None) == (added is None)
        if added is not None:
            request.num_computed_tokens = local + external
            assert self.to_load(self.pages.get_pages_to_load(request.request_id)) == self.to_load(
                self.direct.get_blocks_to_load(request.request_id)
            )

    @staticmethod
    def to_load(groups) -> list[list[tuple[int, int]]]:
        return [[(index, block.block_id) for index, block in group] for group in groups]


@settings(max_examples=examples(150), deadline=None)
@given(
    num_pages=st.integers(4, 14),
    window=st.sampled_from([None, 5]),
    calls=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["compute", "compute", "compute", "load", "preempt", "finish", "evict", "reset"]),
            st.integers(1, 20),
            st.integers(1, 3),
        ),
        max_size=25,
    ),
)
def test_both_doors_open_to_the_same_pages(num_pages, window, calls):
    pair = Pair(num_pages, window)
    for request_id, action, length, letter in calls:
        pair.run(request_id, action, length, letter)
        pair.check()
    for request_id in list(pair.requests):
        pair.run(request_id, "finish", 1, 1)
    assert pair.pages.usage == 0.0
    assert pair.pages.num_requests == 0
