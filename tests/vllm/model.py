"""Model directories made on the spot: a small Llama with random weights, layers of one kind or two, a model with
recurrent layers, LoRA adapters.

The weights are such that answers depend on the whole prompt, and that the best logit is far from the next one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LAYERS = 4
WINDOW = 96
"""Tokens that the layers with a window see, in :func:`write_hybrid`."""

_HIDDEN = 256
_HEADS = 8
_KV_HEADS = 4
_HEAD_SIZE = 32
_LORA_RANK = 8


def write_llama(folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """Write a Llama with full attention into a new folder.

    Args:
        folder: is made.
        seed: of the weights.
        config: fields of ``config.json`` that differ, sizes as well.

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": _HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocabulary = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    queries = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": linear(vocabulary, hidden, 4.0),
    }
    for layer in range(fields["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights |= {
            # Sharp attention, and more of it in the sum than of the token itself: what is far away counts.
            name + "self_attn.q_proj.weight": linear(queries, hidden, 1.7),
            name + "self_attn.k_proj.weight": linear(keys, hidden, 1.7),
            name + "self_attn.v_proj.weight": linear(keys, hidden, 2.0),
            name + "self_attn.o_proj.weight": linear(hidden, queries, 2.0),
            name + "mlp.gate_proj.weight": linear(inner, hidden),
            name + "mlp.up_proj.weight": linear(inner, hidden),
            name + "mlp.down_proj.weight": linear(hidden, inner),
            name + "input_layernorm.weight": torch.ones(hidden),
            name + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_hybrid(folder: Path, *, seed: int = 1, window: int = WINDOW) -> Path:
    """Write a Llama whose layers alternate between full attention and a sliding window: two cache groups."""
    layer_types = ["full_attention", "sliding_attention"] * (LAYERS // 2)
    return write_llama(folder, seed=seed, layer_types=layer_types, sliding_window=window)


def write_recurrent(folder: Path, *, seed: int = 1) -> Path:
    """Write a model whose layers alternate between Mamba 2 and full attention: states and blocks."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    heads, head_size, state, kernel = 8, 64, 16, 4
    inner, vocabulary = heads * head_size, 1024
    fields = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": vocabulary,
        "hidden_size": _HIDDEN,
        "intermediate_size": 512,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,  # pages of attention are larger than states
        "attention_multiplier": _HEAD_SIZE**-0.5,
        "mamba_n_heads": heads,
        "mamba_d_head": head_size,
        "mamba_d_state": state,
        "mamba_d_conv": kernel,
        "mamba_n_groups": 1,
        "mamba_expand": inner // _HIDDEN,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    generator = torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": torch.randn(vocabulary, _HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": linear(vocabulary, _HIDDEN, 4.0),
    }
    convolved = inner + 2 * state
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "shared_mlp.input_linear.weight": linear(2 * 512, _HIDDEN),
            name + "shared_mlp.output_linear.weight": linear(_HIDDEN, 512),
            name + "input_layernorm.weight": torch.ones(_HIDDEN),
            name + "post_attention_layernorm.weight": torch.ones(_HIDDEN),
        }
        if layer % 2:
            size = _HEADS * _HEAD_SIZE
            weights |= {
                name + "self_attn.q_proj.weight": linear(size, _HIDDEN, 1.7),
                name + "self_attn.k_proj.weight": linear(size, _HIDDEN, 1.7),
                name + "self_attn.v_proj.weight": linear(size, _HIDDEN, 2.0),
                name + "self_attn.o_proj.weight": linear(_HIDDEN, size, 2.0),
            }
            continue
        weights |= {
            name + "mamba.in_proj.weight": linear(2 * inner + 2 * state + heads, _HIDDEN),
            name + "mamba.conv1d.weight": torch.randn(convolved, 1, kernel, generator=generator) / math.sqrt(kernel),
            name + "mamba.conv1d.bias": torch.zeros(convolved),
            # It forgets little in a thousand tokens.
            name + "mamba.A_log": torch.linspace(-4.0, 0.0, heads),
            name + "mamba.dt_bias": torch.full((heads,), -4.0),
            name + "mamba.D": torch.ones(heads),
            name + "mamba.norm.weight": torch.ones(inner),
            name + "mamba.out_proj.weight": linear(_HIDDEN, inner, 2.0),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_lora(folder: Path, *, seed: int = 7) -> Path:
    """Write a LoRA adapter for the models above, large enough to change answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _LORA_RANK,
        "lora_alpha": 2 * _LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, rows in (("q_proj", _HEADS * _HEAD_SIZE), ("v_proj", _KV_HEADS * _HEAD_SIZE)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}."
            weights[name + "lora_A.weight"] = torch.randn(_LORA_RANK, _HIDDEN, generator=generator) / math.sqrt(_HIDDEN)
            weights[name + "lora_B.weight"] = torch.randn(rows, _LORA_RANK, generator=generator) / math.sqrt(_LORA_RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
