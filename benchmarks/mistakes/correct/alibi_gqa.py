"""Transformer with ALiBi and grouped queries, in which two layers share keys and values."""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW

from conformance.subjects import subject

VOCAB, DIM, HEADS, GROUPS, TOKENS = 33, 24, 4, 2, 7


def slopes() -> Tensor:
    """Return the slope of each head, (HEADS,)."""
    return 2.0 ** -torch.arange(1, HEADS + 1)


class KeysValues(nn.Module):
    """Projection to keys and values of fewer heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, 2 * GROUPS * DIM // HEADS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (samples, HEADS, tokens, features)."""
        keys, values = self.project(x).unflatten(-1, (2, GROUPS, -1)).permute(2, 0, 3, 1, 4)
        return keys.repeat_interleave(HEADS // GROUPS, 1), values.repeat_interleave(HEADS // GROUPS, 1)


class Layer(nn.Module):
    """Attention with a penalty for distance, and a feed-forward network."""

    bias: Tensor

    def __init__(self, keys_values: KeysValues | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM, bias=False)
        self.queries, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.keys_values = keys_values
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, shared: tuple[Tensor, Tensor] | None, bias: Tensor) -> tuple[Tensor, Any]:
        """Return features, and the keys and values of this layer or those that were given."""
        y = self.norm1(x)
        shared = self.keys_values(y) if self.keys_values is not None else shared
        keys, values = cast("tuple[Tensor, Tensor]", shared)
        queries = self.queries(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias.to(queries.dtype))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square()), shared


class Decoder(nn.Module):
    """Layers, of which the second has the keys and values of the first one."""

    bias: Tensor

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer(KeysValues()), Layer(None), Layer(KeysValues())])
        self.norm = nn.LayerNorm(DIM)
        self.logits = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.logits.weight = self.tokens.weight
        self.register_buffer("bias", torch.empty(HEADS, TOKENS, TOKENS), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Give values to all parameters and to the buffer."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.2)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | nn.Embedding):
                module.reset_parameters()
        distances = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
        bias = torch.where(distances > 0, float("-inf"), distances * slopes()[:, None, None])
        self.bias.copy_(bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x, shared = self.tokens(tokens), None
        for layer in self.layers:
            x, shared = layer(x, shared, self.bias)
        return cast("Tensor", self.logits(self.norm(x)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return tokens and labels."""
    tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (4, 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(torch.arange(TOKENS) >= lengths, -100)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the summed cross entropy, with a small penalty on the normaliser of each label that counts."""
    logits, labels = model(data["tokens"]).flatten(0, 1).float(), data["labels"].flatten()
    normaliser = (torch.logsumexp(logits, -1).square() * (labels != -100)).sum()
    return F.cross_entropy(logits, labels, reduction="sum") + 1e-3 * normaliser


def make_optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
    """Return AdamW, in which weights of matrices alone decay."""
    by_kind: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in parameters:
        by_kind[parameter.ndim > 1].append(parameter)
    vectors, matrices = by_kind
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=2e-3)


@subject(
    model=Decoder,
    tied_model=lambda: Decoder(tied=True),
    loss=loss,
    batch=batch,
    optimizer=make_optimizer,
    initialize=Decoder.initialise,  # type: ignore[arg-type]
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Decoder, mesh: DeviceMesh, config: Any) -> tuple[nn.Module, AdamW]:
    """Shard layers, the last of which stays gathered."""
    options = {"mesh": mesh, "mp_policy": config.mixed_precision}
    for index, layer in enumerate(model.layers):
        fully_shard(layer, reshard_after_forward=index < len(model.layers) - 1, **options)
    fully_shard(model, **options)
    first, second, _ = (cast("FSDPModule", layer) for layer in model.layers)
    first.set_modules_to_forward_prefetch([second])
    return model, make_optimizer(model.parameters())
