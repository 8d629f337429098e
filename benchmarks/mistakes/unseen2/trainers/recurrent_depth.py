"""Language model that thinks in depth: a core layer is repeated, at first without gradient, then with checkpoints.

    conformance judge recurrent_depth.py:train

Own loop: gradients are clipped by the two functions of which clip_grad_norm_ is made.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from conformance.subjects import LoopConfig, own_loop

VOCAB, DIM, TOKENS, SILENT, SEEN = 33, 16, 8, 2, 2
Text = dict[str, Tensor]


class Layer(nn.Module):
    """Causal attention and a gated network between four norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-6) for _ in range(4))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.norms[1](x + self.out(y))
        gate, value = self.up(self.norms[2](x)).chunk(2, -1)
        return cast("Tensor", self.norms[3](x + self.down(F.silu(gate) * value)))


class Core(nn.Module):
    """Layer that sees its own state beside the text."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.layer = nn.Linear(2 * DIM, DIM, bias=False), Layer()

    def forward(self, state: Tensor, text: Tensor) -> Tensor:
        """Return the next state, (samples, tokens, DIM)."""
        return cast("Tensor", self.layer(self.adapter(torch.cat([state, text], -1))))


class RecurrentDepth(nn.Module):
    """Prelude, core and coda."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.prelude, self.core, self.coda = Layer(), Core(), Layer()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB), given an initial state (samples, tokens, DIM)."""
        text = self.prelude(self.embedding(tokens))
        state = state.to(text.dtype)
        with torch.no_grad():
            for _ in range(SILENT):
                state = self.core(state, text)
        for _ in range(SEEN):
            state = checkpoint(self.core, state, text, use_reentrant=False)
        return cast("Tensor", self.head(self.coda(state)))


def texts(generator: torch.Generator) -> Text:
    """Return tokens, the next ones, of which padding does not count, and noise as the initial state."""
    tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
    ends = torch.randint(2, TOKENS + 1, (4, 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].masked_fill(torch.arange(TOKENS) >= ends, -100),
        "state": torch.randn(4, TOKENS, DIM, generator=generator),
    }


def text_loss(model: nn.Module, text: Text) -> Tensor:
    """Return the cross entropy, summed over tokens."""
    logits = model(text["tokens"], text["state"])
    return F.cross_entropy(logits.float().flatten(0, 1), text["labels"].flatten(), reduction="sum")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the fused AdamW."""
    return AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), fused=True)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a total norm; returns the norm before."""
    norm = nn.utils.get_total_norm([cast("Tensor", p.grad) for p in parameters], error_if_nonfinite=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@own_loop(
    model=RecurrentDepth,
    tied_model=lambda: RecurrentDepth(tied=True),
    loss=text_loss,
    batch=texts,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    offload=True,
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train with the mean over all tokens of a step."""
    model = cast("RecurrentDepth", config.model())
    mesh = config.device_mesh()
    fully_shard(model.prelude, mesh=mesh, **config.policies)
    fully_shard(model.core, mesh=mesh, **config.policies, reshard_after_forward=False)
    fully_shard(model.coda, mesh=mesh, **config.policies, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, **config.policies)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    for micro_batches in config.steps:
        counts = torch.tensor(float(sum(int((text["labels"] != -100).sum()) for text in micro_batches)))
        dist.all_reduce(counts)
        losses = []
        for index, text in enumerate(micro_batches):
            cast("FSDPModule", model).set_is_last_backward(index == len(micro_batches) - 1)
            cast("FSDPModule", model).set_requires_gradient_sync(index == len(micro_batches) - 1)
            losses.append(text_loss(model, text) / counts)
            torch.autograd.backward(losses[-1] * dist.get_world_size())
        norm = clip_gradients(trained, config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack([loss.detach() for loss in losses]).sum()
        dist.all_reduce(total)
        yield {"loss": total, "grad_norm": norm}
