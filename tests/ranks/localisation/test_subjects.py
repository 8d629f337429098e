"""Taps of other people's trainers: no bit of a run is other with taps, and a mistake is located."""

from pathlib import Path

import torch

from conformance.judge.support import Machine
from conformance.localisation.localise import explained
from conformance.plan.matrix import FAULT_CELLS, Case
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from conformance.subjects.running import SubjectRuns

DP2 = FAULT_CELLS[0]
MODELS = "tests.support.subject_models"


def store_of(pools: Pools, directory: Path, name: str) -> RecordStore:
    return RecordStore(directory, "test", str(torch.__version__), None, 60.0, pools, subject=f"{MODELS}:{name}")


def test_taps_change_no_bit(pools: Pools, tmp_path: Path) -> None:
    runs = SubjectRuns(store_of(pools, tmp_path, "right"))
    plain, tapped = (runs.evidence(DP2, tapped=tapped).record.ranks for tapped in (False, True))
    for rank, other in zip(plain, tapped, strict=True):
        assert rank.fingerprints.items() <= other.fingerprints.items()
        assert (rank.losses, rank.grad_norms) == (other.losses, other.grad_norms)
        assert rank.collectives == other.collectives


def test_a_failed_case_is_explained(pools: Pools, tmp_path: Path) -> None:
    store = store_of(pools, tmp_path, "local_clip")
    machine = Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=8)
    location = explained(Case("gradient-norm", DP2, "local_clip"), store, machine=machine, measured={})
    assert location is not None
    assert (location.stage, location.cell) == ("clipping", DP2.id)
    assert location.called is not None
    assert (location.called.file, location.called.function) == ("tests/support/subject_models.py", "clip_locally")
