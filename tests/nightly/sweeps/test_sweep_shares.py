"""Shares of sweeps show the defects that they are said to show."""

from pathlib import Path

from conformance.detection.case_judge import CaseJudge
from tests.support.sweep_shares import PROFILE, UnnamedSubjects, lost, lost_in_shares


def test_the_listed_defects_alone_are_lost_in_shares_of_sweeps(tmp_path: Path) -> None:
    """After a change `python -m tests.support.sweep_shares` writes the list."""
    with UnnamedSubjects() as pools:
        assert sorted(lost(CaseJudge(tmp_path, pools, profile=PROFILE))) == lost_in_shares()
