"""Docstrings of the programs of findings, and their tables."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from conformance.findings.table import (
    TORCH,
    TRAINERS,
    Finding,
    catalogue,
    findings,
    read_finding,
    with_version,
    worst,
)
from conformance.judge.registry import asserted_laws
from tests.support.source_code import imports

HEADER = '''"""It is wrong.

Why it is.

severity: high
visible: silent
training: nothing is learnt
thread: none known
law: PAR-1
avoid: do not
ranks: 2
"""
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "it_is.py"
    file.write_text(HEADER)
    return file


def test_a_program_has_a_title_and_fields(program: Path) -> None:
    finding = read_finding(program)
    assert (finding.name, finding.title, finding.severity, finding.ranks) == ("it_is", "It is wrong.", "high", 2)
    assert not finding.has_thread


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("severity: high", "severity: huge", "Invalid enum value 'huge'"),
        ("severity: high\n", "", "missing required field `severity`"),
        ("law: PAR-1", "law: PAR", "law"),
        ("avoid: do not", "avoid it", "must end with lines `FIELD: VALUE`, found 'avoid it'"),
        (HEADER, "", "must end with"),
    ],
)
def test_mistakes_are_told(program: Path, old: str, new: str, problem: str) -> None:
    program.write_text(HEADER.replace(old, new) or "pass\n")
    with pytest.raises(ValueError, match=re.escape(problem) if old != HEADER else "it_is.py: write a docstring"):
        read_finding(program)


def test_findings_are_in_their_directories_name_laws_that_exist_and_the_worst_come_first() -> None:
    orders = [finding.order for finding in findings()]
    assert orders == sorted(orders)
    assert orders[0][:2] == (0, 0)
    assert {finding.package for finding in findings()} == {TORCH}
    assert TORCH not in {finding.package for finding in findings(TRAINERS)}
    assert {finding.law for finding in (*findings(), *findings(TRAINERS))} - {"none"} <= asserted_laws().keys()


_ALSO_IMPORTED = {"accelerate": {"transformers"}, "verl": {"transformers"}, "ai2-olmo-core": {"olmo_core"}}
"""Modules that a program may import besides one of the name of its package."""


@pytest.mark.parametrize("finding", [*findings(), *findings(TRAINERS)], ids=lambda finding: finding.name)
def test_programs_are_short_and_need_their_package_and_torch_alone(finding: Finding) -> None:
    text = finding.file.read_text()
    imported = {entry.module.partition(".")[0] for entry in imports(ast.parse(text))}
    others = _ALSO_IMPORTED.get(finding.package, set())
    if finding.law.startswith("STREAM"):
        others = others | {"conformance"}  # whose simulated accelerator stands in for one
    library = {"contextvars", "datetime", "os", "signal", "sys", "tempfile", "threading", "time", "warnings", "weakref"}
    assert imported <= library | {"torch"} | others | {finding.package}
    assert len(text.splitlines()) < 50
    assert "expected" in text
    assert "got" in text or finding.name == "async_redistribution_on_gloo", "whose processes die"


def test_a_version_is_added_in_its_place(program: Path) -> None:
    versions = with_version({"2.9.0": {"it_is": "right"}}, "2.13.0", {"it_is": "wrong"}, ["it_is"])
    versions = with_version(versions, "2.10.0", {"it_is": "refused", "gone": "right"}, ["it_is"])
    assert versions == {"2.9.0": {"it_is": "right"}, "2.10.0": {"it_is": "refused"}, "2.13.0": {"it_is": "wrong"}}
    text = catalogue([read_finding(program)], versions, trainers=[], trainer_versions={})
    assert "| right   | refused  | **wrong** | PAR-1 | none known | do not" in text
    assert "| 2.13    | [It is wrong](findings/it_is.py) |" in worst([read_finding(program)], versions)


def test_versions_without_a_gap_are_a_range(program: Path) -> None:
    outcomes = {"2.8.0": "wrong", "2.9.1": "right", "2.10.0": "wrong", "2.11.0": "dies", "2.12.1": "wrong"}
    versions: Any = {**{version: {"it_is": outcome} for version, outcome in outcomes.items()}, "2.13.0": {}}
    assert "| 2.8, 2.10 to 2.12 | [It is wrong]" in worst([read_finding(program)], versions)
    corrected: Any = {version: {"it_is": "right"} for version in ("2.14.0", "2.15.0")}
    assert "It is wrong" not in worst([read_finding(program)], {**versions, **corrected})
