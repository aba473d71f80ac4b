"""A window of one token: a request needs none of the blocks before it, so no page of a hit is loaded."""

from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama, LlamaConfig


def test_a_request_goes_on_when_nothing_of_its_hit_is_to_be_loaded(node):
    model = Llama(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=192,
            num_layers=2,
            num_heads=8,
            num_kv_heads=2,
            layer_types=("sliding", "sliding"),
            sliding_window=1,
            seed=3,
        )
    )
    answers = []
    for _ in range(2):
        engine = Engine(model, num_blocks=20, client=node, lookup_budget=60.0, load_deadline=60.0, store_deadline=60.0)
        engine.add_request("a", list(range(50)), 4)
        answers += engine.run()
        engine.close()
        assert engine.manager.usage == 0.0
    first, second = answers
    assert second.token_ids == first.token_ids
