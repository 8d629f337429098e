"""Two reports compared: differences, and noise."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.__main__ import main
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.report.diff import Change, Difference, as_markdown, as_text, diff, drifted_metrics, summary, title
from conformance.report.facts import CellFacts
from conformance.report.schema import Report
from tests.support.sample_reports import FACTS, GATHER, bytes_of, case, count, deviation, ratio, report, seconds


def changes(before: Report, after: Report) -> list[tuple[str, str]]:
    return [(change.kind, change.case) for change in diff(before, after).changes]


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("pass", "fail", "new-fail"),
        ("waived", "fail", "new-fail"),
        ("unsupported", "crash", "new-fail"),
        ("fail", "pass", "fixed"),
        ("timeout", "quality-warning", "fixed"),
        ("fail", "timeout", "verdict-changed"),
        ("pass", "waived", "verdict-changed"),
        ("unsupported", "pass", "support-gained"),
        ("pass", "unsupported", "support-lost"),
        ("fail", "unsupported", "support-lost"),
        ("pass", "pass", None),
        ("pass", "quality-warning", None),
        ("fail", "fail", None),
    ],
)
def test_verdicts(before: str, after: str, kind: str | None) -> None:
    difference = diff(report(case("PAR-1/a", before)), report(case("PAR-1/a", after)))
    assert [change.kind for change in difference.changes] == ([kind] if kind else [])
    assert difference.exit_status == (kind in ("new-fail", "verdict-changed", "support-lost"))


def test_cases_that_one_side_has() -> None:
    before, after = report(case("PAR-1/a"), case("PAR-1/b")), report(case("PAR-1/b"), case("PAR-1/c"))
    assert changes(before, after) == [("removed", "PAR-1/a"), ("new-case", "PAR-1/c")]
    assert diff(before, after).exit_status == 1
    assert diff(report(case("PAR-1/b")), after).exit_status == 0
    same = report(*(case(f"PAR-1/{verdict.value}", verdict) for verdict in Verdict), cells={"a": FACTS})
    assert diff(same, same).changes == []


@pytest.mark.parametrize(
    ("before", "after", "drifts"),
    [
        (bytes_of(1000), bytes_of(1020), True),
        (bytes_of(1000), bytes_of(980), True),
        (bytes_of(1000), bytes_of(1009), False),
        (bytes_of(0), bytes_of(1), True),
        (bytes_of(1000, lower=900, upper=1100), bytes_of(1150, lower=900, upper=1100), False),
        (bytes_of(1000, lower=900, upper=1100), bytes_of(1250, lower=900, upper=1100), True),
        (deviation(1e-7), deviation(9e-7), False),  # far from the bound
        (deviation(1e-6), deviation(1.9e-6), False),
        (deviation(1e-6), deviation(3e-6), True),
        (deviation(3e-6), deviation(1e-6), True),
        (deviation(1e-6), deviation(None), True),
        (deviation(None), deviation(None), False),
        (ratio(1.0), ratio(1.05), False),
        (ratio(1.05), ratio(1.4), True),
        (ratio(1.05), ratio(1 / 1.4), True),
        (count(1), count(2), True),
        (count(0), count(0), False),
        (seconds(1.0), seconds(4.0), False),
    ],
)
def test_drift_by_kind_of_metric(before: Measurement, after: Measurement, drifts: bool) -> None:
    assert bool(drifted_metrics({"x": before}, {"x": after})) == drifts
    (gone,) = drifted_metrics({"x": bytes_of(1)}, {})
    assert (gone.before, gone.after, gone.ratio) == (1.0, None, None)


def test_metrics_of_the_machine_and_of_failures_are_left_out() -> None:
    def changed(name: str, verdict: str) -> list[tuple[str, str]]:
        before, after = (report(case(name, verdict, x=bytes_of(value))) for value in (1000, 2000))
        return changes(before, after)

    assert changed("ENV-3/a", "pass") == changed("MEM-1/a", "fail") == []
    assert changed("MEM-1/a", "pass") == [("metric-moved", "MEM-1/a")]


def cells(count: int, **change: Any) -> dict[str, CellFacts]:
    return {f"c{number}": msgspec.structs.replace(FACTS, **change) for number in range(count)}


def test_traffic_of_a_cell() -> None:
    more = [*FACTS.schedule[1:], msgspec.structs.replace(GATHER, nbytes=270)]
    other = [*FACTS.schedule[1:], msgspec.structs.replace(GATHER, dtype="bfloat16", nbytes=125)]
    fewer = [msgspec.structs.replace(GATHER, nbytes=500), GATHER, GATHER]
    fp32, bf16 = ("wire all_gather dp_shard float32", "1000 bytes"), ("wire all_gather dp_shard bfloat16", "0 bytes")
    number = ("number of forward all_gather dp_shard", "4 collectives")
    for schedule, expected in ((more, [fp32]), (other, [fp32, bf16]), (fewer, [number])):
        difference = diff(report(cells=cells(1)), report(cells=cells(1, schedule=schedule)))
        found = [(change.case, change.reason, change.before) for change in difference.changes]
        assert found == [("c0", *change) for change in expected]


def test_times_are_compared_relative_to_fixed_work_and_over_many_cells() -> None:
    usual = report(cells=cells(8))
    slower = {"step_s": [0.15, 0.3]}
    (change,) = diff(usual, report(cells=cells(8, **slower))).changes
    assert (change.case, change.reason) == ("", "time of a step, median of 8 cells")
    assert change.ratio == pytest.approx(1.5)
    assert changes(usual, report(cells=cells(8, step_s=[0.12]))) == []
    assert changes(usual, report(cells=cells(8, **slower, calibration_s=0.015))) == []  # the machine was slower
    assert changes(report(cells=cells(7)), report(cells=cells(7, **slower))) == []
    assert changes(usual, report(cells=cells(8, **slower, substrate="nccl"))) == []


def test_sessions_that_cannot_be_compared() -> None:
    before, after = report(case("PAR-1/a")), report(case("PAR-1/a", "fail"), suite_digest="e")
    with pytest.raises(ValueError, match=r"judged by different suites \(d, e\).*--any-suite"):
        diff(before, after)
    assert [change.kind for change in diff(before, after, any_suite=True).changes] == ["new-fail"]
    with pytest.raises(ValueError, match="the second session ended early: 0 of 1 case executed"):
        diff(before, report(case("PAR-1/a", "not-run"), executed=0))


def example() -> Difference:
    """Three metrics that have drifted, and a case that fails."""
    usual = [case(f"MEM-1/c{number}", peak=bytes_of(1000)) for number in range(3)]
    drifted = [case(f"MEM-1/c{number}", peak=bytes_of(1500 + number)) for number in range(3)]
    return diff(report(case("PAR-1/<a>"), *usual), report(case("PAR-1/<a>", "fail"), *drifted, torch="2.15.0"))


def test_text_and_markdown_tell_the_same() -> None:
    difference = example()
    assert summary(difference) == "3 metric-moved, 1 new-fail"
    for text in (as_text(difference), as_markdown(difference)):
        for told in ("2.13.0", "2.15.0", "new-fail", "why fail", "1.5", "1000 bytes", summary(difference)):
            assert told in text, text
    assert "no difference" in as_markdown(diff(report(), report()))
    removed = [Change(kind="removed", case=f"PAR-1/{number}", before="pass", after="") for number in range(40)]
    assert "... and 10 more: see --json" in as_text(msgspec.structs.replace(difference, changes=removed))


def test_the_first_line_says_how_both_sides_are_restricted() -> None:
    full = report(case("PAR-1/a"))
    narrow = report(case("PAR-1/a"), selection="--cells 'tp = 2'", defect="grads-summed", torch="2.15.0")
    side = "torch 2.15.0, profile pr (only --cells 'tp = 2'; defect grads-summed injected)"
    told = f"{side}, compared with torch 2.13.0, profile pr: not restricted alike, so not every change is torch's"
    difference = diff(full, narrow)
    assert as_text(difference).splitlines()[0] == told
    assert as_markdown(difference).splitlines()[0] == f"# Conformance: {told}"
    assert title(diff(narrow, narrow)) == f"{side}, compared with {side}"
    assert title(diff(full, full)) == "torch 2.13.0, profile pr, compared with torch 2.13.0, profile pr"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"a": report(case("PAR-1/a")), "b": report(case("PAR-1/a", "fail"))}
    for name, side in sides.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(msgspec.json.encode(side))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["diff", a, a]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["diff", a, b, "--json"]) == 1
    read = msgspec.json.decode(capsys.readouterr().out, type=Difference)
    assert [change.kind for change in read.changes] == ["new-fail"]
    assert main(["diff", a, b, "--markdown"]) == 1
    assert capsys.readouterr().out.startswith("# Conformance: torch 2.13.0, profile pr, compared with")
