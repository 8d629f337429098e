"""Taps of other people's trainers: no bit of a run is other with taps, and a mistake is located."""

from pathlib import Path

from conformance.localisation.localise import explained
from conformance.plan.matrix import Case
from conformance.run.pool import Pools
from conformance.subjects.running import SubjectRuns
from tests.support.judged_trainers import DP2, machine_of, store_of

MODELS = "tests.support.subject_models"


def test_taps_change_no_bit(pools: Pools, tmp_path: Path) -> None:
    runs = SubjectRuns(store_of(pools, tmp_path, f"{MODELS}:right"))
    plain, tapped = (runs.evidence(DP2, tapped=tapped).record.ranks for tapped in (False, True))
    for rank, other in zip(plain, tapped, strict=True):
        assert rank.fingerprints.items() <= other.fingerprints.items()
        assert (rank.losses, rank.grad_norms) == (other.losses, other.grad_norms)
        assert rank.collectives == other.collectives


def test_a_failed_case_is_explained(pools: Pools, tmp_path: Path) -> None:
    store = store_of(pools, tmp_path, f"{MODELS}:local_clip")
    location = explained(Case("gradient-norm", DP2, "local_clip"), store, machine=machine_of(store), measured={})
    assert location is not None
    assert (location.stage, location.cell) == ("clipping", DP2.id)
    assert location.called is not None
    assert (location.called.file, location.called.function) == ("tests/support/subject_models.py", "clip_locally")
