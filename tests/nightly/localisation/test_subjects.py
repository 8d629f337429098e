"""First wrong places of other people's trainers: classic mistakes by file and line, wrong functions, and no others."""

import linecache
from pathlib import Path

import pytest

from benchmarks.mistakes import FOLDER, MistakeSet
from conformance.localisation.subject_run import SubjectRun
from conformance.outcomes import Unsupported
from conformance.plan.matrix import FAULT_CELLS
from conformance.project import PROJECT
from conformance.report.location import Location
from conformance.run.pool import Pools
from conformance.subjects.running import SubjectRuns
from tests.support.judged_trainers import BY_ID, store_of

DP2, HSDP, TP = (cell.id for cell in FAULT_CELLS)
META, BF16 = "dp2-fp32-default-meta", "dp2-bf16mp-default-full"
TIED, RESUMED = "dp2-fp32-default-full-tied", "dp2-fp32-default-full-from.same"
MODELS = "tests.support.subject_models"
CLASSIC = MistakeSet(FOLDER)
MISTAKES = {
    "local-norm": ("clipping", "", "square.sqrt()"),
    "layer-left-out-of-fully-shard": ("reduction", "stem.weight", "fully_shard(model.classifier"),
    "rope-uninitialised": ("initial values", "cos", "model.to_empty("),
    "stale-weights": ("parameters", "embeddings.weight", 'model(batch["input_ids"])'),
    "tp-norm-gradient-not-reduced": ("backward", "layers.1.ffn_norm.weight", "self.ffn_norm(x)"),
}
"""Stage, name and text of the located line, by mistake of benchmarks/mistakes."""
WRONG = [
    ("plain_ddp", DP2, "initial values", "norm.weight"),
    ("gradients_not_divided", DP2, "reduction", "down.bias"),
    ("local_clip", DP2, "clipping", ""),
    ("no_clip", DP2, "clipping", "norm.weight"),
    ("buffer_not_initialised", META, "initial values", "table"),
    ("optimizer_first", DP2, "optimizer", "norm.weight"),
    ("precision_forgotten", BF16, "forward", "up"),
    ("masters_in_bf16", BF16, "initial values", "norm.weight"),
    ("other_weights_on_each_rank", DP2, "initial values", "up.weight"),
    ("not_replicated", HSDP, "reduction", "down.bias"),
    ("frozen_layer", DP2, "optimizer", "norm.weight"),
    ("without_gradient", DP2, "reduction", "up.bias"),
    ("not_divided_in_bf16", BF16, "reduction", "down.bias"),
    ("untied", TIED, "initial values", "again.weight"),
    ("optimizer_not_loaded", RESUMED, "resumed state", "norm.weight"),
    ("nothing_loaded", RESUMED, "resumed state", "norm.weight"),
    ("layer_not_reduced_over_replicas", HSDP, "reduction", "up.bias"),
    ("reduced_in_bf16", DP2, "reduction", "down.bias"),
    ("kept_after_backward", DP2, "parameters", "norm.weight"),
]
"""Wrong function of `subject_models`, cell, stage and name."""
UNUSUAL = [
    ("late", DP2),
    ("meant", META),
    ("sum_declared", DP2),
    ("layer_that_computes_twice", "dp2-fp32-default-full-acc2"),
    ("unused_layer_in_a_group_of_its_own", DP2),
    ("own_mesh_names", DP2),
    ("without_fp64", DP2),
]


def first_wrong(pools: Pools, directory: Path, subject: str, cell: str) -> Location | None:
    return SubjectRun(SubjectRuns(store_of(pools, directory, subject)), BY_ID[cell]).first_wrong()


@pytest.mark.parametrize("mistake_id", MISTAKES)
def test_a_mistake_is_located_at_its_line(pools: Pools, tmp_path: Path, mistake_id: str) -> None:
    mistake, (stage, name, text) = CLASSIC.mistakes[mistake_id], MISTAKES[mistake_id]
    trainer = CLASSIC.subjects[mistake.trainer]
    file = tmp_path / trainer.file.name
    file.write_text(mistake.patched(trainer.file.read_text()))
    location = first_wrong(pools, tmp_path / "wrong", f"{file}:{trainer.name}", mistake.cells)
    assert location is not None
    assert (location.stage, location.name) == (stage, name)
    assert location.called is not None
    assert text in linecache.getline(str(PROJECT / location.called.file), location.called.line)
    right = f"{trainer.file}:{trainer.name}"
    assert first_wrong(pools, tmp_path / "right", right, mistake.cells) is None


@pytest.mark.parametrize(("name", "cell", "stage", "place"), WRONG)
def test_a_wrong_function_is_located(
    pools: Pools, tmp_path: Path, name: str, cell: str, stage: str, place: str
) -> None:
    location = first_wrong(pools, tmp_path, f"{MODELS}:{name}", cell)
    assert location is not None
    assert (location.stage, location.name) == (stage, place)


@pytest.mark.parametrize(("name", "cell"), UNUSUAL)
def test_nothing_is_located_in_unusual_and_right_trainers(pools: Pools, tmp_path: Path, name: str, cell: str) -> None:
    assert first_wrong(pools, tmp_path, f"{MODELS}:{name}", cell) is None


@pytest.mark.parametrize(
    "subject",
    [
        f"{MODELS}:right",
        "conformance.subjects.shipped.reference:ReferenceTrainer",
        f"{FOLDER / 'trainers' / 'llm_tp.py'}:parallelize",
    ],
)
def test_nothing_is_located_in_right_trainers_on_any_cell(pools: Pools, tmp_path: Path, subject: str) -> None:
    located, refused = {}, set()
    for cell in BY_ID:
        try:
            located[cell] = first_wrong(pools, tmp_path, subject, cell)
        except Unsupported:
            refused.add(cell)
    assert {cell: found.sentence for cell, found in located.items() if found} == {}
    assert len(located) > len(refused)
