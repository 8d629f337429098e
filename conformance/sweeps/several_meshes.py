"""Models whose parameters lie on several meshes: gradients, clipping, one step, and one checkpoint.

Any two arrangements of `mesh_blocks` meet in a model, and all of them, on a cell that trains with floating-point
numbers; on one of whole numbers, a cheap one of `smoke`, there is one model of few arrangements.
"""

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import full
from conformance.run.experiment import Needs
from conformance.sweeps.layouts import Layout, difference, distributed, gathered, placed_shard
from conformance.sweeps.mesh_blocks import (
    ARRANGEMENTS,
    COLUMNS,
    EXPERTS,
    FEW,
    ROWS,
    SPMD,
    Arrangements,
    Meshes,
    Model,
    block_name,
    by_mesh,
    combinations_of_blocks,
    expected_gradients,
    name_of,
)
from conformance.sweeps.optimizer_samples import OptimizerSample, optimizer_samples
from conformance.sweeps.optimizers import BOUND_OF_REPLICAS, Numbers, state_faults, stepped
from conformance.sweeps.trials import Swept, Trials, select_samples
from reference_trainer.mesh import fsdp_mesh

ORDERS = (1.0, 2.0, 3.0, math.inf)
FOREACH = (None, True, False)
MAX_NORM = 1.0
_GROUP_LIMIT = timedelta(seconds=10)

NORM_BOUND = 2.0**-40
"""Bound on the relative deviation of norms and of clipped gradients in fp64.

A norm adds at most 2**11 powers that have no error but their own rounding, and takes a root: fewer than 2**12 roundings
by 2**-53, whatever the order of the sum.
"""


class WorldMeshes:
    """Meshes that belong to a mesh of trials, which replaces its process groups after a disagreement."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Meshes] = {}

    def for_trial(self, mesh: DeviceMesh) -> Meshes:
        """Return the meshes over the same ranks, which are made at the first call. A collective."""
        names = mesh.mesh_dim_names or ()
        if names not in self._kept:
            group = dist.new_group(timeout=_GROUP_LIMIT)
            flat = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=(f"{names[0]}_all",))
            self._kept = {names: Meshes(flat, mesh)}
        return self._kept[names]


class _Sweep:
    """Trials of all models of a cell."""

    def __init__(self, rank: RankWorld) -> None:
        self.trials, self.meshes = Trials(fsdp_mesh(rank.mesh)), WorldMeshes()
        self.has_pairs = rank.config.model.arithmetic == "float"
        few = [FEW] if rank.sweep_share < 1.0 else [FEW, SPMD]
        models = combinations_of_blocks() if self.has_pairs else few
        self.models = select_samples(models, name_of, restricted_to=rank.subjects)

    def attempt(
        self, arrangements: Arrangements, kind: str, case: str, call: Callable[[Meshes], Mapping[str, str]]
    ) -> None:
        """Try a case of a model on the meshes of the trials."""
        self.trials.attempt(name_of(arrangements), kind, case, lambda mesh: call(self.meshes.for_trial(mesh)))


@experiment(needs=Needs.TRAINING)
def train(rank: RankWorld) -> Swept:
    """Compute gradients: of one batch, and of two micro-batches of which the last is reduced."""
    sweep = _Sweep(rank)
    for arrangements in sweep.models:
        for backwards in (1, 2):
            kind = f"{backwards} backward passes"
            sweep.attempt(arrangements, kind, "all gradients", partial(_gradient_faults, arrangements, backwards))
    return sweep.trials.swept


def _gradient_faults(arrangements: Arrangements, backwards: int, meshes: Meshes) -> dict[str, str]:
    model = Model(arrangements, meshes)
    assert isinstance(model, FSDPModule)
    for index in range(backwards):
        is_last = index == backwards - 1
        model.set_requires_gradient_sync(is_last)
        model.backward(reduces=is_last)
    expected = {name: backwards * grad for name, grad in expected_gradients(arrangements, meshes).items()}
    return _differing(model, expected, bound=0.0)


def _differing(model: Model, expected: Mapping[str, Tensor], *, bound: float) -> dict[str, str]:
    """Return the arrangements whose gradients are missing or differ from the full ones, with texts. A collective."""
    measured: dict[str, Tensor] = model.gradients()
    faults: dict[str, str] = {}
    for name, wanted in expected.items():
        text = difference(measured[name], wanted, bound=bound) if name in measured else "there is none"
        if text:
            faults.setdefault(f"gradient of {block_name(name, model.arrangements)}", f"{name}: {text}")
    return faults


Clip = Callable[[Model, float, bool | None], Tensor]
"""Function that clips the gradients of a model, from the order of the norm and `foreach`, to the norm."""


def _in_one_call(model: Model, order: float, foreach: bool | None) -> Tensor:
    norm: Tensor = clip_grad_norm_(model.parameters(), MAX_NORM, order, foreach=foreach)
    return norm


def _in_two_calls(model: Model, order: float, foreach: bool | None) -> Tensor:
    parameters = list(model.parameters())
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None], order, foreach=foreach)
    clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=foreach)
    return norm


def _mesh_by_mesh(model: Model, order: float, foreach: bool | None) -> Tensor:
    """Clip by the norm of the norms of each mesh, as trainers do for which torch refuses several meshes."""
    groups = by_mesh(list(model.parameters()))
    norms = [
        full(get_total_norm([p.grad for p in each if p.grad is not None], order, foreach=foreach)) for each in groups
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    for group in groups:
        clip_grads_with_norm_(group, MAX_NORM, norm, foreach=foreach)
    return norm


CLIPPINGS: Mapping[str, Clip] = {
    "clip_grad_norm_": _in_one_call,
    "get_total_norm and clip_grads_with_norm_": _in_two_calls,
    "norm of the norms of each mesh": _mesh_by_mesh,
}


@experiment(needs=Needs.TRAINING, takes_share=True)
def clip(rank: RankWorld) -> Swept:
    """Clip the gradients of each model in each way, with each order of the norm."""
    sweep = _Sweep(rank)
    for arrangements in sweep.models:
        trained = _Trained(arrangements)
        for kind, way in CLIPPINGS.items():
            for order in ORDERS:
                for foreach in FOREACH:
                    call = partial(_clipping_faults, trained, way, order, foreach)
                    sweep.attempt(arrangements, kind, f"{order}-norm, foreach={foreach}", call)
    return sweep.trials.swept


class _Trained:
    """Model with its gradients on the last meshes that were asked for."""

    def __init__(self, arrangements: Arrangements) -> None:
        self.arrangements = arrangements
        self._meshes: Meshes | None = None

    def on(self, meshes: Meshes) -> Model:
        """Return the model with the gradients of one backward pass."""
        if meshes is not self._meshes:
            self._model, self._meshes = Model(self.arrangements, meshes), meshes
            self._model.backward()
            self._gradients = {name: grad.clone() for name, grad in self._model.gradients().items()}
        for name, parameter in self._model.named_parameters():
            parameter.grad = self._gradients[name].clone()
        return self._model


def _clipping_faults(
    trained: _Trained, way: Clip, order: float, foreach: bool | None, meshes: Meshes
) -> dict[str, str]:
    model, gradients = trained.on(meshes), expected_gradients(trained.arrangements, meshes)
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in gradients.values()]), order)
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    measured = full(way(model, order, foreach))
    wanted = {name: factor * grad for name, grad in gradients.items()}
    faults = _differing(model, wanted, bound=NORM_BOUND)
    if abs(measured - norm) > NORM_BOUND * norm:
        faults["norm"] = f"{measured.item()}, expected {norm.item()}"
    return faults


@experiment(needs=Needs.TRAINING, takes_share=True)
def step(rank: RankWorld) -> Swept:
    """Step with each optimizer over the parameters of each model; options with the model of all arrangements alone."""
    sweep = _Sweep(rank)
    for arrangements in sweep.models:
        layouts = _Placed(arrangements)
        for sample in optimizer_samples():
            if _is_tried(sample, arrangements):
                call = partial(_step_faults, sample, layouts)
                sweep.attempt(arrangements, sample.name, "three steps", call)
    return sweep.trials.swept


def _is_tried(sample: OptimizerSample, arrangements: Arrangements) -> bool:
    is_cheap = sample.make.__name__ in ("AdamW", "SGD")
    return arrangements == ARRANGEMENTS or (sample.is_usual and (arrangements not in (FEW, SPMD) or is_cheap))


class _Placed:
    """Meshes and layouts of the weights and biases of a model."""

    def __init__(self, arrangements: Arrangements) -> None:
        self.arrangements = arrangements
        self._meshes: Meshes | None = None

    def on(self, meshes: Meshes) -> list[tuple[DeviceMesh | None, Layout]]:
        """Return the mesh and layout of each parameter; no mesh for plain tensors."""
        if meshes is not self._meshes:
            parameters = Model(self.arrangements, meshes).blocks.parameters()
            self._layouts = [_place_of(p) for p in parameters]
            self._meshes = meshes
        return self._layouts


def _place_of(parameter: Tensor) -> tuple[DeviceMesh | None, Layout]:
    return (parameter.device_mesh, tuple(parameter.placements)) if isinstance(parameter, DTensor) else (None, ())


def _step_faults(sample: OptimizerSample, layouts: _Placed, meshes: Meshes) -> dict[str, str]:
    """Return the faults of this rank: bits of its shards for elementwise optimizers, or else of full tensors."""
    placed = layouts.on(meshes)
    shapes: list[tuple[int, ...]] = [(EXPERTS, ROWS, COLUMNS), (EXPERTS,)] * len(layouts.arrangements)
    if sample.is_muon:  # takes matrices alone
        placed = [each for each in placed[::2] if all(getattr(at, "dim", 0) < 2 for at in each[1])]
        shapes = [(EXPERTS, ROWS)] * len(placed)
    numbers = Numbers.of(shapes, sample, meshes.flat.size())
    measured = stepped(sample, numbers.laid_out(distributed, placed, placed))
    own = numbers.laid_out(placed_shard, placed, placed) if sample.is_elementwise else numbers
    expected = stepped(sample, own)
    has_replicas = any(at.is_replicate() for _, layout in placed for at in layout)
    bound = BOUND_OF_REPLICAS if sample.is_muon and has_replicas else sample.bound or None
    layouts_of_shards = [layout if sample.is_elementwise and mesh else None for mesh, layout in placed]
    return state_faults(measured, expected, layouts_of_shards, bound)


FORMS: Mapping[str, StateDictOptions] = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
}


@experiment(needs=Needs.TRAINING, takes_share=True)
def checkpoint(rank: RankWorld) -> Swept:
    """Save each model after a step, and load it into the model whose arrangements have changed places."""
    sweep = _Sweep(rank)
    for number, arrangements in enumerate(sweep.models):
        for form, options in FORMS.items():
            directory = rank.directory / f"arrangements{number}-{form}"
            call = partial(_checkpoint_faults, arrangements, options, directory)
            sweep.attempt(arrangements, form, "model and AdamW", call)
    return sweep.trials.swept


def _checkpoint_faults(
    arrangements: Arrangements, options: StateDictOptions, directory: Path, meshes: Meshes
) -> dict[str, str]:
    source, optimizer = _stepped(Model(arrangements, meshes))
    exchanged = (*arrangements[1:], arrangements[0])
    target, other = _stepped(Model(exchanged, meshes), scale=-2.0)
    group = meshes.flat.get_group()
    expected = gathered(source, optimizer)
    content: Any = dict(zip(("model", "optimizer"), get_state_dict(source, optimizer, options=options), strict=True))
    if options.full_state_dict:
        into = content
    else:
        save(content, checkpoint_id=directory, process_group=group)
        into = dict(zip(("model", "optimizer"), get_state_dict(target, other, options=options), strict=True))
        load(into, checkpoint_id=directory, process_group=group)
    set_state_dict(target, other, model_state_dict=into["model"], optim_state_dict=into["optimizer"], options=options)
    measured = gathered(target, other)
    wrong = [name for name in expected.keys() | measured.keys() if not _same(measured.get(name), expected.get(name))]
    faults: dict[str, str] = {}
    for name in sorted(wrong):
        before, after = block_name(name, arrangements), block_name(name, exchanged)
        faults.setdefault(f"{_kind(name)} of {before} as {after}", name)
    return faults


def _kind(name: str) -> str:
    return name.rpartition("/")[2] if "/" in name else "parameter"


def _same(measured: Tensor | None, expected: Tensor | None) -> bool:
    return measured is not None and expected is not None and torch.equal(measured, expected)


def _stepped(model: Model, *, scale: float = 1.0) -> tuple[Model, torch.optim.Optimizer]:
    """Return a model after one step of its optimizer, with gradients scaled by a number."""
    model.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= scale
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    optimizer.step()
    return model, optimizer
