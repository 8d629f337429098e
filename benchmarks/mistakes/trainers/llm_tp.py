"""Language model with FSDP2 and tensor parallelism, in the style of a pretraining recipe for Llama.

    conformance judge benchmarks/mistakes/trainers/llm_tp.py:parallelize

RoPE tables, RMSNorm on shards of the sequence, and a clip function for gradients on several meshes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from conformance.subjects import subject

VOCAB, DIM, HEADS, LAYERS, SEQ = 64, 32, 4, 2, 12


def rope_tables() -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary embeddings, each (SEQ, DIM // HEADS // 2)."""
    half = DIM // HEADS // 2
    angles = torch.outer(torch.arange(SEQ).float(), 10_000.0 ** (-torch.arange(half) / half))
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features of `x`, (samples, heads, tokens, features)."""
    even, odd = x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM); ranks have some of the heads each."""
        samples, tokens = x.shape[:2]
        q, k, v = (w(x).view(samples, tokens, -1, DIM // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return cast("Tensor", self.wo(y.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        return cast("Tensor", self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    """Attention and feed-forward network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return cast("Tensor", x + self.feed_forward(self.ffn_norm(x)))


class Llama(nn.Module):
    """Small Llama."""

    cos: Tensor
    sin: Tensor

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        cos, sin = rope_tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def init_weights(self) -> None:
        """Give values to parameters and buffers."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm):
                module.reset_parameters()
        cos, sin = rope_tables()
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB) of tokens (samples, tokens)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return cast("Tensor", self.head(self.norm(x)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return token ids and labels; tokens behind the end of a document do not count."""
    tokens = torch.randint(VOCAB, (4, SEQ + 1), generator=generator)
    ends = torch.randint(3, SEQ + 1, (4, 1), generator=generator)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(torch.arange(SEQ) >= ends, -100)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the summed cross entropy."""
    logits = model(data["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1).float(), data["labels"].flatten(), reduction="sum")


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients by their norm over all meshes; returns it."""
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm([cast("Tensor", parameter.grad) for parameter in group])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return cast("Tensor", total)


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Save a distributed checkpoint."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Load a distributed checkpoint."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def apply_tensor_parallelism(model: Llama, mesh: DeviceMesh) -> None:
    """Shard layers over features, and norms over the sequence."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.layers:
        block_plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, block_plan)


@subject(
    model=Llama,
    tied_model=lambda: Llama(tied=True),
    loss=loss,
    batch=batch,
    clip=clip,
    initialize=Llama.init_weights,  # type: ignore[arg-type]
    save=save,
    load=load,
    offload=True,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    meshes=["dp2", "hsdp2x2", "dp2-tp2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Llama, mesh: DeviceMesh, config: Any) -> Llama:
    """Apply tensor parallelism, and shard block by block."""
    if "tp" in (mesh.mesh_dim_names or ()):
        apply_tensor_parallelism(model, mesh["tp"])
        mesh = mesh["dp_shard"]
    options = {"mesh": mesh, "mp_policy": config.mixed_precision, "offload_policy": config.offload_policy}
    for block in model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model
