"""What lossy codecs for pages cost in exactness: the reference engine goes on from pages that were encoded and decoded.

The model computes prompts exactly and goes on greedily. Then, for each codec, the prompt's pages are stored and loaded
through it, and the same tokens are computed again on top of them. Told are the error of keys and values, that of logits
(beside their own spread, and the median gap between the two best ones), and how often the most likely token is the
same. `none` is the control: no loss, no error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np
import torch

from kvstore.connector.blocks.cache_config import KVCacheConfig
from kvstore.connector.reference.batch import BatchedSequence
from kvstore.connector.reference.kv_cache import KVCache
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.connector.reference.workload import prompt_of, read_excerpt
from kvstore.gpu.codec import CODECS
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.quantized import QuantizedKV

BLOCK_SIZE = 16


def go_on(
    model: Llama, cache: KVCache, blocks: list[int], start: int, tokens: Sequence[int], count: int
) -> torch.Tensor:
    """Logits of `count` tokens, one after the other, behind a context of `start`: of those given, then of the best."""
    given = list(tokens)
    rows = []
    for step in range(count):
        with torch.inference_mode():
            rows.append(model([BatchedSequence(given[step : step + 1], start + step, [blocks])], cache)[0])
        if len(given) < count:
            given.append(int(rows[-1].argmax()))
    return torch.stack(rows)


def measure(model: Llama, prompt: list[int], answer: int) -> list[dict[str, float | str]]:
    """One prompt by every codec."""
    full = (len(prompt) - 1) // BLOCK_SIZE
    context = full * BLOCK_SIZE
    length = full + -(-(answer + 1) // BLOCK_SIZE) + 1
    cache = KVCache(KVCacheConfig(2 * length + 1, model.config.cache_groups(BLOCK_SIZE)))
    blocks, others = list(range(1, length + 1)), list(range(length + 1, 2 * length + 1))
    with torch.inference_mode():
        model([BatchedSequence(prompt[:context], 0, [blocks])], cache)
    exact = go_on(model, cache, blocks, context, prompt[context : context + 1], answer)
    forced = [prompt[context], *exact.argmax(1).tolist()][:answer]
    plain = cache.pages(0, model.config.num_kv_heads)
    original = [np.zeros(plain.page_bytes, np.uint8) for _ in range(full)]
    plain.gather(blocks[:full], original)
    kv = torch.from_numpy(np.stack(original)).view(torch.float32)
    best = exact.topk(2).values
    rows: list[dict[str, float | str]] = []
    for name in ("none", *CODECS):
        through: PagedKV | QuantizedKV = plain if name == "none" else QuantizedKV(plain, name)
        pages = [np.zeros(through.page_bytes, np.uint8) for _ in range(full)]
        through.gather(blocks[:full], pages)
        through.scatter(pages, others[:full])
        back = [np.zeros(plain.page_bytes, np.uint8) for _ in range(full)]
        plain.gather(others[:full], back)
        lossy = torch.from_numpy(np.stack(back)).view(torch.float32)
        logits = go_on(model, cache, others, context, forced, answer)
        rows.append(
            {
                "codec": name,
                "size": through.page_bytes / plain.page_bytes,
                "kv_error": float((lossy - kv).norm() / kv.norm()),
                "logit_rms": float((logits - exact).square().mean().sqrt()),
                "logit_max": float((logits - exact).abs().max()),
                "logit_spread": float(exact.std(dim=1).mean()),
                "logit_gap": float(best[:, 0].sub(best[:, 1]).median()),
                "same_token": float((logits.argmax(1) == exact.argmax(1)).float().mean()),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6, help="prompts of the conversation excerpt (default: 6)")
    parser.add_argument("--answer", type=int, default=32, help="tokens computed behind each (default: 32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    model = Llama(LlamaConfig(seed=2))
    turns = read_excerpt()[: options.prompts]
    rows = []
    for number, turn in enumerate(turns):
        print(f"prompt {number + 1} of {len(turns)}", file=sys.stderr, flush=True)
        rows += measure(model, prompt_of(turn, 96, model.config.vocab_size), options.answer)
    summary = []
    for name in ("none", *CODECS):
        own = [row for row in rows if row["codec"] == name]
        mean = {key: float(np.mean([row[key] for row in own])) for key in own[0] if key != "codec"}
        mean["logit_max"] = max(float(row["logit_max"]) for row in own)
        summary.append({"codec": name, **mean})
    if options.json:
        print(json.dumps({"prompts": len(turns), "answer": options.answer, "rows": summary}, indent=2))
        return
    print("codec  size   KV error  logits: rms     max  spread    gap  same token")
    for row in summary:
        print(
            f"{row['codec']:5}  {row['size']:.3f}  {row['kv_error']:8.4f}  {row['logit_rms']:11.4f}"
            f"  {row['logit_max']:6.3f}  {row['logit_spread']:6.3f}  {row['logit_gap']:5.3f}  {row['same_token']:9.1%}"
        )


if __name__ == "__main__":
    main()
