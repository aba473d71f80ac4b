"""A small Llama over a paged KV cache, with weights from a seed: what the reference engine runs.

RMSNorm, rotary embeddings, grouped-query attention and SwiGLU, in float32. Its parameters carry the names and shapes of
``transformers``' ``LlamaForCausalLM``, so that one state dict fits both.

Some of its layers may look back over a window only, or be recurrent instead: then it has several cache groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from kvstore.connector.blocks.cache_config import KVCacheGroupSpec
from kvstore.connector.blocks.grouping import get_kv_cache_groups
from kvstore.connector.blocks.specs import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstore.connector.reference.attention import PagedAttention
from kvstore.connector.reference.batch import BatchedSequence
from kvstore.connector.reference.kv_cache import DTYPE, KVCache
from kvstore.connector.reference.recurrence import GatedRecurrence, PagedStates
from kvstore.errors import ConfigError
from kvstore.gpu.layout import PAGE_FORMAT
from kvstore.layout import Layout

LayerType = Literal["full", "sliding", "recurrent"]

STATE_FORMAT = "layer-state/1"
"""What a layout's ``format`` says where a page is one state of each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The model's size. The defaults prefill some 1,000 tokens a second on two cores.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    vocab_size: int = 2048
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_layers: int = 7
    num_heads: int = 16
    num_kv_heads: int = 4
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    seed: int = 0
    """Of the weights: equal seeds and sizes give equal weights."""
    layer_types: tuple[LayerType, ...] = ()
    """One a layer; empty: all of them ``"full"``."""
    sliding_window: int = 0
    """Tokens that a token of a ``"sliding"`` layer attends to, itself included."""
    sliding_num_kv_heads: int = 0
    """Of ``"sliding"`` layers; 0: as many as the others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or ("full",) * self.num_layers)
        if len(self.layer_types) != self.num_layers or not set(self.layer_types) <= {"full", "sliding", "recurrent"}:
            raise ConfigError(
                f"layer_types must name 'full', 'sliding' or 'recurrent' for each of {self.num_layers} layers,"
                f" got {self.layer_types}"
            )
        if "sliding" in self.layer_types and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.hidden_size % (2 * self.num_heads) or any(self.num_heads % self.kv_heads(t) for t in self.layer_types):
            raise ConfigError(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_heads {self.num_heads},"
                f" and that one of num_kv_heads {self.num_kv_heads} (sliding layers: {self.kv_heads('sliding')})"
            )

    @property
    def head_size(self) -> int:
        """Elements a head."""
        return self.hidden_size // self.num_heads

    def kv_heads(self, layer_type: LayerType) -> int:
        """Heads of keys and values in layers of this type."""
        return (self.sliding_num_kv_heads if layer_type == "sliding" else 0) or self.num_kv_heads

    def cache_groups(self, block_size: int, mamba_cache_mode: MambaCacheMode = "all") -> tuple[KVCacheGroupSpec, ...]:
        """The model's layers in groups that share a block table.

        Args:
            block_size: tokens a block; where the pages of two groups differ in size, blocks of one become longer.
            mamba_cache_mode: which states of recurrent layers are kept; see :class:`MambaSpec`.
        """
        specs = {
            layer_name(index): self._spec(kind, block_size, mamba_cache_mode)
            for index, kind in enumerate(self.layer_types)
        }
        return get_kv_cache_groups(specs)

    def layouts(self, groups: Sequence[KVCacheGroupSpec]) -> tuple[Layout, ...]:
        """What makes this model's pages interchangeable, group by group. The name says everything that the weights come
        from, and hence the pages.

        Args:
            groups: as :meth:`cache_groups` made them.
        """
        revision = (
            f"vocab {self.vocab_size}, heads {self.num_heads}, theta {self.rope_theta:g},"
            f" eps {self.rms_norm_eps:g}, seed {self.seed}"
        )
        if set(self.layer_types) != {"full"}:
            layers = ",".join(self.layer_types)
            kv_heads = f"{self.num_kv_heads}/{self.kv_heads('sliding')}"
            revision += f", window {self.sliding_window}, kv heads {kv_heads}, layers {layers}"
        layouts = []
        for number, group in enumerate(groups):
            kind = self.layer_types[_layer_index(group.layer_names[0])]
            recurrent = kind == "recurrent"
            layouts.append(
                Layout(
                    model=f"reference-llama-{self.num_layers}x{self.hidden_size}x{self.intermediate_size}",
                    revision=revision,
                    block_size=group.kv_cache_spec.block_size,
                    page_bytes=group.page_bytes,
                    dtype=str(DTYPE).removeprefix("torch."),
                    layers=len(group.layer_names),
                    kv_heads=0 if recurrent else self.kv_heads(kind),
                    head_size=0 if recurrent else self.head_size,
                    format=STATE_FORMAT if recurrent else PAGE_FORMAT,
                    group=number,
                )
            )
        return tuple(layouts)

    def _spec(self, kind: LayerType, block_size: int, mamba_cache_mode: MambaCacheMode) -> KVCacheSpec:
        if kind == "recurrent":
            state_bytes = self.hidden_size * DTYPE.itemsize
            return MambaSpec(block_size=block_size, state_bytes=state_bytes, mamba_cache_mode=mamba_cache_mode)
        token_bytes = 2 * self.kv_heads(kind) * self.head_size * DTYPE.itemsize
        if kind == "sliding":
            return SlidingWindowSpec(block_size=block_size, token_bytes=token_bytes, sliding_window=self.sliding_window)
        return FullAttentionSpec(block_size=block_size, token_bytes=token_bytes)


def layer_name(index: int) -> str:
    """What the cache calls a layer."""
    return f"layers.{index}"


def _layer_index(name: str) -> int:
    return int(name.rpartition(".")[2])


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, kind: LayerType) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_size = config.kv_heads(kind) * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: PagedAttention, kv: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(1, (-1, self.head_size)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = attend(kv, _rotate(query, rotation), _rotate(key, rotation), value)
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class _Layer(nn.Module):
    """Attention or recurrence, then the MLP."""

    def __init__(self, config: LlamaConfig, kind: LayerType) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if kind == "recurrent":
            self.recurrence = GatedRecurrence(config.hidden_size)
        else:
            self.self_attn = _Attention(config, kind)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: PagedAttention | PagedStates,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        normed = self.input_layernorm(x)
        if isinstance(batch, PagedStates):
            x = x + self.recurrence(normed, batch, rows)
        else:
            # A row is a block: its keys, then its values.
            kv = rows.view(len(rows), 2, batch.block_size, -1, self.self_attn.head_size).transpose(0, 1)
            x = x + self.self_attn(normed, rotation, batch, kv)
        output: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class _Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, kind) for kind in config.layer_types)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The model. Weights are made from the configuration's seed.

    Random weights as they are usually drawn give answers that hardly depend on the prompt: near-uniform attention
    averages the context away, and the same token comes out again and again. Here queries and keys are scaled up, so
    that each head attends to few tokens, and so are values, so that what it finds weighs as much as the token itself.
    """

    _frequencies: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no default weights: making them would take longer than making ours
            self.model = _Decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(DTYPE).to_empty(device="cpu")
        self._draw_weights()
        half = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        self.register_buffer("_frequencies", 1.0 / config.rope_theta**half, persistent=False)
        self.requires_grad_(requires_grad=False)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.lm_head.weight.device

    def forward(self, sequences: Sequence[BatchedSequence], cache: KVCache) -> torch.Tensor:
        """Compute the new tokens of some sequences, and the logits behind the last one of each.

        Args:
            sequences: what to compute; their new KV and states are written to ``cache``.
            cache: of this model's groups.

        Returns:
            ``(sequences, vocab_size)`` float32.
        """
        positions = torch.cat([torch.arange(s.context_len, s.context_len + len(s.token_ids)) for s in sequences])
        angles = torch.outer(positions.float(), self._frequencies)[:, None]
        rotation = torch.cos(angles), torch.sin(angles)
        batches = [_batch(sequences, number, group.kv_cache_spec) for number, group in enumerate(cache.groups)]
        token_ids = torch.tensor([token for s in sequences for token in s.token_ids])
        x = self.model.embed_tokens(token_ids)
        for index, layer in enumerate(self.model.layers):
            name = layer_name(index)
            x = layer(x, rotation, batches[cache.group_of[name]], cache.rows[name])
        last = torch.tensor([len(s.token_ids) for s in sequences]).cumsum(0) - 1
        logits: torch.Tensor = self.lm_head(self.model.norm(x[last]))
        return logits

    @torch.no_grad()
    def _draw_weights(self) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, weight in self.named_parameters():
            kind = name.split(".")[-2]
            if weight.dim() == 1:
                weight.fill_(1.0)
            elif kind == "embed_tokens":
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                weight.normal_(0.0, _GAINS.get(kind, 1.0) / math.sqrt(weight.shape[1]), generator=generator)


_GAINS = {"q_proj": 2.0, "k_proj": 1.6, "v_proj": 1.5, "o_proj": 1.5}
"""How much larger than unit variance a projection's output is."""


def _batch(sequences: Sequence[BatchedSequence], group: int, spec: KVCacheSpec) -> PagedAttention | PagedStates:
    """A batch as the layers of one group see it."""
    if isinstance(spec, MambaSpec):
        return PagedStates(sequences, group, spec.block_size)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return PagedAttention(sequences, group, spec.block_size, window)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding: turns element i and element i + head_size / 2 of each head by the token's angle."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
