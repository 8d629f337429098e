"""Language model with grouped queries and norms on queries and keys, under TP with a cross entropy on sharded logits.

    conformance judge gqa_loss_parallel.py:train

Own loop: under tensor parallelism the logits stay sharded over the vocabulary, in `loss_parallel()`.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import AdamW, Optimizer

from conformance.subjects import LoopConfig, own_loop

VOCAB, DIM, HEADS, GROUPS, SEQ, LAYERS = 40, 32, 4, 2, 10, 2
HEAD_DIM = DIM // HEADS
Documents = dict[str, Tensor]


class Attention(nn.Module):
    """Causal attention whose keys and values have fewer heads; queries and keys are normalised by head."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk, self.wv = (nn.Linear(DIM, GROUPS * HEAD_DIM, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6), nn.RMSNorm(HEAD_DIM, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM); ranks have some of the heads each."""
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        k, v = (heads.repeat_interleave(HEADS // GROUPS, 1) for heads in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast("Tensor", self.wo(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention and a gated network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return cast("Tensor", x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Decoder(nn.Module):
    """Decoder without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.head(self.norm(x)))


def documents(generator: torch.Generator) -> Documents:
    """Return tokens and the next ones; those behind the end of a document do not count."""
    tokens = torch.randint(VOCAB, (4, SEQ + 1), generator=generator)
    lengths = torch.randint(2, SEQ + 1, (4, 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(torch.arange(SEQ) >= lengths, -100)}


def token_loss(model: nn.Module, batch: Documents) -> Tensor:
    """Return the cross entropy, summed over tokens."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW."""
    return AdamW(parameters, lr=3e-3, betas=(0.9, 0.95))


def apply_tensor_parallelism(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard heads, features and vocabulary, and the sequence between them."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for block in model.layers:
        block_plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "gate": ColwiseParallel(input_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, block_plan)


@own_loop(
    model=Decoder,
    loss=token_loss,
    batch=documents,
    optimizer=make_optimizer,
    meshes=["dp2", "dp2-tp2"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train with the mean over all tokens of a step."""
    model = cast("Decoder", config.model())
    mesh = dp_mesh = config.device_mesh()
    has_tp = "tp" in config.shape
    if has_tp:
        apply_tensor_parallelism(model, mesh["tp"])
        dp_mesh = mesh["dp_shard"]
    for block in model.layers:
        fully_shard(block, mesh=dp_mesh)
    fully_shard(model, mesh=dp_mesh)
    optimizer = make_optimizer(model.parameters())
    for micro_batches in config.steps:
        tokens = torch.tensor(float(sum(int((batch["labels"] != -100).sum()) for batch in micro_batches)))
        dist.all_reduce(tokens, group=dp_mesh.get_group())
        summed = torch.zeros(())
        for index, batch in enumerate(micro_batches):
            cast("FSDPModule", model).set_requires_gradient_sync(index == len(micro_batches) - 1)
            with loss_parallel() if has_tp else nullcontext():
                loss = token_loss(model, batch)
                (loss * (dp_mesh.size() / tokens)).backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
            summed += loss.full_tensor() if isinstance(loss, DTensor) else loss
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(summed, group=dp_mesh.get_group())
        yield {"loss": summed / tokens, "grad_norm": norm}
