"""Models made on the spot: a Llama, and a DeepSeek with latent attention, of a few layers with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 1024


def write_llama(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Four layers, eight heads, four KV heads; the same weights for the same seed. No tokenizer."""
    hidden, layers, heads, kv_heads, head_size = 256, 4, 8, 4, 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    source = torch.Generator().manual_seed(seed)
    element = getattr(torch, dtype)

    def weights(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=source) * deviation).to(element)

    tensors = {"model.embed_tokens.weight": weights(VOCABULARY, hidden, 1.0)}
    for layer in range(layers):
        base = f"model.layers.{layer}."
        attention = base + "self_attn."
        tensors[attention + "q_proj.weight"] = weights(heads * head_size, hidden, 1.5 * hidden**-0.5)
        tensors[attention + "k_proj.weight"] = weights(kv_heads * head_size, hidden, 1.5 * hidden**-0.5)
        tensors[attention + "v_proj.weight"] = weights(kv_heads * head_size, hidden, 2 * hidden**-0.5)
        tensors[attention + "o_proj.weight"] = weights(hidden, heads * head_size, 2 * (heads * head_size) ** -0.5)
        tensors[base + "mlp.gate_proj.weight"] = weights(2 * hidden, hidden, hidden**-0.5)
        tensors[base + "mlp.up_proj.weight"] = weights(2 * hidden, hidden, hidden**-0.5)
        tensors[base + "mlp.down_proj.weight"] = weights(hidden, 2 * hidden, (2 * hidden) ** -0.5)
        tensors[base + "input_layernorm.weight"] = torch.ones(hidden, dtype=element)
        tensors[base + "post_attention_layernorm.weight"] = torch.ones(hidden, dtype=element)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=element)
    tensors["lm_head.weight"] = weights(VOCABULARY, hidden, 3 * hidden**-0.5)
    return _write(folder, config, tensors)


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
