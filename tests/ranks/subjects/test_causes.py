"""First causes of mistakes that trainers make, as a colleague would name them, and the laws folded under them."""

import inspect
from collections import defaultdict
from pathlib import Path

import pytest

from conformance.judge.judge import judge
from conformance.judge.registry import asserted_laws
from conformance.judge.verdicts import BAD
from conformance.localisation.causes import first_causes
from conformance.localisation.localise import explained
from conformance.plan.matrix import Case
from conformance.report.causes import Cause, in_causal_order, merged
from conformance.report.location import Location
from conformance.report.schema import CaseResult
from conformance.run.pool import Pools
from tests.support import sample_reports, subject_mistakes
from tests.support.judged_trainers import BY_ID, machine_of, store_of

MISTAKES = "tests.support.subject_mistakes"
DP2, ACCUMULATED, HSDP = "dp2-fp32-default-full", "dp2-fp32-default-full-acc2", "hsdp2x2-fp32-default-full"
TIED = "dp2-fp32-default-full-tied"

FIRST = [
    ("local_tokens", [DP2, ACCUMULATED], "those of the mean of each rank's mean over its own 5 and 1 labels"),
    ("micro_batch_means", [DP2, ACCUMULATED], "the mean of the micro-batches' means over their own 5 and 1 labels"),
    ("means_of_all_ranks", [ACCUMULATED], "the mean of the means of 2 micro-batches, over "),
    ("not_divided_by_micro_batches", [ACCUMULATED, DP2], "summed over the 2 micro-batches, not averaged"),
    ("sum_of_ranks", [ACCUMULATED], "your gradients are 2 times as large: summed over the 2 ranks, not averaged"),
    ("divided_twice", [DP2, ACCUMULATED], "1/2 of their size: divided by the 2 ranks once too often"),
    ("padded_tokens", [ACCUMULATED], "divided by all 24 labels, ignored ones included, and not by the 15 that count"),
    ("last_micro_batch", [ACCUMULATED], "those of the last micro-batch alone"),
    ("not_zeroed", [DP2], "those that the step before has left: they are not set to zero, from step 1 on"),
    ("no_final_sync", [DP2], "gradients are not reduced over the ranks in step 0: no reduce_scatter is issued"),
    ("no_sync_after_first_step", [DP2], "gradients are not reduced over the ranks in step 1: no reduce_scatter"),
    ("gradient_reduced_again", [DP2], "the gradient of up.weight, which FSDP has reduced, is summed over"),
    ("local_norm", [DP2, HSDP], "each rank clips by the norm of its own shards (0.6783, 0.8648)"),
    ("not_clipped", [DP2], "gradients are not clipped: their norm is 1.099, the limit 0.5495"),
    ("clipped_twice", [DP2], "gradients are clipped twice"),
    ("norm_of_copies", [HSDP], "a norm that is sqrt(2) times too large: each counts on the 2 ranks that hold copies"),
    ("norms_of_layers", [DP2], "parts of the model are clipped by norms of their own: "),
    ("layer_not_clipped", [DP2], "are left out of clipping: neither in its norm nor scaled"),
    ("norm_of_last_layer", [DP2], "all gradients are clipped by the norm of those of down alone ("),
    ("layer_remade_by_rank", [DP2], "up.weight does not begin with the weights of one process on dp_shard rank 1 of 2"),
    ("layer_unsharded", [DP2], "down.bias is not sharded, no call of fully_shard reaches it"),
    ("layer_frozen", [DP2], "up.bias and 1 more are frozen: requires_grad is False, and one process trains them"),
    ("layer_not_updated", [DP2], "norm.weight"),
    ("optimizer_of_shards", [DP2], "is the result for this rank's shard alone: this optimizer needs full tensors"),
    ("random_in_parallel", [DP2], "the parallel model is random and model() is not: two runs with different seeds"),
    ("head_untied", [TIED], "again.weight: the tied parameter is a parameter of its own, expected up.weight"),
    ("raises", [DP2, ACCUMULATED], "raised KeyError: 'warmup' (subject_mistakes.py:"),
    ("waits_for_uneven_shard", [DP2], "ranks issue different collectives"),
    ("other_collectives", [DP2], "rank 0 waits in all_reduce SUM of 64 float32 over ranks 0,1 at"),
    ("decay_missing", [DP2], "up.weight is not decayed: the weight decay of the declared optimizer is missing"),
    ("decay_everywhere", [DP2], "is decayed, and the declared optimizer leaves it out of weight decay"),
    ("decay_decoupled", [DP2], "multiplies the weights (as AdamW does), and the declared optimizer adds it to"),
    ("decay_added", [DP2], "is added to gradients (L2), and the declared optimizer multiplies the weights"),
    ("decay_in_gradients", [DP2], "those of the mean and 0.1 times the weights: weight decay is added to them"),
]
"""Mistake, cells of one and the same cause, and a part of its sentence."""


def causes_of(pools: Pools, directory: Path, name: str, cells: list[str], *, limit_s: float = 10.0) -> list[Cause]:
    """Judge a trainer on cells, and return the first causes of its failures."""
    subject = name if ":" in name else f"{MISTAKES}:{name}"
    store = store_of(pools, directory, subject, limit_s=12.0)
    machine = machine_of(store)
    failed: dict[str, list[CaseResult]] = defaultdict(list)
    locations = dict[str, Location]()
    for cell_id in cells:
        cell = BY_ID[cell_id]
        for asserted in asserted_laws().values():
            case = Case(asserted.law.id, cell, name)
            if asserted.law.scope.of == "any trainer" and asserted.law.scope.holds(cell):
                judged = judge(case, asserted.law, asserted.test, store, machine=machine)
                if judged.verdict in BAD:
                    made = sample_reports.case(f"{case.law}/{cell_id}", judged.verdict.value)
                    failed[cell_id].append(replace_reason(made, judged.reason))
        first, *_ = in_causal_order(failed[cell_id])
        if limit_s:
            case = Case(first.law, cell, name)
            place = explained(case, store, machine=machine, measured={}, reason=first.reason)
            locations |= {cell_id: place} if place else {}
    found, error = first_causes(store, failed, locations, logs=directory / "logs", limit_s=limit_s)
    assert error is None, error
    return merged(found, failed)


@pytest.mark.parametrize(
    ("name", "cell", "sentence"),
    [
        ("subject_models:layer_not_reduced_over_replicas", HSDP, "and not over those that hold copies"),
        ("subject_mistakes:layer_unfrozen", DP2, "norm.bias: the optimizer holds what one process freezes"),
        ("own_loops:scheduled_by_micro_batch", ACCUMULATED, "the learning rate of step 0 is 0.025, and 0.1 by"),
        ("own_loops:optimizer_remade", DP2, "the learning rate of step 1 is 0.1, and 0.05 by the declared optimizer"),
        ("own_loops:clipped_while_scaled", DP2, "gradients are clipped while they are 1024 times too large"),
        (
            "own_loops:changed_between_steps",
            DP2,
            "head.weight is changed after the optimizer's step: step 1 does not begin with",
        ),
    ],
)
def test_a_mistake_is_named(shared_ranks: Pools, tmp_path: Path, name: str, cell: str, sentence: str) -> None:
    first, *_ = causes_of(shared_ranks, tmp_path, f"tests.support.{name}", [cell])
    assert sentence in first.sentence


def replace_reason(case: CaseResult, reason: str) -> CaseResult:
    return CaseResult(**{**{name: getattr(case, name) for name in case.__struct_fields__}, "reason": reason})


def test_a_layer_that_ranks_make_again_has_the_line_that_makes_it(shared_ranks: Pools, tmp_path: Path) -> None:
    lines, first = inspect.getsourcelines(subject_mistakes.remade_by_rank)
    made = first + next(index for index, line in enumerate(lines) if "nn.Linear" in line)
    cause, *_ = causes_of(shared_ranks, tmp_path, "layer_remade_by_rank", [DP2])
    assert f"subject_mistakes.py:{made} " in f"{cause.where} "


@pytest.mark.parametrize(("name", "cells", "sentence"), FIRST[::2])
def test_a_mistake_has_one_first_cause(
    shared_ranks: Pools, tmp_path: Path, name: str, cells: list[str], sentence: str
) -> None:
    """Every second mistake; tests/nightly has the others."""
    require_first_cause(shared_ranks, tmp_path, name, cells, sentence)


def require_first_cause(pools: Pools, directory: Path, name: str, cells: list[str], sentence: str) -> None:
    """Fail unless a mistake has one first cause on all cells, in a sentence with these words."""
    causes = causes_of(pools, directory, name, cells)
    assert len(causes) == 1, [cause.sentence for cause in causes]
    assert sentence in causes[0].sentence
    assert causes[0].cells == cells
    assert "tests/support/subject_m" in causes[0].where
