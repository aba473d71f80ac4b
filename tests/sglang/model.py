"""Models made on the spot: a Llama, and a DeepSeek with latent attention, of a few layers with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
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
        tensors |= _dense(base, hidden, weights, element)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=element)
    tensors["lm_head.weight"] = weights(VOCABULARY, hidden, 3 * hidden**-0.5)
    return _write(folder, config, tensors)


def write_deepseek(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Three layers, eight heads, no experts; of each token and layer a latent of 32 numbers and a rotated key of 16 are
    kept. No tokenizer."""
    hidden, layers, heads = 256, 3, 8
    latent, rotated, plain, value = 32, 16, 24, 32
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "v_head_dim": value,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "type": "yarn",  # on a CPU SGLang rotates in no other way
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "moe_layer_freq": 1,
        "first_k_dense_replace": layers,  # so that no layer has experts
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
        tensors[attention + "q_proj.weight"] = weights(heads * (plain + rotated), hidden, 1.5 * hidden**-0.5)
        tensors[attention + "kv_a_proj_with_mqa.weight"] = weights(latent + rotated, hidden, 1.5 * hidden**-0.5)
        tensors[attention + "kv_a_layernorm.weight"] = torch.ones(latent, dtype=element)
        tensors[attention + "kv_b_proj.weight"] = weights(heads * (plain + value), latent, 1.5 * latent**-0.5)
        tensors[attention + "o_proj.weight"] = weights(hidden, heads * value, 2 * (heads * value) ** -0.5)
        tensors |= _dense(base, hidden, weights, element)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=element)
    tensors["lm_head.weight"] = weights(VOCABULARY, hidden, 3 * hidden**-0.5)
    return _write(folder, config, tensors)


def _dense(
    base: str, hidden: int, weights: Callable[[int, int, float], torch.Tensor], element: torch.dtype
) -> dict[str, torch.Tensor]:
    """What a layer has behind its attention."""
    return {
        base + "mlp.gate_proj.weight": weights(2 * hidden, hidden, hidden**-0.5),
        base + "mlp.up_proj.weight": weights(2 * hidden, hidden, hidden**-0.5),
        base + "mlp.down_proj.weight": weights(hidden, 2 * hidden, (2 * hidden) ** -0.5),
        base + "input_layernorm.weight": torch.ones(hidden, dtype=element),
        base + "post_attention_layernorm.weight": torch.ones(hidden, dtype=element),
    }


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
