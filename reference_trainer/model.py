"""Llama-style decoder without any knowledge of parallelism.

Sub-modules see either all heads and features (one process) or their tensor-parallel share: head counts are read off the
tensors, never off the configuration.
Sources: RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864, SwiGLU arXiv:2002.05202, grouped-query attention
arXiv:2305.13245.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn

from reference_trainer import integer_model
from reference_trainer.config import ModelConfig
from reference_trainer.experts import MixtureOfExperts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        dense = FeedForward(config)
        self.feed_forward: Any = MixtureOfExperts(config, shared=dense) if config.n_experts else dense
        self.dropout = nn.Dropout(config.dropout)
        self.recompute: Callable[..., Tensor] | None = None
        """Function that calls another, keeps only some of its activations for backward and recomputes the rest."""
        self.is_skipped = False
        """True if the next forward passes of training leave the block out."""

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


class StageLayers(NamedTuple):
    """Layers of one stage of a pipeline; the first stage has the embedding as well, the last one norm and output."""

    layers: range
    first: bool
    last: bool


class Transformer(nn.Module):
    """Language model from tokens to logits, or the stages of a pipeline that one rank holds of it.

    Names of parameters are those of the full model. Embedding, norm and output that a rank does not hold are
    identities, and layers that it does not hold are missing from `layers`.
    """

    tok_embeddings: nn.Embedding
    norm: nn.RMSNorm
    output: nn.Linear
    rope_table: Tensor

    def __init__(self, config: ModelConfig, stages: Sequence[StageLayers] | None = None) -> None:
        super().__init__()
        self.config = config
        held = [StageLayers(range(config.n_layers), first=True, last=True)] if stages is None else stages
        self.is_first, self.is_last = any(stage.first for stage in held), any(stage.last for stage in held)
        absent: Any = nn.Identity()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim) if self.is_first else absent
        self.layers = nn.ModuleDict({str(index): Block(config) for stage in held for index in stage.layers})
        norm = ARITHMETIC[config.arithmetic].norm
        self.norm = norm(config.dim, eps=config.norm_eps) if self.is_last else absent
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False) if self.is_last else absent
        self.tie_weights()
        self.expert_mesh: DeviceMesh | None = None
        """Mesh over which experts are divided, if they are."""
        # In a tuple, which registers no modules: those of the stages are this model's own.
        self.stages = tuple(Stage(self, stage) for stage in stages or ())
        # Not persistent: recomputed, never loaded. Whoever materialises the model must fill it (see init_weights).
        empty_table = torch.empty(2, config.max_seq_len, config.head_dim // 2, dtype=torch.float32)
        self.register_buffer("rope_table", empty_table, persistent=False)

    def tie_weights(self) -> None:
        """Give embedding and output one weight again after `to_empty` or tensor parallelism replaced parameters."""
        if self.config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    @property
    def blocks(self) -> dict[int, Block]:
        """Layers that are held, by index."""
        return {int(index): cast("Block", block) for index, block in self.layers.items()}

    @property
    def ends(self) -> dict[str, nn.Module]:
        """Embedding, norm and output by name, if this rank holds them."""
        ends = {"tok_embeddings": self.tok_embeddings, "norm": self.norm, "output": self.output}
        return {name: module for name, module in ends.items() if not isinstance(module, nn.Identity)}

    @property
    def mixtures(self) -> list[MixtureOfExperts]:
        """Feed-forward networks of experts, of all blocks that are held."""
        networks = [block.feed_forward for block in self.blocks.values()]
        return [network for network in networks if isinstance(network, MixtureOfExperts)]

    def balance_loss(self) -> Tensor | float:
        """Return the balance loss of the last forward, summed over its tokens and all blocks: 0 without experts."""
        return sum(mixture.balance_loss for mixture in self.mixtures if mixture.balance_loss is not None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 of shape (batch, seq_len), to logits (batch, seq_len, vocab_size) in the compute dtype."""
        for mixture in self.mixtures:
            mixture.balance_loss = None
        return _through(self, tokens, self.rope_table)


class Stage(nn.Module):
    """One stage of a pipeline: consecutive layers of a model, whose modules it shares."""

    tok_embeddings: nn.Embedding
    norm: nn.RMSNorm
    output: nn.Linear

    def __init__(self, model: Transformer, stage: StageLayers) -> None:
        super().__init__()
        absent: Any = nn.Identity()
        self.tok_embeddings = model.tok_embeddings if stage.first else absent
        self.layers = nn.ModuleDict({str(index): model.layers[str(index)] for index in stage.layers})
        self.norm, self.output = (model.norm, model.output) if stage.last else (absent, absent)
        self._rope_table: Callable[[], Tensor] = lambda: model.rope_table  # whose buffer `to_empty` replaces

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or activations, of shape (batch, seq_len, dim), to activations or logits."""
        return _through(self, x, self._rope_table())


def _through(model: Transformer | Stage, x: Tensor, table: Tensor) -> Tensor:
    """Map tokens or activations through all layers that a model or a stage holds."""
    x = model.tok_embeddings(x)
    for layer in model.layers.values():
        if not (layer.is_skipped and layer.training):
            x = layer(x, table)
    out: Tensor = model.output(model.norm(x))
    return out
