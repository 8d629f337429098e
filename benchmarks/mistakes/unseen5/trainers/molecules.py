"""Energies of molecules by a graph network: padded graphs, distances, and one layer that passes messages many times.

    conformance judge molecules.py:parallelize

A checkpoint is one plain file of full weights and full state of the optimizer, which rank 0 writes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import NAdam, Optimizer

from conformance.subjects import ParallelConfig, subject

ELEMENTS, ATOMS, WIDTH, CENTRES, ROUNDS = 8, 7, 12, 9, 3
Molecules = dict[str, Tensor]


def molecules(generator: torch.Generator, count: int = 5) -> Molecules:
    """Return elements, of which 0 is no atom, positions, and the energy of each molecule."""
    sizes = torch.randint(3, ATOMS + 1, (count, 1), generator=generator)
    elements = torch.randint(1, ELEMENTS, (count, ATOMS), generator=generator)
    return {
        "elements": elements * (torch.arange(ATOMS) < sizes),
        "positions": 2 * torch.randn(count, ATOMS, 3, generator=generator),
        "energies": 3 * torch.randn(count, generator=generator),
    }


class Messages(nn.Module):
    """Messages between atoms that are near, and the change of each atom by their sum."""

    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, 6, CENTRES))
        self.filter = nn.Sequential(nn.Linear(CENTRES, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))
        self.send, self.receive = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, atoms: Tensor, distances: Tensor, is_edge: Tensor) -> Tensor:
        """Return atoms of the same shape, (molecules, atoms, width)."""
        bumps = (-2 * (distances[..., None] - self.centres).square()).exp()
        messages = self.filter(bumps) * self.send(atoms)[:, None] * is_edge[..., None]
        return atoms + F.silu(self.receive(self.norm(messages.sum(2))))


class Potential(nn.Module):
    """Sum of energies of atoms, which the same layer has changed in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = nn.Embedding(ELEMENTS, WIDTH, padding_idx=0)
        self.messages = Messages()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        self.offsets = nn.Embedding(ELEMENTS, 1, padding_idx=0)

    def forward(self, elements: Tensor, positions: Tensor) -> Tensor:
        """Return one energy for each molecule."""
        is_atom = elements != 0
        distances = (positions[:, :, None] - positions[:, None]).square().sum(-1).clamp(min=1e-6).sqrt()
        is_other = ~torch.eye(elements.shape[1], dtype=torch.bool, device=elements.device)
        is_edge = is_atom[:, :, None] & is_atom[:, None] & is_other
        atoms = self.elements(elements)
        for _ in range(ROUNDS):
            atoms = self.messages(atoms, distances, is_edge)
        energies = (self.energy(atoms) + self.offsets(elements)).squeeze(-1)
        return cast("Tensor", (energies * is_atom).sum(-1))


def energy_loss(model: nn.Module, batch: Molecules) -> Tensor:
    """Return the smooth absolute error, summed over molecules."""
    energies = model(batch["elements"], batch["positions"])
    return F.smooth_l1_loss(energies, batch["energies"], reduction="sum", beta=0.5)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return NAdam with decay of the weights themselves."""
    return NAdam(parameters, lr=3e-3, weight_decay=0.01, decoupled_weight_decay=True)


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Gather all state on rank 0, which writes it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state}, directory / "last.pt")
    dist.barrier()


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Read the file on each rank, which keeps its shards."""
    saved = torch.load(directory / "last.pt", map_location="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=options
    )


def shard(model: Potential, mesh: DeviceMesh, mixed: MixedPrecisionPolicy) -> None:
    """Shard the layer of messages, which stays gathered between its rounds, and the rest."""
    fully_shard(model.messages, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=mixed)


@subject(
    model=Potential,
    loss=energy_loss,
    batch=molecules,
    optimizer=make_optimizer,
    save=save,
    load=load,
    meshes=["dp2", "hsdp2x2"],
)
def parallelize(model: Potential, mesh: DeviceMesh, config: ParallelConfig) -> Potential:
    """Shard the potential as its training does."""
    shard(model, mesh, config.mixed_precision)
    return model
