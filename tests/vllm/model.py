"""Model directories made on the spot: a small Llama with random weights, layers of one kind or two, models with
recurrent layers, with latent attention, and with eyes, LoRA adapters.

The weights are such that answers depend on the whole prompt, and that the best logit is far from the next one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAYERS = 4
WINDOW = 96
"""Tokens that the layers with a window see, in :func:`write_hybrid`."""
PICTURE = 1024
"""The token in whose place a picture stands, for :func:`write_idefics`."""
WORDS = ("{", "}", '"', ":", ",", " ", *"abcdefghijklmnopqrstuvwxyz")
"""Tokens from 2 on that are no numbers, for :func:`write_worded`."""
ENGLISH = (
    "How do can may I you we reset my password router What are is the steps to way of for a an please tell me Could how"
    " ? . , user system place one two three four five six seven eight nine ten eleven twelve"
)
"""Tokens from 2 on, for :func:`write_chat`."""
PICTURE_TOKENS = 64
"""Tokens that a picture takes there, and one at its end and two at its beginning."""

_HIDDEN = 256
_HEADS = 8
_KV_HEADS = 4
_HEAD_SIZE = 32
_LORA_RANK = 8


class _Dice:
    """Random weights, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(*shape, generator=self._generator)

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """What multiplies the size of what goes through it by the gain."""
        return self.normal(rows, columns) * (gain / math.sqrt(columns))


def _write(folder: Path, fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """A new folder with a model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_llama(folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """Write a Llama with full attention into a new folder.

    Args:
        folder: is made.
        seed: of the weights.
        config: fields of ``config.json`` that differ, sizes as well.

    Returns:
        The folder.
    """
    fields = _llama_fields(config)
    return _write(folder, fields, _llama_weights(fields, _Dice(seed)))


def _llama_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
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


def _ends(fields: dict[str, Any], dice: _Dice) -> dict[str, torch.Tensor]:
    """What is before the layers, and behind them."""
    import torch

    hidden, vocabulary = fields["hidden_size"], fields["vocab_size"]
    return {
        "model.embed_tokens.weight": dice.normal(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": dice.linear(vocabulary, hidden, 4.0),
    }


def _perceptron(name: str, fields: dict[str, Any], dice: _Dice) -> dict[str, torch.Tensor]:
    """A layer's part behind its attention, and the norms of both."""
    import torch

    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    return {
        name + "mlp.gate_proj.weight": dice.linear(inner, hidden),
        name + "mlp.up_proj.weight": dice.linear(inner, hidden),
        name + "mlp.down_proj.weight": dice.linear(hidden, inner),
        name + "input_layernorm.weight": torch.ones(hidden),
        name + "post_attention_layernorm.weight": torch.ones(hidden),
    }


def _llama_weights(fields: dict[str, Any], dice: _Dice) -> dict[str, torch.Tensor]:
    hidden = fields["hidden_size"]
    queries = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    weights = _ends(fields, dice)
    for layer in range(fields["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights |= {
            # Sharp attention, and more of it in the sum than of the token itself: what is far away counts.
            name + "self_attn.q_proj.weight": dice.linear(queries, hidden, 1.7),
            name + "self_attn.k_proj.weight": dice.linear(keys, hidden, 1.7),
            name + "self_attn.v_proj.weight": dice.linear(keys, hidden, 2.0),
            name + "self_attn.o_proj.weight": dice.linear(hidden, queries, 2.0),
            **_perceptron(name, fields, dice),
        }
    return weights


def write_hybrid(folder: Path, *, seed: int = 1, window: int = WINDOW) -> Path:
    """Write a Llama whose layers alternate between full attention and a sliding window: two cache groups."""
    layer_types = ["full_attention", "sliding_attention"] * (LAYERS // 2)
    return write_llama(folder, seed=seed, layer_types=layer_types, sliding_window=window)


def write_recurrent(folder: Path, *, seed: int = 1) -> Path:
    """Write a model whose layers alternate between Mamba 2 and full attention: states and blocks."""
    import torch

    heads, head_size, state, kernel = 8, 64, 16, 4
    inner = heads * head_size
    fields = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 1024,
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
    dice = _Dice(seed)
    weights = _ends(fields, dice)
    convolved = inner + 2 * state
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "shared_mlp.input_linear.weight": dice.linear(2 * 512, _HIDDEN),
            name + "shared_mlp.output_linear.weight": dice.linear(_HIDDEN, 512),
            name + "input_layernorm.weight": torch.ones(_HIDDEN),
            name + "post_attention_layernorm.weight": torch.ones(_HIDDEN),
        }
        if layer % 2:
            size = _HEADS * _HEAD_SIZE
            weights |= {
                name + "self_attn.q_proj.weight": dice.linear(size, _HIDDEN, 1.7),
                name + "self_attn.k_proj.weight": dice.linear(size, _HIDDEN, 1.7),
                name + "self_attn.v_proj.weight": dice.linear(size, _HIDDEN, 2.0),
                name + "self_attn.o_proj.weight": dice.linear(_HIDDEN, size, 2.0),
            }
            continue
        weights |= {
            name + "mamba.in_proj.weight": dice.linear(2 * inner + 2 * state + heads, _HIDDEN),
            name + "mamba.conv1d.weight": dice.normal(convolved, 1, kernel) / math.sqrt(kernel),
            name + "mamba.conv1d.bias": torch.zeros(convolved),
            # It forgets little in a thousand tokens.
            name + "mamba.A_log": torch.linspace(-4.0, 0.0, heads),
            name + "mamba.dt_bias": torch.full((heads,), -4.0),
            name + "mamba.D": torch.ones(heads),
            name + "mamba.norm.weight": torch.ones(inner),
            name + "mamba.out_proj.weight": dice.linear(_HIDDEN, inner, 2.0),
        }
    return _write(folder, fields, weights)


def write_deepseek(folder: Path, *, seed: int = 1) -> Path:
    """Write a DeepSeek-V2 without experts: latent attention (MLA), of the only size that vLLM's CPU build computes."""
    import torch

    heads, latent, rotated, unrotated, value = 4, 512, 64, 64, 64
    fields = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 1024,
        "hidden_size": _HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": unrotated,
        "v_head_dim": value,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    dice = _Dice(seed)
    weights = _ends(fields, dice)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "self_attn.q_proj.weight": dice.linear(heads * (unrotated + rotated), _HIDDEN, 1.7),
            name + "self_attn.kv_a_proj_with_mqa.weight": dice.linear(latent + rotated, _HIDDEN, 1.7),
            name + "self_attn.kv_a_layernorm.weight": torch.ones(latent),
            name + "self_attn.kv_b_proj.weight": dice.linear(heads * (unrotated + value), latent, 2.0),
            name + "self_attn.o_proj.weight": dice.linear(_HIDDEN, heads * value, 2.0),
            **_perceptron(name, fields, dice),
        }
    return _write(folder, fields, weights)


def write_idefics(folder: Path, *, seed: int = 1) -> Path:
    """Write an Idefics 3, which is a Llama that sees: a tower of one layer before it, and what a picture and its text
    go through on their way there. (LLaVA and most others need a ``torchvision`` for CPUs, which PyPI does not have.)"""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    width, patch, shuffled = 64, 14, 2
    side = patch * shuffled * math.isqrt(PICTURE_TOKENS)
    text = _llama_fields({"vocab_size": 1088})
    fields = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": PICTURE,
        "scale_factor": shuffled,
        "text_config": text,
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": patch,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    dice = _Dice(seed)
    weights = {
        name.replace("model.", "model.text_model.", 1): each for name, each in _llama_weights(text, dice).items()
    }
    tower = "model.vision_model."
    layer = tower + "encoder.layers.0."
    weights |= {
        tower + "embeddings.patch_embedding.weight": dice.linear(width, 3 * patch * patch).view(width, 3, patch, patch),
        tower + "embeddings.patch_embedding.bias": torch.zeros(width),
        tower + "embeddings.position_embedding.weight": dice.normal((side // patch) ** 2, width),
        "model.connector.modality_projection.proj.weight": dice.linear(_HIDDEN, width * shuffled**2),
    }
    for name in (layer + "layer_norm1", layer + "layer_norm2", tower + "post_layernorm"):
        weights |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}
    linear = {
        **{f"{layer}self_attn.{which}_proj": (width, width) for which in ("q", "k", "v", "out")},
        layer + "mlp.fc1": (2 * width, width),
        layer + "mlp.fc2": (width, 2 * width),
    }
    for name, (rows, columns) in linear.items():
        weights |= {f"{name}.weight": dice.linear(rows, columns), f"{name}.bias": torch.zeros(rows)}
    _write(folder, fields, weights)
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words = {str(token): token for token in range(PICTURE)} | {word: PICTURE + n for n, word in enumerate(special)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), additional_special_tokens=special
    ).save_pretrained(folder)
    pictures = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": side},
        "max_image_size": {"longest_edge": side},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": PICTURE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def write_worded(folder: Path, *, seed: int = 1) -> Path:
    """Write a Llama with a tokenizer, of whose tokens each is a character of JSON or a number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    write_llama(folder, seed=seed)
    words = ["<s>", "</s>", *WORDS]
    numbers = (str(number) for number in range(1024 - len(words)))
    names = {word: token for token, word in enumerate([*words, *numbers])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(names, unk_token="<s>")), bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def write_chat(folder: Path, *, seed: int = 1) -> Path:
    """Write a Llama with a tokenizer of English words, and how turns are told to it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    write_llama(folder, seed=seed)
    words = ["<s>", "</s>", *ENGLISH.split()]
    names = {word: token for token, word in enumerate(words)}
    names |= {f"w{token}": token for token in range(len(words), 1024)}
    tokenizer = Tokenizer(WordLevel(names, unk_token="<s>"))
    tokenizer.pre_tokenizer = Whitespace()
    told = "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=told
    ).save_pretrained(folder)
    return folder


def write_lora(folder: Path, *, seed: int = 7) -> Path:
    """Write a LoRA adapter for the Llama, large enough to change answers."""
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
    dice = _Dice(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, rows in (("q_proj", _HEADS * _HEAD_SIZE), ("v_proj", _KV_HEADS * _HEAD_SIZE)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}."
            weights[name + "lora_A.weight"] = dice.linear(_LORA_RANK, _HIDDEN)
            weights[name + "lora_B.weight"] = dice.linear(rows, _LORA_RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
