from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvstore.connector.blocks import KVCacheConfig
from kvstore.connector.reference.batch import BatchedSequence
from kvstore.connector.reference.kv_cache import KVCache
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.errors import ConfigError
from kvstore.layout import Layout

BLOCK_SIZE = 16


def prompt(length: int, *, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed} {index}").randrange(512) for index in range(length)]


@pytest.fixture(scope="module")
def theirs(tiny: Llama) -> LlamaForCausalLM:
    """transformers' model with the weights of ours."""
    config = tiny.config
    model = LlamaForCausalLM(
        HFConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            dtype=torch.float32,
        )
    )
    model.load_state_dict(tiny.state_dict(), strict=True)
    return model.eval()


def their_logits(model: LlamaForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """(tokens, vocabulary): the logits behind every token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


class Cache:
    """A paged KV whose requests get blocks in no particular order."""

    def __init__(self, model: Llama, num_blocks: int = 64) -> None:
        self.model = model
        self.kv = KVCache(KVCacheConfig(num_blocks, model.config.cache_groups(BLOCK_SIZE)))
        self.free = list(range(1, num_blocks))
        random.Random(1).shuffle(self.free)

    def blocks(self, tokens: int) -> list[list[int]]:
        return [
            [self.free.pop() for _ in range(-(-tokens // group.kv_cache_spec.block_size))] for group in self.kv.groups
        ]

    def compute(self, *sequences: BatchedSequence) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(sequences, self.kv)


def joined(blocks: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    return [first + then for first, then in zip(blocks, more, strict=True)]


def layouts(config: LlamaConfig) -> tuple[Layout, ...]:
    return config.layouts(config.cache_groups(BLOCK_SIZE))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_logits_of_a_prompt_equal_those_of_transformers(tiny: Llama, theirs: LlamaForCausalLM, length: int) -> None:
    tokens = prompt(length)
    cache = Cache(tiny)

    ours = cache.compute(BatchedSequence(tokens, 0, cache.blocks(length)))

    torch.testing.assert_close(ours[0], their_logits(theirs, tokens)[-1], rtol=1e-4, atol=2e-5)


def test_logits_of_every_token_equal_those_of_transformers(tiny: Llama, theirs: LlamaForCausalLM) -> None:
    tokens = prompt(70)
    cache = Cache(tiny)
    blocks = cache.blocks(len(tokens))

    ours = [cache.compute(BatchedSequence([token], at, blocks))[0] for at, token in enumerate(tokens)]

    torch.testing.assert_close(torch.stack(ours), their_logits(theirs, tokens), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(tiny: Llama, theirs: LlamaForCausalLM, chunk: int) -> None:
    tokens = prompt(90)
    cache = Cache(tiny)
    blocks = cache.blocks(len(tokens))

    for start in range(0, len(tokens), chunk):
        ours = cache.compute(BatchedSequence(tokens[start : start + chunk], start, blocks))

    torch.testing.assert_close(ours[0], their_logits(theirs, tokens)[-1], rtol=1e-4, atol=2e-5)


def test_requests_in_one_batch_do_not_see_each_other(tiny: Llama, theirs: LlamaForCausalLM) -> None:
    prompts = [prompt(length, seed=length) for length in (40, 3, 65, 17)]
    cache = Cache(tiny)
    blocks = [cache.blocks(len(tokens)) for tokens in prompts]
    for tokens, own in zip(prompts[:2], blocks[:2], strict=True):
        cache.compute(BatchedSequence(tokens[:-1], 0, own))

    # Two that decode one token, two that compute their whole prompt.
    ours = cache.compute(
        *(BatchedSequence(t[-1:], len(t) - 1, own) for t, own in zip(prompts[:2], blocks[:2], strict=True)),
        *(BatchedSequence(t, 0, own) for t, own in zip(prompts[2:], blocks[2:], strict=True)),
    )

    expected = torch.stack([their_logits(theirs, tokens)[-1] for tokens in prompts])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


def test_a_prefix_that_another_request_computed_serves_as_well(tiny: Llama, theirs: LlamaForCausalLM) -> None:
    shared, tails = prompt(48), [prompt(20, seed=1), prompt(33, seed=2)]
    cache = Cache(tiny)
    prefix = cache.blocks(48)
    cache.compute(BatchedSequence(shared, 0, prefix))

    ours = cache.compute(*(BatchedSequence(tail, 48, joined(prefix, cache.blocks(len(tail)))) for tail in tails))

    expected = torch.stack([their_logits(theirs, shared + tail)[-1] for tail in tails])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


def test_a_prefix_may_be_computed_in_the_batch_that_uses_it(tiny: Llama, theirs: LlamaForCausalLM) -> None:
    shared, tail = prompt(32), prompt(20, seed=1)
    cache = Cache(tiny)
    prefix = cache.blocks(32)

    # The one that reads comes first: writing must not depend on the order.
    ours = cache.compute(
        BatchedSequence(tail, 32, joined(prefix, cache.blocks(20))), BatchedSequence(shared, 0, prefix)
    )

    torch.testing.assert_close(ours[0], their_logits(theirs, shared + tail)[-1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_logits_with_a_window_equal_those_of_transformers(tiny: Llama, chunk: int) -> None:
    config = tiny.config
    fields = {name: getattr(config, name) for name in config.__slots__}
    ours = Llama(LlamaConfig(**fields | {"layer_types": ("sliding",) * 3, "sliding_window": 20}))
    theirs = MistralForCausalLM(
        MistralConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            sliding_window=20,
            tie_word_embeddings=False,
            dtype=torch.float32,
        )
    )
    theirs.load_state_dict(ours.state_dict(), strict=True)
    tokens = prompt(100)
    cache = Cache(ours)
    blocks = cache.blocks(len(tokens))

    for start in range(0, len(tokens), chunk):
        # Blocks before the window are gone.
        needed = [[0] * ((start - 19) // BLOCK_SIZE) + own[max(0, start - 19) // BLOCK_SIZE :] for own in blocks]
        logits = cache.compute(BatchedSequence(tokens[start : start + chunk], start, needed))

    torch.testing.assert_close(logits[0], their_logits(theirs.eval(), tokens)[-1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_layers_of_all_kinds_give_the_same_logits_in_chunks(mixed: Llama, chunk: int) -> None:
    tokens = prompt(90)
    cache = Cache(mixed, num_blocks=128)
    whole = cache.compute(BatchedSequence(tokens, 0, cache.blocks(len(tokens))))
    blocks = cache.blocks(len(tokens))

    for start in range(0, len(tokens), chunk):
        ours = cache.compute(BatchedSequence(tokens[start : start + chunk], start, blocks))

    torch.testing.assert_close(ours, whole, rtol=1e-4, atol=2e-5)


def test_the_first_token_matters_to_the_last_one(mixed: Llama) -> None:
    cache = Cache(mixed, num_blocks=128)
    window = mixed.config.sliding_window if set(mixed.config.layer_types) == {"sliding"} else 90

    tokens, others = prompt(window), [1, *prompt(window)[1:]]
    logits = cache.compute(*(BatchedSequence(t, 0, cache.blocks(window)) for t in (tokens, others)))

    assert (logits[0] - logits[1]).abs().max() > 0.01


def test_each_group_has_a_layout_of_its_own(mixed: Llama) -> None:
    groups = mixed.config.cache_groups(BLOCK_SIZE)
    made = mixed.config.layouts(groups)

    assert [layout.group for layout in made] == list(range(len(groups)))
    assert sum(layout.layers for layout in made) == mixed.config.num_layers
    for layout, group in zip(made, groups, strict=True):
        assert (layout.page_bytes, layout.block_size) == (group.page_bytes, group.kv_cache_spec.block_size)


def test_equal_seeds_give_equal_weights_and_others_do_not(tiny: Llama) -> None:
    config = tiny.config
    again = Llama(config).state_dict()
    other = Llama(LlamaConfig(**{name: getattr(config, name) for name in config.__slots__} | {"seed": 4})).state_dict()

    assert all(torch.equal(weight, again[name]) for name, weight in tiny.state_dict().items())
    assert not torch.equal(other["lm_head.weight"], again["lm_head.weight"])
    assert layouts(Llama(config).config) == layouts(config)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"vocab_size": 1024},
        {"num_heads": 4},
        {"rope_theta": 5e5},
        {"layer_types": ("full", "full", "sliding"), "sliding_window": 20},
        {"layer_types": ("recurrent", "full", "full")},
    ],
)
def test_models_that_differ_never_share_pages(tiny: Llama, change: dict[str, int]) -> None:
    fields = {name: getattr(tiny.config, name) for name in tiny.config.__slots__}

    assert not {layout.fingerprint for layout in layouts(LlamaConfig(**fields | change))} & {
        layout.fingerprint for layout in layouts(tiny.config)
    }


def test_sizes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size 100"):
        LlamaConfig(hidden_size=100)
    with pytest.raises(ConfigError, match="num_kv_heads 3"):
        LlamaConfig(num_kv_heads=3)
    with pytest.raises(ConfigError, match="sliding layers: 3"):
        LlamaConfig(layer_types=("sliding",) * 7, sliding_window=8, sliding_num_kv_heads=3)
    with pytest.raises(ConfigError, match="for each of 7 layers"):
        LlamaConfig(layer_types=("full",))
    with pytest.raises(ConfigError, match="sliding_window must be at least 1, got 0"):
        LlamaConfig(layer_types=("sliding",) * 7)
