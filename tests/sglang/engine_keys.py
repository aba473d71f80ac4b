"""Prints keys of pages that SGLang's own functions make, as JSON by what was asked for, and what an event calls one."""

from __future__ import annotations

import json
from array import array
from typing import Any

import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str, hash_str_to_int64

PAGE_SIZE = 16
TOKENS = list(range(3, 3 + 2 * PAGE_SIZE))


def key(tokens: list[int], **names: Any) -> str:
    """Of the last page."""
    return str(get_storage_hash_str(RadixKey(array("q", tokens), **names), page_size=PAGE_SIZE)[-1])


def picture(feature: list[float], caller: int | None = None) -> str:
    """Of a page with a picture in it, where a caller may have said what its hash is."""
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.tensor(feature))
    if caller is not None:
        item.set_hash(caller)
    item.set_pad_value()
    return key(TOKENS[:PAGE_SIZE] + item.padding_sequence(PAGE_SIZE))


print(
    json.dumps(
        {
            "plain": key(TOKENS),
            "salted": key(TOKENS, cache_salt="a"),
            "adapter": key(TOKENS, extra_key=LoRARef.deterministic_id("a", "/a")),
            "adapter again": key(TOKENS, extra_key=LoRARef.deterministic_id("a", "/a")),
            "adapter elsewhere": key(TOKENS, extra_key=LoRARef.deterministic_id("a", "/b")),
            "adapter by another name": key(TOKENS, extra_key=LoRARef.deterministic_id("b", "/a")),
            "adapter loaded later": key(TOKENS, extra_key=LoRARef(lora_name="a", lora_path="/a").lora_id),
            "adapter loaded anew": key(TOKENS, extra_key=LoRARef(lora_name="a", lora_path="/a").lora_id),
            "picture": picture([0.0, 1.0]),
            "picture again": picture([0.0, 1.0]),
            "another picture": picture([0.0, 1.0000001]),
            "picture by a caller's hash": picture([0.0, 1.0], 7),
            "another picture by the same": picture([0.0, 2.0], 7),
            "of an event": hash_str_to_int64(key(TOKENS)),
        }
    )
)
