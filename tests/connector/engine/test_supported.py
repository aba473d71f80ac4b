"""Models of which no page can be kept are refused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from engine_objects import CacheConfig, CacheGroup, FullAttentionSpec, MambaSpec, ModelConfig

from kvstore.connector.engine.supported import check_groups, check_model, check_parallel
from kvstore.errors import ConfigError, KVStoreError, ResourceError


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ModelConfig(pooler_config=object(), is_prefix_caching_supported=False), "does not serve this pooling model"),
        (ModelConfig(is_diffusion=True), "diffusion"),
        (ModelConfig(pooler_config=object()), None),
        (ModelConfig(is_prefix_caching_supported=False), None),  # states alone: kvstore finds them by prefix
    ],
)
def test_models_that_compute_their_tokens_at_once_are_refused(model: ModelConfig, says: str | None) -> None:
    with pytest.raises(ResourceError, match=says) if says else nullcontext():
        check_model(model)


def test_layers_in_which_tokens_attend_to_later_ones_are_refused() -> None:
    for non_causal in (False, True):
        config = CacheConfig([CacheGroup(FullAttentionSpec(non_causal=non_causal))])
        with pytest.raises(ResourceError, match="attends to later ones") if non_causal else nullcontext():
            check_groups(config)


@pytest.mark.parametrize(
    ("sizes", "spec", "is_cut", "error"),
    [
        ((1, 1), MambaSpec(), True, None),
        ((4, 1), FullAttentionSpec(), False, None),
        ((4, 1), FullAttentionSpec(), True, ConfigError("kv_parts: .* where decode_context_parallel_size is 4")),
        ((4, 1), MambaSpec(), False, ResourceError("decode_context_parallel_size 4: layers of the kind MambaSpec")),
        ((1, 2), FullAttentionSpec(), False, ResourceError("prefill_context_parallel_size 2: ")),
        ((2, 2), FullAttentionSpec(), False, ResourceError("prefill_context_parallel_size 2: ")),
    ],
)
def test_ranks_that_share_blocks_by_their_tokens(
    sizes: tuple[int, int], spec: FullAttentionSpec | MambaSpec, is_cut: bool, error: KVStoreError | None
) -> None:
    decode, prefill = sizes
    parallel = SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=prefill)
    with pytest.raises(type(error), match=str(error)) if error else nullcontext():
        check_parallel(parallel, CacheConfig([CacheGroup(spec)]), is_cut)
