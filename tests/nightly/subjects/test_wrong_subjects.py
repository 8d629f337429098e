"""Wrong functions, each with the law that must see what is wrong with it; and a right one, which all laws pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from conformance.judge.verdicts import Verdict
from conformance.outcomes import ConformanceFailure
from conformance.run.pool import Pools
from conformance.subjects.catalogue import LAWS
from conformance.subjects.cells import CELLS, FIRST_OF_MESHES, SubjectCell, split_name
from conformance.subjects.evidence import Evidence, Reference, SubjectRecord
from conformance.subjects.faults import FAULTS
from conformance.subjects.judging import judge_subject
from conformance.subjects.laws import shards_partition_parameters
from conformance.subjects.running import LIMIT_S, SubjectRuns
from conformance.subjects.schema import SubjectReport
from conformance.subjects.text import as_text

BY_ID = {cell.id: cell for cell in CELLS}
DP2, HSDP, TP = FIRST_OF_MESHES


def judged(
    pools: Pools, directory: Path, name: str, *cells: SubjectCell, faults: bool = False, limit_s: float = LIMIT_S
) -> SubjectReport:
    runs = SubjectRuns(f"tests.support.{name if ':' in name else f'subject_models:{name}'}", pools, directory, limit_s)
    return judge_subject(runs, cells=cells or (DP2,), with_faults=faults)


def failing(report: SubjectReport) -> set[str]:
    return {entry.law for entry in report.verdicts if entry.verdict == Verdict.FAIL}


def test_a_right_function_passes_and_every_fault_is_seen(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "right", *CELLS, faults=True)
    text = as_text(report)
    assert report.status == 0, text
    assert {entry.cell for entry in report.verdicts if entry.verdict == Verdict.UNSUPPORTED} == {
        cell.name_for("tests.support.subject_models:right") for cell in CELLS if cell.mesh == "dp2-tp2"
    }
    assert {entry.law for entry in report.verdicts if entry.verdict == Verdict.PASS} == {law.id for law in LAWS}
    tried = [(split_name(seen.cell)[1], seen.fault) for seen in report.faults]
    assert tried == [(cell.id, fault) for cell in (DP2, HSDP) for fault in FAULTS]
    assert not report.blind_to, text


@pytest.mark.parametrize(
    ("name", "cell", "law"),
    [
        ("plain_ddp", "dp2-fp32", "fsdp-is-on"),
        ("forgotten_layer", "dp2-fp32", "fsdp-is-on"),
        ("forgotten_layer", "dp2-fp32", "gradients"),
        ("gradients_not_divided", "dp2-fp32", "gradients"),
        ("local_clip", "dp2-fp32", "gradient-norm"),
        ("local_clip", "dp2-fp32", "parameters"),
        ("no_clip", "dp2-fp32", "clipping"),
        ("buffer_not_initialised", "dp2-fp32-meta", "initialised"),
        ("sentinels:forgotten", "dp2-fp32-meta", "initialised"),
        ("optimizer_first", "dp2-fp32", "optimizer-holds-each-once"),
        ("optimizer_first", "dp2-fp32", "every-update"),
        ("precision_forgotten", "dp2-bf16", "bf16-is-used"),
        ("masters_in_bf16", "dp2-bf16", "fp32-masters"),
        ("other_weights_on_each_rank", "dp2-fp32", "initial-weights"),
        ("not_replicated", "hsdp2x2-fp32", "replicas"),
        ("frozen_layer", "dp2-fp32", "optimizer-holds-each-once"),
        ("frozen_layer", "dp2-fp32", "every-update"),
        ("without_gradient", "dp2-fp32", "every-gradient"),
        ("local_clip", "dp2-fp32", "loss"),
        ("not_divided_in_bf16", "dp2-bf16", "bf16-gradients"),
        ("untied", "dp2-fp32-tied", "tied-weights"),
        ("untied", "dp2-fp32-tied", "gradients"),
        ("optimizer_not_loaded", "dp2-fp32-resumed", "parameters"),
        ("nothing_loaded", "dp2-fp32-resumed", "parameters"),
        ("wrong_traffic:layer_gathered_twice", "dp2-fp32", "parameters-are-gathered"),
        ("wrong_traffic:layer_not_reduced_over_replicas", "hsdp2x2-fp32", "gradients-are-reduced"),
        ("wrong_traffic:reduced_in_bf16", "dp2-fp32", "wire-dtypes"),
        ("wrong_traffic:ranks_reduce_differently", "dp2-fp32", "same-collectives"),
        ("local_clip", "dp2-fp32", "clipping-reduces-norms"),
        ("wrong_traffic:gradients_gathered_to_clip", "dp2-fp32", "clipping-reduces-norms"),
        ("wrong_traffic:kept_after_backward", "dp2-fp32", "resharded"),
    ],
)
def test_a_wrong_function_fails_by_the_law_that_sees_it(
    pools: Pools, tmp_path: Path, name: str, cell: str, law: str
) -> None:
    report = judged(pools, tmp_path, name, BY_ID[cell])
    assert law in failing(report), as_text(report)
    assert report.status == 1


def test_a_run_that_cannot_be_saved_is_told(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "not_resumable", BY_ID["dp2-fp32-resumed"])
    assert report.status == 1
    assert "the run was made without functions that save and load it" in as_text(report)


def test_a_run_without_methods_that_save_is_told(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "without_save", BY_ID["dp2-fp32-resumed"])
    assert report.status == 1
    assert "the run has no methods save and load: let unsupported() refuse" in as_text(report)


def test_a_model_that_is_built_in_train_is_judged_when_it_is_told(pools: Pools, tmp_path: Path) -> None:
    assert judged(pools, tmp_path, "late", faults=True).status == 0


def test_a_model_that_is_built_in_train_must_be_told(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "late_and_silent")
    assert report.status == 1
    assert "train() did not call observer.built()" in as_text(report)


def test_phases_must_be_told(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "wrong_traffic:without_phases")
    assert report.status == 1
    assert "the backward passes of 0 were told: call observer.phase('backward', step=...)" in as_text(report)


def test_what_is_built_in_train_must_be_initialised(pools: Pools, tmp_path: Path) -> None:
    assert "initialised" in failing(judged(pools, tmp_path, "late_and_uninitialised", BY_ID["dp2-fp32-meta"]))


def test_a_parameter_that_is_not_partitioned_fails() -> None:
    facts = SimpleNamespace(layouts={"weight": "digest"})
    record = SimpleNamespace(ranks=[facts], is_partitioned=lambda name: False, select=lambda prefix: {})
    evidence = Evidence(cast("SubjectRecord", record), cast("Reference", None))
    with pytest.raises(ConformanceFailure, match="parameters not partitioned: measured 1, expected 0"):
        shards_partition_parameters(evidence)


def test_buffers_may_hold_the_largest_integer_and_nan(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "sentinels:meant", DP2, BY_ID["dp2-fp32-meta"])
    assert report.status == 0, as_text(report)


def test_ddp_fails_by_nothing_but_being_no_fsdp(pools: Pools, tmp_path: Path) -> None:
    assert failing(judged(pools, tmp_path, "plain_ddp")) == {"fsdp-is-on"}


def test_gradients_may_be_summed_if_that_is_declared(pools: Pools, tmp_path: Path) -> None:
    assert judged(pools, tmp_path, "sum_declared").status == 0


def test_a_model_that_cannot_compute_in_fp64_is_compared_in_fp32(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "without_fp64")
    assert report.status == 0
    assert [policy.reference_dtype for policy in report.policies] == ["fp32"]
    assert "compared with one process in fp32" in as_text(report)


def test_a_layer_may_compute_twice(pools: Pools, tmp_path: Path) -> None:
    assert (
        judged(pools, tmp_path, "wrong_traffic:layer_that_computes_twice", DP2, BY_ID["dp2-fp32-accumulated"]).status
        == 0
    )


def test_a_layer_may_be_unused(pools: Pools, tmp_path: Path) -> None:
    assert judged(pools, tmp_path, "wrong_traffic:unused_layer_in_a_group_of_its_own").status == 0


def test_mesh_dimensions_may_have_other_names(pools: Pools, tmp_path: Path) -> None:
    assert judged(pools, tmp_path, "own_mesh_names").status == 0


def test_an_adapter_that_shows_another_optimizer_is_blind(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "hidden_optimizer", faults=True)
    unseen = ("local-norm", "parameter-skipped", "stale-shard", "parameters-frozen")
    assert report.blind_to == [f"{fault} on tests.support.subject_models:right/dp2-fp32" for fault in unseen]
    assert report.status == 1
    assert "these verdicts do not count" in as_text(report)


def test_a_rank_that_raises_fails_all_laws_with_one_line(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "raises")
    assert {entry.verdict for entry in report.verdicts} == {Verdict.FAIL}
    (line,) = [line for line in as_text(report).splitlines() if line.startswith("fail:")]
    subject = "tests.support.subject_models:raises"
    assert f"all laws, {subject}/dp2-fp32: rank 1 raised RuntimeError: no such layer (subject_models.py:" in line


def test_a_function_that_returns_no_model_is_told(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "returns_a_number")
    assert "parallelize returned a int: return the model, nothing, or (model, optimizer)" in as_text(report)
    assert report.status == 1


def test_after_a_cell_that_hangs_no_other_is_run(pools: Pools, tmp_path: Path) -> None:
    """The cells before it are judged, and whether faults are seen on them; each of the rest would cost its limit."""
    after = (BY_ID["dp2-bf16"], HSDP, TP)
    report = judged(pools, tmp_path, "hangs", DP2, *after, faults=True, limit_s=10.0)
    verdicts = {cell.id: {entry.verdict for entry in report.verdicts if entry.cell.endswith(cell.id)} for cell in after}
    assert verdicts == {
        "dp2-bf16": {Verdict.TIMEOUT},
        "hsdp2x2-fp32": {Verdict.NOT_RUN},
        "dp2-tp2-fp32": {Verdict.UNSUPPORTED},
    }
    assert not report.blind_to
    assert {split_name(seen.cell)[1] for seen in report.faults} == {"dp2-fp32"}
    assert report.duration_s < 25
    assert report.status == 1
    subject = "tests.support.subject_models:hangs"
    line = f"not-run: {subject}/hsdp2x2-fp32: cell {subject}/dp2-bf16 hung"
    assert line in as_text(report).splitlines()


def test_after_a_fault_that_hangs_no_other_is_tried(pools: Pools, tmp_path: Path) -> None:
    report = judged(pools, tmp_path, "hangs_with_a_fault", faults=True, limit_s=5.0)
    assert [seen.fault for seen in report.faults] == ["gradients-summed"]
    assert report.blind_to == ["gradients-summed on tests.support.subject_models:hangs_with_a_fault/dp2-fp32"]
