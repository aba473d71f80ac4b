"""Several drafting modules, each of which reads one token further ahead: what is final, and what is kept for it.

Blocks hold 4 tokens; a request's text has one token a letter.
"""

import pytest

from kvstore.connector.blocks import FullAttentionSpec, SlidingWindowSpec
from kvstore.errors import ConfigError


def test_the_last_tokens_of_a_request_are_found_when_they_are_final(new_manager, new_request, prefill, compute):
    manager = new_manager(12, use_eagle=True, num_prefill_lookahead=3)
    request = new_request("a", "SSSS pppp q")
    prefill(manager, request)
    assert manager.estimate_cached_tokens(request) == 4
    request.append([1])
    compute(manager, request)
    assert manager.estimate_cached_tokens(request) == 8


def test_in_a_model_with_windows_too(new_manager, new_request, prefill, compute):
    full = FullAttentionSpec(block_size=4, token_bytes=8)
    window = SlidingWindowSpec(block_size=4, token_bytes=8, sliding_window=6, extra_retained_tokens=2)
    manager = new_manager(20, full, window, use_eagle=True, num_prefill_lookahead=3)
    request = new_request("a", "SSSS pppp q")
    prefill(manager, request)
    assert manager.estimate_cached_tokens(request) == 4
    request.append([1])
    compute(manager, request)
    assert manager.estimate_cached_tokens(request) == 8


def test_a_window_keeps_the_tokens_that_may_be_computed_again(new_manager, new_request, prefill):
    for extra, freed in [(0, 2), (3, 1)]:
        spec = SlidingWindowSpec(block_size=4, token_bytes=8, sliding_window=3, extra_retained_tokens=extra)
        manager = new_manager(12, spec)
        request = new_request("a", "SSSS pppp qq")
        prefill(manager, request)
        manager.remove_skipped_blocks("a", 10)
        assert manager.get_block_ids("a")[0].count(0) == freed


def test_more_modules_than_a_hit_has_tokens_to_compute_again_are_refused(new_manager):
    with pytest.raises(ConfigError, match="not be above the 4 tokens at whose multiples hits end, got 5"):
        new_manager(12, use_eagle=True, num_prefill_lookahead=5)
    new_manager(12, use_eagle=True, num_prefill_lookahead=5, enable_caching=False)
