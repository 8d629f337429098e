"""Distances in a chain from features of its pairs (as in AlphaFold): triangles, attention along rows, and recycling.

conformance judge folding.py:parallelize
"""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

from conformance.subjects import ParallelConfig, subject

KINDS, LENGTH, PAIR, HIDDEN, BINS = 20, 7, 10, 8, 6
Chains = dict[str, Tensor]


class Triangles(nn.Module):
    """Each pair learns from both pairs that it makes a triangle with, which begin or end with its residues."""

    def __init__(self, *, is_outgoing: bool) -> None:
        super().__init__()
        self.is_outgoing = is_outgoing
        self.norm, self.between = nn.LayerNorm(PAIR), nn.LayerNorm(HIDDEN)
        self.sides, self.gates = nn.Linear(PAIR, 2 * HIDDEN), nn.Linear(PAIR, 2 * HIDDEN)
        self.gate, self.out = nn.Linear(PAIR, PAIR), nn.Linear(HIDDEN, PAIR)

    def forward(self, z: Tensor, is_known: Tensor) -> Tensor:
        """Return an update of the shape of `z`, (chains, LENGTH, LENGTH, PAIR)."""
        z = self.norm(z)
        left, right = (self.sides(z) * self.gates(z).sigmoid() * is_known[..., None].to(z.dtype)).chunk(2, -1)
        formula = "bikc,bjkc->bijc" if self.is_outgoing else "bkic,bkjc->bijc"
        return cast("Tensor", self.out(self.between(torch.einsum(formula, left, right))) * self.gate(z).sigmoid())


class Block(nn.Module):
    """Triangles of both kinds, attention along rows, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.outgoing, self.incoming = Triangles(is_outgoing=True), Triangles(is_outgoing=False)
        self.norm, self.qkv, self.out = nn.LayerNorm(PAIR), nn.Linear(PAIR, 3 * PAIR), nn.Linear(PAIR, PAIR)
        self.bias = nn.Linear(PAIR, 2, bias=False)
        self.network = nn.Sequential(nn.LayerNorm(PAIR), nn.Linear(PAIR, 20), nn.ReLU(), nn.Linear(20, PAIR))

    def forward(self, z: Tensor, is_known: Tensor) -> Tensor:
        """Return a tensor of the shape of `z`."""
        z = z + self.outgoing(z, is_known)
        z = z + self.incoming(z, is_known)
        y = self.norm(z)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, -1)).permute(3, 0, 1, 4, 2, 5)
        hidden = torch.zeros(is_known.shape, dtype=z.dtype).masked_fill(~is_known, -1e4)
        bias = self.bias(y).permute(0, 3, 1, 2)[:, None] + hidden[:, :, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        z = z + self.out(attended.transpose(2, 3).flatten(3))
        return cast("Tensor", z + self.network(z))


class Folding(nn.Module):
    """Pairs from residues and their distance in the chain, blocks, and bins of distances in space."""

    recycles = 1

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(KINDS, PAIR), nn.Embedding(KINDS, PAIR)
        self.along = nn.Embedding(2 * LENGTH - 1, PAIR)
        self.recycled = nn.LayerNorm(PAIR)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bins = nn.Linear(PAIR, BINS)

    def computed(self, z: Tensor, is_known: Tensor) -> Tensor:
        """Return pairs behind all blocks, which are computed again in backward."""
        for block in self.blocks:
            z = checkpoint(block, z, is_known, use_reentrant=False)
        return z

    def forward(self, residues: Tensor, is_residue: Tensor) -> Tensor:
        """Return logits (chains, LENGTH, LENGTH, BINS) of the pairs' distances, the same in both orders."""
        is_known = is_residue[:, :, None] & is_residue[:, None]
        steps = torch.arange(LENGTH)
        first = self.left(residues)[:, :, None] + self.right(residues)[:, None]
        first = first + self.along(steps[:, None] - steps + LENGTH - 1)
        z = torch.zeros_like(first)
        with torch.no_grad():
            for _ in range(self.recycles):
                z = self.computed(first + self.recycled(z), is_known)
        z = self.computed(first + self.recycled(z.detach()), is_known)
        return cast("Tensor", self.bins(z + z.transpose(1, 2)))


def chains(generator: torch.Generator) -> Chains:
    """Return chains of unequal length, of which some distances are measured."""
    lengths = torch.randint(3, LENGTH + 1, (2, 1), generator=generator)
    is_residue = torch.arange(LENGTH) < lengths
    is_measured = torch.rand(2, LENGTH, LENGTH, generator=generator) < 0.7
    is_measured[:, 0, 1] = True
    is_pair = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) & is_residue[:, :, None] & is_residue[:, None]
    bins = torch.randint(BINS, (2, LENGTH, LENGTH), generator=generator)
    return {
        "residues": torch.randint(KINDS, (2, LENGTH), generator=generator),
        "is_residue": is_residue,
        "labels": bins.masked_fill(~(is_measured & is_pair), -100),
    }


def distance_loss(model: nn.Module, batch: Chains) -> Tensor:
    """Return the cross entropy, summed over measured pairs."""
    logits = model(batch["residues"], batch["is_residue"]).float()
    return F.cross_entropy(logits.flatten(0, 2), batch["labels"].flatten(), reduction="sum")


@subject(
    model=Folding,
    loss=distance_loss,
    batch=chains,
    optimizer=lambda parameters: Adam(parameters, lr=1e-3, betas=(0.9, 0.99), eps=1e-6),
    offload=True,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Folding, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard the modules of triangles, the rest of each block, and the layers outside."""
    for block in model.blocks:
        for triangles in (cast("Block", block).outgoing, cast("Block", block).incoming):
            fully_shard(triangles, mesh=mesh, **config.policies)
        fully_shard(block, mesh=mesh, **config.policies)
    fully_shard(model, mesh=mesh, **config.policies)
    return model
