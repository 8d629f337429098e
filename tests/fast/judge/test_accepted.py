"""Failures that an owner accepts: the verdicts that they change, mistakes in their file, and entries that are added."""

import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from conformance.cli.waive import accepted_entries
from conformance.detection.case_judge import the_matrix
from conformance.judge.accepted import AcceptedFailure, accept, load_accepted, require_day
from conformance.judge.verdicts import Verdict
from conformance.judge.waivers import waiver_of
from conformance.plan.matrix import Case
from reference_trainer.checks import UsageError
from tests.support.sample_reports import case, report

DAY = datetime.date(2027, 1, 31)
CASES = the_matrix().trainer_cases("my_train:parallelize")
UNEVEN = "dp2-fp32-default-full-acc2-uneven"
ENTRY = """
  - law: gradients
    cells: batches = uneven
    reason: "own tokens, as meant: T-12"
    expires: 2027-01-31
"""


def read(directory: Path, entries: str, *, today: datetime.date = DAY) -> list[AcceptedFailure]:
    file = directory / "accepted.yaml"
    file.write_text(f"schema: 1\naccepted:{entries}")
    return load_accepted(file, CASES, today=today)


def on(law: str, cell: str) -> Case:
    return next(each for each in CASES if (each.law, each.cell.id) == (law, cell))


def test_a_failure_is_accepted_until_its_last_day(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, ENTRY)
    assert entry.judge(Verdict.FAIL, "3 is off", {}) == (
        Verdict.WAIVED,
        "accepted until 2027-01-31 (own tokens, as meant: T-12): 3 is off",
    )
    assert entry.judge(Verdict.CRASH, "died", {})[0] == Verdict.WAIVED
    for verdict in (Verdict.TIMEOUT, Verdict.ERROR, Verdict.UNSUPPORTED):
        assert entry.judge(verdict, "why", {}) == (verdict, "why")


def test_an_entry_that_has_expired_or_is_not_needed_fails_with_its_line(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, ENTRY)
    place = f"{tmp_path}/accepted.yaml:3"
    unneeded = Verdict.UNEXPECTED_PASS, f"passes, although {place} accepts its failure: remove the entry"
    assert entry.judge(Verdict.PASS, "", {}) == unneeded
    (expired,) = read(tmp_path, ENTRY, today=datetime.date(2027, 2, 1))
    assert expired.judge(Verdict.PASS, "", {}) == unneeded
    assert expired.judge(Verdict.FAIL, "3 is off", {}) == (
        Verdict.FAIL,
        f"3 is off; {place} accepts this until 2027-01-31, which is past: remove the entry",
    )


def test_an_entry_is_of_its_law_and_cells_alone(tmp_path: Path) -> None:
    entries = read(tmp_path, ENTRY)

    def found(case: Case) -> bool:
        return waiver_of(entries, case, device="cpu", torch=(2, 13)) is not None

    assert found(on("gradients", UNEVEN))
    assert not found(on("gradients", "dp2-fp32-default-full"))
    assert not found(on("parameters", UNEVEN))


def test_an_entry_without_cells_is_of_all_and_one_of_another_trainer_of_none(tmp_path: Path) -> None:
    everywhere = "\n  - {law: replicas, reason: R, expires: 2027-01-31}"
    (entry,) = read(tmp_path, everywhere)
    assert all(entry.matches(each, device="cpu", torch=(2, 13)) for each in CASES if each.law == "replicas")
    assert read(tmp_path, "\n  - {law: replicas, trainer: other, reason: R, expires: 2027-01-31}") == []


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ("\n  - {law: gradient, reason: R, expires: 2027-01-31}", r":3: unknown law `gradient`.*gradients"),
        ("\n  - {law: loss, reason: R, expires: 2027-02-30}", ":3: day is out of range"),
        ("\n  - {law: loss, reason: R, expires: soon}", ":3: "),
        ("\n  - {law: loss, expires: 2027-01-31}", ":3: .*`reason`"),
        ("\n  - {law: loss, cells: mesh = dp2 and tp = 2, reason: R, expires: 2027-01-31}", ":3: .* selects no cell"),
        ("\n  - {law: loss, cells: mush = dp2, reason: R, expires: 2027-01-31}", ":3: .*mush"),
        (ENTRY + "  - {law: gradients, reason: R, expires: 2027-01-31}\n", "accepted.yaml:3 accepts the same failure"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, entries: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read(tmp_path, entries)


def test_what_fails_is_added_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "accepted.yaml"
    trainer = "my_train:parallelize"
    failed = [case(f"gradients/{trainer}/{cell}", "fail") for cell in (UNEVEN, "dp2-fp32-default-full")]
    others = [case(f"loss/{trainer}/{UNEVEN}", "waived"), case(f"replicas/{trainer}/{UNEVEN}", "timeout")]
    accept(file, accepted_entries(report(*failed, *others), reason='as "meant": # T-12', until="2027-01-31"))
    (entry,) = load_accepted(file, CASES, today=DAY)
    assert (entry.law, entry.reason, entry.expires) == ("gradients", 'as "meant": # T-12', "2027-01-31")
    accept(file, accepted_entries(report(case(f"loss/{trainer}/{UNEVEN}", "crash")), reason="R", until="2027-01-31"))
    assert [(each.law, each.cells) for each in load_accepted(file, CASES, today=DAY)] == [
        ("gradients", f"id in ({UNEVEN}, dp2-fp32-default-full)"),
        ("loss", f"id = {UNEVEN}"),
    ]
    file.write_text("schema: 2\n")
    with pytest.raises(UsageError):
        accept(file, [])


def test_a_day_is_a_date_to_come() -> None:
    assert require_day("9999-01-31") == "9999-01-31"
    for wrong, problem in (("soon", "is no date"), ("2020-01-31", "is past")):
        with pytest.raises(UsageError, match=problem):
            require_day(wrong)


def test_reports_keep_what_is_accepted(tmp_path: Path) -> None:
    entries = read(tmp_path, ENTRY)
    assert replace(report(), accepted=entries).accepted == entries
