"""The reference trainer as a subject: conformant on every cell, and every fault in its step is seen."""

from pathlib import Path

from conformance.judge.verdicts import Verdict
from conformance.run.pool import Pools
from conformance.subjects.judging import judge_subject
from conformance.subjects.running import SubjectRuns
from conformance.subjects.text import as_text


def test_the_reference_trainer_conforms_by_the_laws_for_subjects(pools: Pools, tmp_path: Path) -> None:
    runs = SubjectRuns("conformance.subjects.shipped.reference:ReferenceTrainer", pools, tmp_path)
    report = judge_subject(runs)
    assert {entry.verdict for entry in report.verdicts} == {Verdict.PASS}, as_text(report)
    assert report.faults
    assert not report.blind_to
