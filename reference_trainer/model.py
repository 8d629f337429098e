"""Llama-style decoder without any knowledge of parallelism.

Sub-modules see either all heads and features (one process) or their tensor-parallel share: head counts are read off the
tensors, never off the configuration.
Sources: RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864, SwiGLU arXiv:2002.05202, grouped-query attention
arXiv:2305.13245.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn

from reference_trainer import integer_model
from reference_trainer.config import ModelConfig


def rope_table(config: ModelConfig, *, device: torch.device | str | None = None) -> Tensor:
    """Return cosines and sines of the rotary embedding, fp32 of shape (2, max_seq_len, head_dim / 2).

    They are computed in fp64 and rounded once, so that the table does not depend on the device's `cos`.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.max_seq_len, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_theta**-exponents)
    return torch.stack((angles.cos(), angles.sin())).to(dtype=torch.float32, device=device)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs (x[i], x[i + head_dim/2]) by the angle of their position.

    `x` has shape (batch, seq_len, heads, head_dim), `table` is that of `rope_table`. The rotation is computed in the
    table's dtype or the tensor's, whichever is wider, and rounded to the tensor's once.
    """
    cos, sin = table[:, : x.shape[1]].unsqueeze(2)
    low, high = x.to(torch.promote_types(x.dtype, table.dtype)).chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(x.dtype)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Return causal attention, of the shape and dtype of `q`: (batch, seq_len, heads, head_dim).

    `k` and `v` may have fewer heads; each of them serves a group of heads of `q`.
    """
    q, k = apply_rope(q, table), apply_rope(k, table)
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return out.transpose(1, 2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all of one shape and dtype."""
    return F.silu(gate) * up


class Arithmetic(NamedTuple):
    """Functions and norms between the linear layers."""

    norm: type[nn.RMSNorm]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """Function of q, k, v and the RoPE table that returns a tensor of q's shape, (batch, seq_len, heads, head_dim)."""
    combine: Callable[[Tensor, Tensor], Tensor]
    """Function that makes one hidden layer of the feed-forward network's two, all of one shape."""


ARITHMETIC = {
    "float": Arithmetic(nn.RMSNorm, softmax_attention, swiglu),
    "integer": Arithmetic(integer_model.Scale, integer_model.linear_attention, torch.add),
}


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = ARITHMETIC[config.arithmetic].attend
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wo = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Mix activations of shape (batch, seq_len, dim) along the sequence."""
        batch, seq, _ = x.shape
        q, k, v = (proj(x).view(batch, seq, -1, self.head_dim) for proj in (self.wq, self.wk, self.wv))
        mixed: Tensor = self.wo(self.attend(q, k, v, table).reshape(batch, seq, -1))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.combine = ARITHMETIC[config.arithmetic].combine
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=config.bias)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, seq_len, dim), each position by itself."""
        out: Tensor = self.w2(self.combine(self.w1(x), self.w3(x)))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = ARITHMETIC[config.arithmetic].norm
        self.attention_norm = norm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = norm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.recompute: Callable[..., Tensor] | None = None
        """Function that calls another, keeps only some of its activations for backward and recomputes the others."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Map activations of shape (batch, seq_len, dim), with activation checkpointing if it is switched on."""
        # Checkpointing inside forward keeps FSDP's hooks, which sit on the block, outside of the recomputation, and
        # parameter names free of a wrapper's prefix.
        return self.recompute(self.layer, x, table) if self.recompute else self.layer(x, table)

    def layer(self, x: Tensor, table: Tensor) -> Tensor:
        """Map activations of shape (batch, seq_len, dim)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), table))
        out: Tensor = x + self.dropout(self.feed_forward(self.ffn_norm(x)))
        return out


class Transformer(nn.Module):
    """Language model from tokens to logits."""

    rope_table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = ARITHMETIC[config.arithmetic].norm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()
        # Not persistent: recomputed, never loaded. Whoever materialises the model must fill it (see init_weights).
        empty_table = torch.empty(2, config.max_seq_len, config.head_dim // 2, dtype=torch.float32)
        self.register_buffer("rope_table", empty_table, persistent=False)

    def tie_weights(self) -> None:
        """Give embedding and output one weight again after `to_empty` or tensor parallelism replaced parameters."""
        if self.config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    @property
    def blocks(self) -> list[Block]:
        """Layers, with their type."""
        return cast("list[Block]", list(self.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 of shape (batch, seq_len), to logits (batch, seq_len, vocab_size) in the compute dtype."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rope_table)
        logits: Tensor = self.output(self.norm(x))
        return logits
