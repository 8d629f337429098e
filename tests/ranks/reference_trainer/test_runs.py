"""Trainer on several ranks: precisions, initial weights, and when gradients are reduced. Real runs of cells."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from conformance.assertions.fixtures import Run
from conformance.plan.cells import Cell
from conformance.run.record import Record
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer

ONE_STEP = Cell(steps=1)


def sampled_weights(cell: Cell) -> dict[str, Tensor]:
    """Return the initial weights that `init: meta` samples, fp32 on one process."""
    config = cell.config
    model = Transformer(config.model)
    init_weights(model, seed=config.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def dtypes_of(record: Record, prefix: str) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in record.select(prefix).items()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


# --- gradient synchronisation ----------------------------------------------------------------------------------------


def reductions(record: Record) -> Counter[str]:
    """Count the collectives of one step's backward over data-parallel ranks, by kind."""
    return Counter(
        entry.kind
        for entry in record.ranks[0].collectives
        if entry.phase == "backward" and entry.group.startswith("dp")
    )


@pytest.mark.parametrize(
    ("mesh", "mode", "reduce_scatters", "all_reduces"),
    [("dp2", "last", 4, 0), ("hsdp2x2", "last", 4, 4), ("hsdp2x2", "all-reduce-last", 8, 4)],
)
def test_gradient_sync_after_the_last_micro_batch_gives_the_same_gradients(
    run: Run, mesh: str, mode: str, reduce_scatters: int, all_reduces: int
) -> None:
    """A postponed reduction is issued half as often: there are 4 FSDP groups and 2 micro-batches.

    The model computes integers, so that gradients do not depend on the order in which they are added.
    """
    each = ONE_STEP.but(mesh=mesh, accumulation=2, model="integer")
    expected, actual = run(each), run(each.but(gradient_sync=mode))
    assert reductions(expected)["reduce_scatter"] == 8
    assert reductions(expected)["all_reduce"] == (8 if mesh == "hsdp2x2" else 0)
    assert (reductions(actual)["reduce_scatter"], reductions(actual)["all_reduce"]) == (reduce_scatters, all_reduces)
    assert reductions(actual)["all_gather"] == reductions(expected)["all_gather"]
    gradients = actual.select("step0/gradient/")
    assert gradients.keys() == sampled_weights(each).keys()
    assert_same_bits(gradients, expected.select("step0/gradient/"))


def test_only_replicas_have_an_all_reduce_to_postpone(run: Run) -> None:
    with pytest.raises(ValueError, match=r"gradient_sync all-reduce-last needs replicas"):
        run(ONE_STEP.but(accumulation=2, gradient_sync="all-reduce-last"))


# --- precision -------------------------------------------------------------------------------------------------------


def test_bf16_init_starts_from_rounded_weights_in_fp32(run: Run) -> None:
    cell = ONE_STEP.but(mesh="dp2-tp2", precision="bf16-init", tied_embeddings=True)
    record, sampled = run(cell), sampled_weights(cell)
    rounded = {name: tensor.bfloat16().float() for name, tensor in sampled.items()}
    assert not any(torch.equal(sampled[name], rounded[name]) for name in sampled)
    assert_same_bits(record.select("initial/parameter/"), rounded)
    assert_same_bits(run(cell.but(precision="bf16-mp")).select("initial/parameter/"), sampled)
    for prefix in ("initial/buffer/", "step0/gradient/", "final/parameter/", "final/exp_avg/"):
        assert set(dtypes_of(record, prefix).values()) == {torch.float32}, prefix
    gathered = {
        entry.dtype for entry in record.ranks[0].collectives if entry.group == "dp_shard" and not entry.reduce_op
    }
    assert gathered == {"bfloat16"}, "computation"
    assert not any(count for rank in record.ranks for count in rank.surviving_poison.values())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mp", "float32"), ("bf16-reduce", "bfloat16")])
def test_gradients_are_reduced_in_the_dtype_of_the_precision(run: Run, precision: str, dtype: str) -> None:
    record = run(ONE_STEP.but(mesh="hsdp2x2", precision=precision))
    reduced = [entry for entry in record.ranks[0].collectives if entry.phase == "backward" and entry.reduce_op]
    assert {(entry.kind, entry.dtype) for entry in reduced} == {("reduce_scatter", dtype), ("all_reduce", dtype)}
    for prefix in ("step0/gradient/", "final/parameter/"):
        assert set(dtypes_of(record, prefix).values()) == {torch.float32}, prefix


@pytest.mark.parametrize("mesh", ["dp1", "dp2-tp2", "hsdp2x2"])
def test_bf16_mixed_keeps_only_norms_in_fp32(run: Run, mesh: str) -> None:
    cell = ONE_STEP.but(mesh=mesh, precision="bf16-mixed")
    record = run(cell)
    expected = {name: torch.float32 if "norm" in name else torch.bfloat16 for name in sampled_weights(cell)}
    for prefix in ("initial/parameter/", "step0/gradient/", "final/parameter/", "final/exp_avg/"):
        assert dtypes_of(record, prefix) == expected, prefix
    before, after = record.select("initial/parameter/"), record.select("final/parameter/")
    assert not [name for name in before if torch.equal(before[name], after[name])], "not trained"
    assert {rank.steps[0].grad_norm for rank in record.ranks} == {record.grad_norms[0]}
    assert dtypes_of(record, "initial/buffer/") == {"rope_table": torch.float32}


# --- checkpoint ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "precision", "tied"),
    [("dp2", "fp32", False), ("hsdp2x2", "bf16-mixed", False), ("dp2-tp2", "bf16-init", True)],
)
def test_a_checkpoint_starts_the_same_run_as_its_weights(run: Run, mesh: str, precision: str, tied: bool) -> None:
    meta = ONE_STEP.but(mesh=mesh, precision=precision, tied_embeddings=tied)
    expected, actual = run(meta), run(meta.but(init="checkpoint"))
    assert (actual.directory / "initial.safetensors").exists()
    for prefix in ("initial/parameter/", "initial/buffer/", "step0/gradient/", "final/parameter/"):
        assert_same_bits(actual.select(prefix), expected.select(prefix))
    for rank in actual.ranks:
        assert rank.poisoned
        assert not any(rank.surviving_poison.values())
        assert [entry.kind for entry in rank.collectives if entry.step == -1] == [], "a rank reads for itself"
