"""Two ranks' backends over real host pools of latent attention, without a server: run by ``test_latent_pools.py``.

Arguments: the model's folder, the node's URL, the host pool's layout. Prints two JSON objects: what came of
it, and what the backend says of other pools.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import prepare_server_args

from kvstore.connector.sglang import KVStoreBackend

PAGE, PAGES, LAYERS, LATENT, ROTATED = 16, 8, 3, 32, 16


def make_pool(layout: str) -> MLATokenToKVPoolHost:
    width = LATENT + ROTATED
    buffers = tuple(torch.zeros(PAGE * PAGES, 1, width) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([each.data_ptr() for each in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTATED,
        kv_cache_dim=width,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGE * PAGES,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def make_backend(rank: int, url: str, pool: MLATokenToKVPoolHost) -> KVStoreBackend:
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="model",
        extra_config={"interface_v1": 1, "url": url},
    )
    backend = KVStoreBackend(config)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.on_host_pools_registered()
    end = time.monotonic() + 60
    while not backend._pages.is_open:
        assert time.monotonic() < end, "the weights are not read"
        time.sleep(0.01)
    return backend


def refused(backend: KVStoreBackend, pool: MLATokenToKVPoolHost) -> dict[str, str]:
    """What is said of each pool that SGLang has a name for, beside that of the attention."""
    said = {}
    for name in PoolName:
        try:
            backend.register_mem_host_pool_v2(pool, name)
        except OSError as error:
            said[str(name)] = str(error)
    return said


def main() -> None:
    model, url, layout = sys.argv[1:]
    arguments = prepare_server_args(["--model-path", model, "--device", "cpu", "--skip-tokenizer-init"])
    arguments.resolve_once()
    get_context().set_server_args(arguments)
    keys = [f"{number:064x}" for number in range(1, 5)]
    written, read = make_pool(layout), make_pool(layout)
    written.kv_buffer.copy_(torch.randn(written.kv_buffer.shape))
    writer, reader = make_backend(0, url, written), make_backend(1, url, read)
    places = torch.arange(PAGE * 2, PAGE * 6)  # pages 2 to 5
    stored = writer.batch_set_v1(keys, places)
    found = reader.batch_exists([*keys, "f" * 64])
    loaded = reader.batch_get_v1(keys, places)
    pages = [int(place) for place in places[::PAGE]]
    equal = all(torch.equal(read.get_data_page(place), written.get_data_page(place)) for place in pages)
    untouched = not read.get_data_page(0).any() and not read.get_data_page(PAGE * 6).any()
    said = refused(reader, read)
    writer.close()
    reader.close()
    print(json.dumps({"stored": stored, "found": found, "loaded": loaded, "equal": equal, "untouched": untouched}))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
