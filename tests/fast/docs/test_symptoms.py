"""docs/symptoms.md: each command judges a law in a few cells, on which the defect of its entry shows the symptom."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conformance.defects.catalogue import defects
from conformance.plan.matrix import Case, load_matrix
from conformance.plan.selection import parse, parse_laws
from conformance.project import PROJECT
from conformance.pytest_plugin.options import DEFAULT_PROFILE

MAX_CASES, MAX_RANKS = 5, 4
DEFECTS = {defect.id: defect for defect in defects()}
MATRIX = load_matrix(PROJECT / "matrix.yaml")

_ENTRY = re.compile(r"^- \*\*(?P<symptom>.*?)(?P<text>\*\*.*?)\n\n {6}(?P<command>.*?)$", re.MULTILINE | re.DOTALL)
_LAW = re.compile(r"\b[A-Z]+-\d+\b")


@dataclass(frozen=True)
class Entry:
    symptom: str
    text: str
    command: str

    @property
    def cases(self) -> list[Case]:
        """Cases that the command selects. Raises ValueError for a law or a cell that is none."""
        pytest_, directory, laws_option, laws, cells_option, cells = shlex.split(self.command)
        assert [pytest_, directory, laws_option, cells_option] == ["pytest", "conformance/", "--laws", "--cells"]
        selected = parse_laws(laws, MATRIX.laws())
        return [case for case in MATRIX.cases(DEFAULT_PROFILE, only=parse(cells)) if case.law in selected]


def entries() -> Iterator[Entry]:
    for match in _ENTRY.finditer((PROJECT / "docs" / "symptoms.md").read_text()):
        yield Entry(match["symptom"], match["text"], match["command"])


@pytest.mark.parametrize("entry", list(entries()), ids=lambda entry: entry.symptom[:40].replace("\n", " "))
def test_a_command_judges_the_law_where_the_defect_shows(entry: Entry) -> None:
    cases = entry.cases
    assert 1 <= len(cases) <= MAX_CASES
    assert max(case.cell.world_size for case in cases) <= MAX_RANKS
    assert {case.law for case in cases} == set(_LAW.findall(entry.text))
    assert re.search(r"https://github\.com/", entry.text)
    (defect,) = [DEFECTS[name] for name in re.findall(r"`([a-z0-9-]+)`", entry.text) if name in DEFECTS]
    shows = parse(defect.cells)
    assert any(case.law in defect.laws and shows(case.cell) for case in cases)


def test_all_commands_are_checked() -> None:
    text = (PROJECT / "docs" / "symptoms.md").read_text()
    assert len(list(entries())) == len(re.findall(r"^ *pytest ", text, re.MULTILINE)) == text.count("\n- **")
