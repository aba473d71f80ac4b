"""Models of which no page can be kept are refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from engine_objects import CacheConfig, CacheGroup, FullAttentionSpec, ModelConfig

from kvstore.connector.engine.supported import check_groups, check_model
from kvstore.errors import ResourceError


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
