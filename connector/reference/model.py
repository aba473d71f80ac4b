"""A small Llama over a paged KV cache, with weights from a seed: what the reference engine runs.

RMSNorm, rotary embeddings, grouped-query attention and SwiGLU, in float32. Its parameters carry the names and shapes of
``transformers``' ``LlamaForCausalLM``, so that one state dict fits both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from connector.reference.attention import BatchedSequence, PagedAttention
from gpu.layout import PAGE_FORMAT
from kvstore.errors import ConfigError
from kvstore.layout import Layout

DTYPE = torch.float32
"""Of weights, KV and logits, whatever torch's default is."""


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

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_heads {self.num_heads},"
                f" and that one of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def head_size(self) -> int:
        """Elements a head."""
        return self.hidden_size // self.num_heads

    def layout(self, block_size: int, *, tenant: str = "") -> Layout:
        """What makes this model's pages interchangeable: its name says everything that its weights come from."""
        page_bytes = self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * DTYPE.itemsize
        return Layout(
            model=f"reference-llama-{self.num_layers}x{self.hidden_size}x{self.intermediate_size}",
            revision=(
                f"vocab {self.vocab_size}, heads {self.num_heads}, theta {self.rope_theta:g},"
                f" eps {self.rms_norm_eps:g}, seed {self.seed}"
            ),
            block_size=block_size,
            page_bytes=page_bytes,
            dtype=str(DTYPE).removeprefix("torch."),
            layers=self.num_layers,
            kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            format=PAGE_FORMAT,
            tenant=tenant,
        )

    def new_kv_cache(self, num_blocks: int, block_size: int) -> list[torch.Tensor]:
        """One tensor of zeros a layer, ``(2, num_blocks, block_size, kv_heads, head_size)`` float32."""
        shape = (2, num_blocks, block_size, self.num_kv_heads, self.head_size)
        return [torch.zeros(shape, dtype=DTYPE) for _ in range(self.num_layers)]


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_size = config.num_kv_heads * config.head_size
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
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: PagedAttention, kv: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend, kv)
        output: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class _Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The model. Weights are made from the configuration's seed.

    Random weights as they are usually drawn give answers that hardly depend on the prompt: near-uniform attention
    averages the context away, and the same token comes out again and again. Here queries and keys are scaled up, so
    that each head attends to few tokens, and so are values, so that what it finds weighs as much as the token itself.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no default weights: making them would take longer than making ours
            self.model = _Decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(DTYPE).to_empty(device="cpu")
        self._draw_weights()
        half = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        self._frequencies = 1.0 / config.rope_theta**half
        self.requires_grad_(requires_grad=False)

    def forward(
        self, sequences: Sequence[BatchedSequence], kv_cache: Sequence[torch.Tensor], block_size: int
    ) -> torch.Tensor:
        """Compute the new tokens of some sequences, and the logits behind the last one of each.

        Args:
            sequences: what to compute; their new KV is written to ``kv_cache``.
            kv_cache: as :meth:`LlamaConfig.new_kv_cache` makes it.
            block_size: tokens a block of it.

        Returns:
            ``(sequences, vocab_size)`` float32.
        """
        attend = PagedAttention(sequences, block_size)
        angles = torch.outer(attend.positions.float(), self._frequencies)[:, None]
        rotation = torch.cos(angles), torch.sin(angles)
        token_ids = torch.tensor([token for s in sequences for token in s.token_ids])
        x = self.model.embed_tokens(token_ids)
        for layer, kv in zip(self.model.layers, kv_cache, strict=True):
            x = layer(x, rotation, attend, kv)
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


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding: turns element i and element i + head_size / 2 of each head by the token's angle."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
