"""Decoder of any current family: its sizes, and the parameters and matrix products that follow from them.

Names are those of the trainer's model, which is the special case without the last fields. Experts are stacked into one
tensor for each product, as torchtitan and transformers have them, so that FSDP shards them by expert.
Sources: transformers/models/FAMILY/modeling_*.py; latent attention arXiv:2405.04434 section 2.1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from reference_trainer.checks import Config, UsageError, at_least_one, not_negative, require, require_each
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

Norm = Literal["q_norm", "k_norm", "post_attention_norm", "post_ffn_norm"]
"""Norms that the trainer's blocks do not have: of each head's queries and keys, and of the results of both parts."""
_ATTENTION = ("wq", "wk", "wv", "wo")
_FEED_FORWARD = ("w1", "w2", "w3")
Biased = Literal["wq", "wk", "wv", "wo", "wq_a", "wkv_a", "w1", "w2", "w3", "router", "experts"]
"""Modules that can have a bias."""


class Experts(Config, frozen=True, kw_only=True):
    """Mixture of experts in place of a block's feed-forward network."""

    number: int
    active: int
    """Experts of each token."""
    ffn_dim: int
    """Width of the hidden layer of each expert."""
    shared_ffn_dim: int = 0
    """Width of the hidden layers of all experts that see every token; 0: there are none."""
    dense_layers: tuple[int, ...] = ()
    """Blocks that have the plain feed-forward network."""

    def __post_init__(self) -> None:
        require_each(self, "experts.", "number active ffn_dim", at_least_one, "at least 1")
        require_each(self, "experts.", "shared_ffn_dim", not_negative, "at least 0")
        require(self.active <= self.number, f"experts.active is {self.active}, of {self.number} experts")


class Latents(Config, frozen=True, kw_only=True):
    """Latent attention: queries, keys and values are projected from vectors of low rank."""

    q_rank: int = 0
    """Rank of the queries' latent vector; 0: queries are projected at once."""
    kv_rank: int
    nope_dim: int
    """Width of the part of a head's queries and keys that is not rotated."""
    rope_dim: int
    """Width of the part that is; the keys' is one for all heads."""
    v_dim: int
    """Width of a head's values."""

    def __post_init__(self) -> None:
        require_each(self, "latents.", "q_rank", not_negative, "at least 0")
        require_each(self, "latents.", "kv_rank nope_dim rope_dim v_dim", at_least_one, "at least 1")


class Product(NamedTuple):
    """Linear layer, or those of all experts."""

    name: str
    """Path of the module in its block."""
    outputs: int
    inputs: int
    active: int = 1
    """Products that each token takes part in."""


class Decoder(Config, frozen=True, kw_only=True):
    """Sizes of a decoder (RMSNorm, grouped-query or latent attention with RoPE, gated feed-forward or experts)."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    max_seq_len: int = 0
    """Length of a RoPE table that is kept; it has at least the length of a sample."""
    tied_embeddings: bool = False
    head_dim: int | None = None
    """Width of a head; None: dim / n_heads."""
    norms: tuple[Norm, ...] = ()
    biases: tuple[Biased, ...] = ()
    sinks: bool = False
    """Each head has a parameter that its softmax adds to the scores."""
    experts: Experts | None = None
    latents: Latents | None = None
    not_counted: tuple[str, ...] = ()
    """Parts of the model that these sizes leave out."""

    def __post_init__(self) -> None:
        sizes = "vocab_size dim n_layers n_heads n_kv_heads ffn_dim"
        require_each(self, "model.", sizes, at_least_one, "at least 1")
        require_each(self, "model.", "max_seq_len", not_negative, "at least 0")
        require(
            self.head_dim is not None or self.dim % self.n_heads == 0,
            f"model.dim {self.dim} is not divisible by n_heads {self.n_heads}: set head_dim",
        )
        require(self.head_width % 2 == 0, f"head dimension {self.head_width} must be even for RoPE")
        require(
            self.n_heads % self.n_kv_heads == 0,
            f"model.n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}",
        )

    @property
    def head_width(self) -> int:
        """Width of a head's queries and keys."""
        if self.latents:
            return self.latents.nope_dim + self.latents.rope_dim
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        return self.latents.v_dim if self.latents else self.head_width

    @property
    def rope_width(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.latents.rope_dim if self.latents else self.head_width

    def products(self, layer: int) -> list[Product]:
        """Return the matrix products with weights of a block, in the order of forward."""
        return [*self._attention(), *self._feed_forward(layer)]

    def _attention(self) -> Iterator[Product]:
        queries, latents = self.n_heads * self.head_width, self.latents
        if latents is None:
            keys = self.n_kv_heads * self.head_width
            yield Product("attention.wq", queries, self.dim)
            yield from (Product(f"attention.{name}", keys, self.dim) for name in ("wk", "wv"))
        else:
            if latents.q_rank:
                yield Product("attention.wq_a", latents.q_rank, self.dim)
            yield Product("attention.wq", queries, latents.q_rank or self.dim)
            yield Product("attention.wkv_a", latents.kv_rank + latents.rope_dim, self.dim)
            yield Product("attention.wkv", self.n_heads * (latents.nope_dim + latents.v_dim), latents.kv_rank)
        yield Product("attention.wo", self.dim, self.n_heads * self.value_width)

    def _feed_forward(self, layer: int) -> Iterator[Product]:
        experts = self.experts_of(layer)
        if experts is None:
            yield from self._gated("feed_forward", self.ffn_dim)
            return
        yield Product("feed_forward.router", experts.number, self.dim)
        yield Product("feed_forward.experts.w13", 2 * experts.ffn_dim, self.dim, experts.active)
        yield Product("feed_forward.experts.w2", self.dim, experts.ffn_dim, experts.active)
        if experts.shared_ffn_dim:
            yield from self._gated("feed_forward.shared", experts.shared_ffn_dim)

    def _gated(self, name: str, width: int) -> Iterator[Product]:
        yield from (Product(f"{name}.{weight}", width, self.dim) for weight in ("w1", "w3"))
        yield Product(f"{name}.w2", self.dim, width)

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a block, None for one that has the plain feed-forward network."""
        return None if self.experts and layer in self.experts.dense_layers else self.experts

    def sizes_of_experts(self) -> Iterator["Decoder"]:
        """Yield this decoder with the hidden layer of its experts, and with that of the shared ones, if it has any."""
        for width in (self.experts.ffn_dim, self.experts.shared_ffn_dim) if self.experts else ():
            if width:
                yield replace(self, ffn_dim=width)

    def _norm_widths(self) -> dict[str, int]:
        """Widths of the norms of a block."""
        inner = {"q_norm": self.head_width, "k_norm": self.head_width}
        widths = {"attention_norm": self.dim, "ffn_norm": self.dim}
        widths |= {f"attention.{name}" if name in inner else name: inner.get(name, self.dim) for name in self.norms}
        if self.latents:
            ranks = {"q_a_norm": self.latents.q_rank, "kv_a_norm": self.latents.kv_rank}
            widths |= {f"attention.{name}": rank for name, rank in ranks.items() if rank}
        return widths

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters of the model on one device."""
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        for layer in range(self.n_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self._block(layer)}
        shapes["norm.weight"] = (self.dim,)
        return shapes if self.tied_embeddings else shapes | {"output.weight": (self.vocab_size, self.dim)}

    def _block(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, width in self._norm_widths().items():
            yield f"{name}.weight", (width,)
        if self.sinks:
            yield "attention.sinks", (self.n_heads,)
        for name, outputs, inputs, _ in self.products(layer):
            module = name.rpartition(".")[2]
            experts = self.experts_of(layer) if ".experts." in name else None
            stack = (experts.number,) if experts else ()
            yield f"{name}.weight", (*stack, outputs, inputs)
            if ("experts" if stack else module) in self.biases:
                yield f"{name}.bias", (*stack, outputs)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes().values()))

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token passes through: of the experts only those that are active."""
        unused = 0
        for name, (number, *rest) in self.shapes().items():
            if self.experts and ".experts." in name:
                unused += (number - self.experts.active) * math.prod(rest)
        return self.parameters - unused

    def skeleton(self, *, ep: int) -> ModelConfig:
        """Return a model of the trainer with the same embeddings and number of blocks, which FSDP groups equally.

        It has experts where `ep` ranks divide them. Sizes inside of blocks are placeholders that any mesh can shard.
        """
        experts = self.experts if ep > 1 else None
        return ModelConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.dim // 2,
            n_kv_heads=self.dim // 2,
            ffn_dim=self.dim,
            n_experts=experts.number if experts else 0,
            experts_per_token=experts.active if experts else 1,
            max_seq_len=self.max_seq_len,
            tied_embeddings=self.tied_embeddings,
        )

    def as_trainer(self) -> ModelConfig:
        """Return the trainer's model of these sizes. Raises UsageError for a structure that it does not have."""
        if self.experts:
            raise UsageError(
                "--simulate: data alone tells how many rows an expert gets, and fake tensors have none: leave it out"
            )
        lacks = [name for name in ("norms", "sinks", "latents") if getattr(self, name)]
        lacks += ["head_dim"] if self.head_width * self.n_heads != self.dim else []
        lacks += ["biases"] if set(self.biases) not in (set(), {*_ATTENTION, *_FEED_FORWARD}) else []
        if lacks:
            raise UsageError(f"--simulate runs the trainer's model, which has no {', '.join(lacks)}: leave it out")
        fields = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "max_seq_len")
        sizes = {name: getattr(self, name) for name in fields}
        return ModelConfig(**sizes, tied_embeddings=self.tied_embeddings, bias=bool(self.biases))


@dataclass(frozen=True)
class Workload:
    """Decoder in training, with its configuration and mesh."""

    decoder: Decoder
    config: TrainerConfig
    """Configuration of the trainer, with the decoder's `skeleton` as its model."""
    dims: ParallelDims
    checkpointing: str
    """Activations that are kept, a key of `activations.KEPT`; the configuration has the trainer's nearest kind."""
    logits: str
    """Use of logits by the loop, one of `activations.LOGITS`."""
