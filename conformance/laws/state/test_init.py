"""INIT: every tensor is initialised independently of the mesh, with every strategy of building a model."""

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.experiments.build import build_with_ledger, sample_with_torch
from conformance.instruments.facts import FULL_LAYOUT
from conformance.judge.law import law
from conformance.oracles.frozen import trained
from conformance.oracles.initialisation import building_memory, initial_weights, mean_bound, specified, spread_bounds
from conformance.oracles.pipeline import held_by
from conformance.oracles.reference import initial_model
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.run.record import Record

RANDOM_DTENSOR = "https://docs.pytorch.org/docs/stable/distributed.tensor.html#random-operations"
TIED = "https://docs.pytorch.org/docs/stable/notes/serialization.html#preserve-storage-sharing"
FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
TO_EMPTY = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.to_empty"


@law("INIT-1", where="implementation = fsdp2", gaps=["large-models"], reference=TO_EMPTY)
def test_to_empty_leaves_no_poison_after_initialisation(run: Run, cell: Cell) -> None:
    """Every element of every parameter and buffer, persistent or not, MUST be initialised after `to_empty`.

    The memory was filled with NaN first, so a forgotten tensor cannot pass for a clean page.
    """
    model = initial_model(cell.config)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for facts in run(cell).ranks:
        names = held_by(facts.mesh_coordinate.get("pp", 0), tensors, cell.config).keys()
        assert facts.poisoned.keys() == names, f"rank {facts.rank} poisoned other tensors than the model has"
        survivors = {name: number for name, number in facts.surviving_poison.items() if number}
        compare.count(
            sum(survivors.values()),
            name="elements left uninitialised",
            expected=0,
            detail=f"rank {facts.rank}: {survivors}",
            unit=f"of {sum(facts.poisoned.values())} elements",
        )
    poisoned = sum(sum(facts.poisoned.values()) > 0 for facts in run(cell).ranks)
    compare.count(poisoned, name="ranks with poison", expected=cell.world_size, unit="ranks")


@law("INIT-2", where="implementation = fsdp2", gaps=["large-models"], reference=TO_EMPTY)
def test_initial_weights_do_not_depend_on_the_mesh(run: Run, cell: Cell) -> None:
    """Every initial tensor MUST equal the one-process initialisation in every bit, on every mesh.

    Full tensors are assembled from the ranks' shards; one of each layout is gathered by `DTensor.full_tensor`. Wrong if
    shards sample the same numbers, a layout is permuted, or a padded row is lost.
    """
    record, model, parameters = run(cell), initial_model(cell.config), initial_weights(cell.config)
    compare.bits(record.select("initial/parameter/"), parameters, name="initial parameters")
    gathered = record.select("initial/gathered/")
    missing = _layouts(record, parameters) - _layouts(record, gathered)
    compare.count(len(missing), name="layouts that were not gathered", expected=0, detail=str(missing), unit="layouts")
    compare.bits(gathered, {name: parameters[name] for name in gathered}, name="initial parameters, gathered")
    for rank, shards in enumerate(record.shards):
        buffers = {key.removeprefix("initial/buffer/"): t for key, t in shards.items() if "initial/buffer/" in key}
        compare.bits(buffers, dict(model.named_buffers()), name=f"initial buffers of rank {rank}")


@law("INIT-3", where="implementation = fsdp2", gaps=["integer-model", "large-models"], reference=FULLY_SHARD)
def test_initial_weights_are_independent_and_as_specified(run: Run, cell: Cell) -> None:
    """Different shards of a parameter, and different parameters, MUST hold different random numbers, with the mean and
    the standard deviation that the configuration gives; ranks that hold the same shard MUST hold the same bits.

    Wrong if ranks sample from the same state, a layer is a copy of another, or a scale is forgotten.
    """
    record = run(cell)
    _require_distinct_shards(record)
    tensors = record.select("initial/parameter/")
    for (name, tensor), (other, value) in combinations(tensors.items(), 2):
        if tensor.shape == value.shape and bool((tensor == value).all()):
            raise ConformanceFailure(f"{name} and {other} begin with the same numbers")
    for name, tensor in tensors.items():
        mean, std = specified(cell.config.model, name)
        deviations = (tensor.double() - mean) / std
        average, spread = float(deviations.mean()), float(deviations.square().mean())
        bound, (least, most) = mean_bound(tensor.numel()), spread_bounds(tensor.numel())
        unit = "standard deviations"
        compare.between(average, -bound, bound, name="mean of initial weights", detail=name, unit=unit, kind="rounding")
        unit = "of that specified"
        compare.between(
            spread, least, most, name="variance of initial weights", detail=name, unit=unit, kind="rounding"
        )


def _layouts(record: Record, parameters: Mapping[str, Tensor]) -> set[tuple[torch.Size, str]]:
    """Return the shape and the layout of each of these parameters, from a rank that holds it."""
    layouts = {name: layout for facts in record.ranks for name, layout in facts.layouts.items()}
    return {(tensor.shape, layouts.get(name, FULL_LAYOUT)) for name, tensor in parameters.items()}


def _require_distinct_shards(record: Record) -> None:
    __tracebackhide__ = True
    for name in record.parameters:
        by_layout: dict[str, set[str]] = {}
        for facts, shards in zip(record.ranks, record.shards, strict=True):
            if name in facts.parameters and shards[f"layout/{name}"].numel():
                fingerprint = facts.fingerprints[f"initial/parameter/{name}"]
                by_layout.setdefault(facts.layouts[name], set()).add(fingerprint)
        if any(len(fingerprints) > 1 for fingerprints in by_layout.values()):
            raise ConformanceFailure(f"{name}: ranks that hold the same shard begin with different numbers")
        different = set().union(*by_layout.values())
        unit = "shards of a parameter"
        compare.count(len(different), name="different shards", expected=len(by_layout), detail=name, unit=unit)


@law(
    "INIT-4",
    where="init != meta and implementation = fsdp2",
    gaps=["second-build", "large-models"],
    reference=FULLY_SHARD,
)
def test_init_strategies_end_in_the_same_state(run: Run, cell: Cell) -> None:
    """A model sharded before or after initialisation, at once or layer by layer, sampled or loaded, MUST end with the
    same weights, buffers, groups, shards and dtypes.

    Wrong if a strategy leaves a tensor behind, shards it differently, or samples in another order.
    """
    record, usual = run(cell), run(cell.but(init="meta", weights="safetensors"))
    for kind in ("parameter", "buffer"):
        key = f"initial/{kind}/"
        compare.bits(record.select(key), usual.select(key), name=f"initial {kind}s")
    for facts, expected in zip(record.ranks, usual.ranks, strict=True):
        for what in ("parameters", "layouts", "dtypes", "shared_parameters"):
            if getattr(facts, what) != getattr(expected, what):
                raise ConformanceFailure(f"rank {facts.rank}: other {what} than a model that was built on meta")


@law("INIT-5", where="implementation = fsdp2", gaps=["large-models"], reference=TO_EMPTY)
def test_poison_is_seen_in_every_tensor(run: Run, cell: Cell) -> None:
    """Before initialisation INIT-1 MUST, as a control, see every element of every parameter and buffer as forgotten.

    Each rank also counts poison before anything is initialised: INIT-1 would find that count at the end if
    `init_weights`, or the rule of one buffer, were left out.
    """
    for facts in run(cell).ranks:
        missed = {name: number for name, number in facts.poisoned.items() if facts.noticed_poison.get(name) != number}
        compare.count(len(missed), name="tensors in which poison goes unseen", expected=0, detail=f"{missed}", unit="")
        assert sum(facts.noticed_poison.values()) > 0, f"rank {facts.rank} materialised nothing"


@law(
    "INIT-6",
    where="model = deep and features <= 2 and implementation = fsdp2",
    gaps=["pipelines"],
    reference=FULLY_SHARD,
)
def test_peak_memory_of_building(measure: Measure, cell: Cell) -> None:
    """A rank that builds a model MUST hold at most its shards and one full parameter (`meta`, `checkpoint`), its shards
    and one layer (`layerwise`), or the full model (`full`), and at least the minimum of that strategy.

    Measured by torch's allocator reports. Wrong if a full model, or a second copy of it, is there at any time.
    """
    for rank, memory in enumerate(measure(build_with_ledger, cell)):
        least, most = building_memory(cell.config, memory.held_bytes, on_device=memory.on_device)
        name, detail = "peak while building", f"rank {rank}"
        compare.between(memory.peak_bytes, least, most, name=name, detail=detail, unit="bytes")


@law("INIT-7", where="implementation = fsdp2", gaps=["large-models"], reference=TIED)
def test_tied_weights_stay_tied(run: Run, cell: Cell) -> None:
    """A tied weight MUST be one parameter after building and after training, and belong to the optimizer once, or not
    at all if it is frozen.

    Values alone do not tell: two parameters with the same numbers differ after the first step. Without tying, no two
    names MUST share a parameter.
    """
    tied = [["tok_embeddings.weight", "output.weight"]] if cell.tied_embeddings else []
    for facts in run(cell).ranks:
        for when, shared in facts.shared_parameters.items():
            if shared != tied:
                raise ConformanceFailure(f"rank {facts.rank}, {when}: names of one parameter {shared}, expected {tied}")
        owned = [name for group in facts.optimizer_groups for name in group.parameters]
        name = "tok_embeddings.weight"
        holds = len(held_by(facts.mesh_coordinate.get("pp", 0), trained({name: 1}, cell.config), cell.config))
        compare.count(owned.count(name), name="embedding in the optimizer", expected=holds, unit="times")


@law("INIT-8", where="features = 0 and world <= 4", reference=RANDOM_DTENSOR)
def test_torch_nn_init_samples_each_shard_independently(measure: Measure, cell: Cell) -> None:
    """`torch.nn.init` on sharded parameters MUST sample different numbers for different shards, and the same for
    copies.

    The trainer does not rely on it (INIT-2). Wrong if every rank samples from the same state: the full weight is then
    one block, repeated.
    """
    ranks = measure(sample_with_torch, cell)
    for name in ranks[0].shards:
        pairs = {(facts.layouts[name], facts.shards[name]) for facts in ranks}
        layouts = {layout for layout, _ in pairs}
        compare.count(len(pairs), name="different samples", expected=len(layouts), detail=name, unit="shards")
    for name in ranks[0].shards:
        layouts, shards = ({getattr(facts, kind)[name] for facts in ranks} for kind in ("layouts", "shards"))
        compare.count(len(shards), name="different shards", expected=len(layouts), detail=name, unit="shards")
