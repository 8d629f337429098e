"""A session compared with an earlier report."""

from pathlib import Path

import msgspec
import pytest

from conformance.cli.verify import verify
from conformance.judge.verdicts import Verdict
from conformance.project import PROJECT
from conformance.report.diff import Baseline
from conformance.report.facts import suite_digest
from conformance.report.schema import Report
from tests.support.sample_reports import bytes_of, case, report
from tests.support.sessions import finish, suite

CELLS = "id = dp2-fp32-default-meta-sgd"


def written(directory: Path, report: Report) -> Path:
    directory.mkdir()
    (directory / "report.json").write_bytes(msgspec.json.encode(report))
    return directory


def test_what_passes_and_has_drifted_is_a_warning(tmp_path: Path) -> None:
    old = [case("MEM-1/a", peak=bytes_of(1000)), case("ENV-3/a", peak=bytes_of(1000)), case("MEM-1/b", "fail")]
    baseline = Baseline(written(tmp_path / "a", report(*old, suite_digest=suite_digest())))
    assert baseline.judge("MEM-1/a", {"peak": bytes_of(1001)}) == (Verdict.PASS, "")
    verdict, reason = baseline.judge("MEM-1/a", {"peak": bytes_of(1500)})
    assert (verdict, reason) == ("quality-warning", "peak: 1500 bytes, 1000 in the baseline")
    for other in ("ENV-3/a", "MEM-1/b", "MEM-1/new"):
        assert baseline.judge(other, {"peak": bytes_of(1500)}) == (Verdict.PASS, "")


def test_another_suite_is_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"judged by another suite \(d, this is"):
        Baseline(written(tmp_path / "a", report()))
    with pytest.raises(ValueError, match="no report"):
        Baseline(tmp_path / "none")


def test_the_same_version_twice_is_no_difference(tmp_path: Path) -> None:
    first = finish(suite(tmp_path / "a", "conformance/", "--cells", CELLS), tmp_path / "a")
    assert first.status == 0, first.output
    with_baseline = ["--cells", CELLS, f"--baseline={first.directory}"]
    second = finish(suite(tmp_path / "b", "conformance/", *with_baseline), tmp_path / "b")
    assert (second.status, second.verdicts) == (0, first.verdicts), second.output
    assert "compared with the baseline" in second.output
    assert "no difference" in second.output

    file = first.directory / "report.json"
    known = msgspec.json.decode(file.read_bytes(), type=Report)
    metrics = {name: msgspec.structs.replace(metric, value=0.5) for name, metric in known.cases[0].measured.items()}
    drifted = msgspec.structs.replace(known.cases[0], measured=metrics)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, cases=[drifted, *known.cases[1:]])))
    third = finish(suite(tmp_path / "c", "conformance/", *with_baseline), tmp_path / "c")
    assert third.status == 0, third.output
    assert third.verdicts[drifted.id] == "quality-warning"
    assert "metric-moved" in third.output
    assert verify(third.directory, matrix_file=PROJECT / "matrix.yaml").problems == []
