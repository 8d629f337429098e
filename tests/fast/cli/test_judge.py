"""Command `judge`, of whose session a test leaves nothing but the report."""

from pathlib import Path

import msgspec
import pytest

from conformance.__main__ import main
from conformance.subjects import keeping
from tests.support.sample_reports import case, report


def test_an_interrupted_session_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its report tells no trainer."""
    interrupted = report(case("gradients/dp2-fp32-default-full", "not_run"))
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(interrupted))
    monkeypatch.setattr(pytest, "main", lambda _arguments: 1)
    monkeypatch.setattr(keeping, "DIRECTORY", tmp_path / "kept")
    assert main(["judge", "reference", "--keep", "--report-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "not kept: the session was interrupted\n"
    assert not (tmp_path / "kept").exists()
