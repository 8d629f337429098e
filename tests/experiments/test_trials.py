"""Restriction of sweeps to some of their subjects."""

from conformance.experiments.trials import tried, trying_only


def test_a_sweep_without_the_subjects_tries_all() -> None:
    def of(*subjects: str) -> list[str]:
        with trying_only(frozenset(subjects)):
            return tried(["mean", "sum"], str)

    assert of() == of("Muon") == ["mean", "sum"]
    assert of("sum", "Muon") == ["sum"]
