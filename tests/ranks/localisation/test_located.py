"""Faults in real runs are located, and correct runs have no wrong place; all cells are tried nightly."""

from pathlib import Path

import pytest

from conformance.detection.case_judge import CaseJudge, judge_case
from conformance.judge.support import Machine
from conformance.localisation.localise import explained
from conformance.localisation.reference_run import ReferenceRun
from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import Case
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.hardware import NO_DEVICES
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

RIGHT = (
    "dp2-fp32-default-meta-acfull",
    "tp2-fp32-default-meta",
    "dp2-bf16mp-default-meta-acc2-synclast",
)
MACHINE = Machine(hardware=NO_DEVICES, torch_version="2.13.0", max_world_size=4)


@pytest.mark.parametrize("cell", RIGHT)
def test_a_correct_run_has_no_wrong_place(store: RecordStore, cell: str) -> None:
    assert ReferenceRun(CaseRuns(store), cell_from_id(cell)).first_wrong() is None


@pytest.mark.parametrize(
    ("defect", "case", "clauses"),
    [
        (
            "tp-to-local-no-grad-placement",
            "PAR-1/dp2-tp2-fp32-default-meta-nosp",
            [
                "backward: layers.1.feed_forward, gradient of its input on all ranks, step 0, micro-batch 0",
                "is a partial sum: those of the 2 tensor-parallel ranks add up",
                "the collective that should be between: all_reduce over tp, not issued",
                "called at conformance/defects/api_faults.py:",  # whose function computes in place of the module
            ],
        ),
        (
            "ga-overwrite",
            "PAR-1/dp2-fp32-default-meta-acc2",
            [
                "reduction: output.weight, gradient after its reduction on all ranks, step 0",
                "lacks the gradient of rank 0, micro-batch 0; rank 1, micro-batch 0",
                "8 x reduce_scatter over dp_shard",
                "issued at torch/distributed/fsdp/",
            ],
        ),
        (
            "backward-gather-rounded",
            "PAR-4/dp2-fp32-never-meta",  # whose fault is on the cell with which the law compares
            ["parameters: ", "value gathered again for backward", "is rounded to bf16"],
        ),
        (
            "clip-norm-local",
            "CLIP-1/dp2-fp32-default-meta-clip0.1",
            ["clipping: total 2-norm", "the norm of the shards of rank 0", "all_reduce over dp_shard: not issued"],
        ),
        (
            "dropout-unseeded",
            "PAR-8/dp2-fp32-default-meta-drop0.1",
            ["forward: layers.0.dropout, output", "differs between two runs of the cell"],
        ),
        (
            "resume-one-moment-lost",
            "CKPT-1/dp2-fp32-default-meta-from.same",
            ["resumed state: layers.0.", "restored exp_avg_sq on all ranks", "is zero"],
        ),
    ],
)
def test_a_fault_is_located(pools: Pools, tmp_path: Path, defect: str, case: str, clauses: list[str]) -> None:
    law, _, cell = case.partition("/")
    failed, store = Case(law, cell_from_id(cell), None), CaseJudge(tmp_path, pools).store(defect=defect)
    judged = judge_case(failed, store)
    assert judged.verdict == "fail"
    location = explained(failed, store, machine=MACHINE, measured=judged.measured)
    assert location is not None
    assert location.case == case
    assert [clause for clause in clauses if clause not in location.sentence] == []
    assert "wrong" in location.tree.values()
