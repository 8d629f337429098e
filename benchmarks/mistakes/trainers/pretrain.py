"""Pretraining with an own loop, in the style of a train module that counts tokens over all ranks.

    conformance judge benchmarks/mistakes/trainers/pretrain.py:Pretraining

Gradients are accumulated after their reduction and clipped by a norm that the trainer computes; embedding and head may
be tied; after each step the trainer evaluates; the data-parallel mesh may have replicas.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import StepObserver

VOCAB, DIM, HEADS, LAYERS, SEQ, SAMPLES = 48, 24, 3, 2, 10, 4
Batch = dict[str, Tensor]


class Block(nn.Module):
    """Reordered norms: attention and feed-forward network, each in front of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention_norm(self.out(y))
        return cast("Tensor", x + self.ffn_norm(self.down(F.silu(self.up(x)))))


class Transformer(nn.Module):
    """Decoder with learnt positions."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embeddings, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.init_weights()
        if tied:
            self.lm_head.weight = self.embeddings.weight

    def init_weights(self) -> None:
        """Draw all weights from normal distributions."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embeddings(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.lm_head(self.norm(x)))


class TrainModule:
    """Model and optimizer on one rank, and a step of training."""

    def __init__(self, model: Transformer, optimizer: Optimizer, mesh: DeviceMesh, *, max_grad_norm: float) -> None:
        self.model, self.optimizer, self.max_grad_norm = model, optimizer, max_grad_norm
        self.dp_rank, self.dp_world_size = dist.get_rank(), dist.get_world_size()
        self.shard_group = mesh.get_group(mesh.ndim - 1)
        self.eval_losses: list[float] = []

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return self.dp_rank

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float:
        """Train on the micro-batches of a step; returns the mean loss of a token."""
        batch_num_tokens = self.valid_tokens(micro_batches)
        ce_loss = torch.zeros((), dtype=torch.float64)
        for micro_batch in micro_batches:
            observer.phase("forward", step=step)
            loss = token_loss(self.model, micro_batch)
            observer.phase("backward", step=step)
            (loss * (self.dp_world_size / batch_num_tokens)).backward()  # type: ignore[no-untyped-call]
            ce_loss += loss.detach()
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        grad_norm = self.clip_grads()
        observer.clipped(self.model, norm=grad_norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        observer.phase("idle", step=step)
        self.evaluate(micro_batches[0])
        dist.all_reduce(ce_loss)
        return float(ce_loss) / batch_num_tokens

    def valid_tokens(self, micro_batches: Sequence[Batch]) -> float:
        """Return the number of labels that count in a step, on all ranks."""
        tokens = torch.tensor(float(sum(count(micro_batch) for micro_batch in micro_batches)))
        dist.all_reduce(tokens)
        return float(tokens)

    def clip_grads(self) -> Tensor:
        """Scale gradients down to the limit; returns their norm, over the ranks that shard them."""
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        square = torch.stack([torch.linalg.vector_norm(shard) for shard in shards]).square().sum()
        dist.all_reduce(square, group=self.shard_group)
        total_norm = square.sqrt()
        for shard in shards:
            shard.mul_(torch.clamp(self.max_grad_norm / (total_norm + 1e-6), max=1.0))
        return total_norm

    @torch.no_grad()
    def evaluate(self, micro_batch: Batch) -> None:
        """Keep the perplexity of a batch."""
        loss = token_loss(self.model, micro_batch) / max(count(micro_batch), 1)
        self.eval_losses.append(math.exp(float(loss)))
        cast("FSDPModule", self.model).reshard()

    def save(self, directory: Path) -> None:
        """Save a checkpoint."""
        model, optim = get_state_dict(self.model, self.optimizer)
        state_dict_saver.save({"model": model, "optim": optim}, checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        """Load a checkpoint."""
        model, optim = get_state_dict(self.model, self.optimizer)
        state_dict_loader.load({"model": model, "optim": optim}, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim)


def count(batch: Batch) -> int:
    """Return the number of labels that count."""
    return int((batch["labels"] != -100).sum())


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed cross entropy of a micro-batch."""
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


class Pretraining:
    """The trainer for `conformance judge`, see `conformance.subjects.protocol.Subject`."""

    name = "pretraining"
    shims: Sequence[str] = ()

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": str(torch.__version__)}

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the feature that a cell needs and the trainer lacks, or None."""
        lacking = {"tensor parallelism": "tp" in cell.shape, "offloading": cell.offload}
        return next((f"no {feature}" for feature, is_needed in lacking.items() if is_needed), None)

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model of one process."""
        return Transformer(tied=tied)

    def batch(self, generator: torch.Generator) -> Batch:
        """Return a micro-batch; the prompt's labels do not count."""
        tokens = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
        prompts = torch.randint(0, SEQ - 1, (SAMPLES, 1), generator=generator)
        labels = tokens[:, 1:].masked_fill(torch.arange(SEQ) < prompts, -100)
        return {"input_ids": tokens[:, :-1], "labels": labels}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a micro-batch."""
        return token_loss(model, batch)

    def count(self, batch: Batch) -> int:
        """Return the number of labels that count."""
        return count(batch)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> TrainModule:
        """Shard the model block by block, and make the optimizer."""
        mesh = init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=tuple(cell.shape))
        with torch.device("meta" if cell.init == "meta" else device):
            model = Transformer(tied=cell.tied)
        param_dtype = torch.bfloat16 if cell.precision == "bf16" else None
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if cell.init == "meta":
            model.to_empty(device=device)
            if cell.tied:
                model.lm_head.weight = model.embeddings.weight
            model.init_weights()
        return TrainModule(model, self.make_optimizer(model.parameters()), mesh, max_grad_norm=max_norm)
