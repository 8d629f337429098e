"""The documentation names paths, commands and laws that exist, and is short."""

import ast
import re
import shlex
from collections.abc import Iterator
from typing import get_args

import pytest

from conformance.__main__ import main
from conformance.defects.catalogue import defects
from conformance.detection.case_judge import the_matrix
from conformance.findings.table import findings
from conformance.plan.selection import parse, parse_laws
from conformance.plan.substrates import Substrate
from conformance.project import PROJECT
from conformance.pytest_plugin.options import DEFAULT_PROFILE

GENERATED = (
    *("conformance/laws/README.md", "docs/kinds.md", "docs/kill_matrix.md", "docs/located.md", "docs/mistakes.md"),
    *("docs/sim/fidelity.md", "docs/sim/operators.md", "docs/sim/pytorch_tests.md", "docs/torch_coverage.md"),
    *("docs/loud_faults.md", "docs/predict.md", "docs/flames_smoke.md"),
    *("findings/README.md", "docs/symptoms.md"),
)
"""Tables that a command writes as a whole; in other pages it writes blocks between markers."""
NO_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "reference_trainer/corpus/README.md", *GENERATED[:-2])
"""Entrances, the licence of the trainer's data, the specification, tables of faults: all others count as pages."""
MAX_PAGES = 10
MAX_WORDS = 9_000
WRAP = 100

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`]+)`")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
_GENERATED_BLOCK = re.compile(r"<!-- ([\w-]+): begin -->.*?<!-- \1: end -->", re.DOTALL)
_PROJECT_PATH = re.compile(r"(conformance|tests|reference_trainer|benchmarks|ci|docs|findings)/")
_PLACEHOLDER = re.compile(r"(?<![a-zA-Z])[A-Z]{3,}(?![a-zA-Z])")
_LAW = re.compile(r"\b[A-Z]{2,}-\d+\b")
_NO_LAWS = ("BSD-3", "PAR-11", "SIGKILL-9", "UTF-8", "ISO-8601", "SHA-256")
_COUNTED = "cases|cells|laws|defects|tests|families|mutants|twins"
_COUNT = re.compile(rf"(?<![\w.^])\d[\d,]*(?: of \d+)?(?: [a-z]+)? (?:{_COUNTED})\b")
_DURATION = re.compile(r"(?<![\w.^])\d+(?:\.\d+)?(?: |-)?(?:ms|s|sec|secs|seconds?|min|minutes?|h|hours?|days?)\b")


def pages(*, but: tuple[str, ...] = ()) -> list[str]:
    """Return the markdown files of the repository; directories of reports have others."""
    folders = ("docs", "ci", "conformance", "reference_trainer", "benchmarks", "tests", "findings")
    files = [*PROJECT.glob("*.md"), *(file for folder in folders for file in (PROJECT / folder).rglob("*.md"))]
    own = sorted(file.relative_to(PROJECT).as_posix() for file in files)
    return [page for page in own if page not in but]


def read(page: str) -> str:
    return (PROJECT / page).read_text()


def prose(page: str) -> str:
    """Return the text that people have written, without generated blocks and fenced code."""
    return _FENCED.sub("", _GENERATED_BLOCK.sub("", read(page)))


def laws() -> set[str]:
    """Return the ids of all laws: the first column of the specification, which a test keeps in step with the laws."""
    return set(first_column(read("conformance/laws/README.md")))


def first_column(text: str) -> list[str]:
    """Return the laws that the first column of a table names."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return [law for cell in cells for law in _LAW.findall(cell)]


# Paths


def broken_links(page: str, text: str) -> Iterator[str]:
    """Yield relative links that lead nowhere."""
    for target in _LINK.findall(text):
        path = target.partition("#")[0]
        if path and "://" not in path and not (PROJECT / page).parent.joinpath(path).exists():
            yield target


def broken_paths(text: str) -> Iterator[str]:
    """Yield code spans that look like a path of the project and are none.

    Only the first word of a span counts, up to `::`. `FAMILY` stands for any name, as `*` does.
    """
    for span in _SPAN.findall(text):
        path = span.split()[0].partition("::")[0].rstrip("/,.;") if span.strip() else ""
        if _PROJECT_PATH.match(f"{path}/") and not _exists(path):
            yield span


def _exists(path: str) -> bool:
    pattern = _PLACEHOLDER.sub("*", path)
    return (PROJECT / path).exists() or ("*" in pattern and any(PROJECT.glob(pattern)))


@pytest.mark.parametrize("page", pages())
def test_links_paths_and_laws_exist(page: str) -> None:
    text = read(page)
    assert not [*broken_links(page, text), *broken_paths(text)]
    assert not set(_LAW.findall(text)) - laws() - set(_NO_LAWS)


def test_the_check_of_paths_sees_them() -> None:
    right = "[x](gpu.md) [y](https://a.b/c) [z](#here) `conformance/laws/CHAPTER/test_FAMILY.py` `ci/bisect.sh 2.6.0`"
    more = "`conformance/laws/numerics/test_par.py::test_x[dp2]` `conformance/` `conformance-report/report.json`"
    assert not [*broken_links("docs/report.md", right + more), *broken_paths(right + more)]
    wrong = "`conformance/engine/store.py` `tests/test_par*.py` `docs/nothing` `ci/none.sh JOB`"
    assert len([*broken_paths(wrong)]) == 4
    assert [*broken_links("docs/report.md", "[x](report.md#y) [x](laws.md)")] == ["laws.md"]


def test_pages_that_the_code_names_exist() -> None:
    folders = ("conformance", "reference_trainer", "benchmarks", "tests", "ci")
    files = [file for folder in folders for file in (PROJECT / folder).rglob("*.*") if file.suffix in (".py", ".sh")]
    named = {(file.name, page) for file in files for page in re.findall(r"docs/[\w/]+\.md", file.read_text())}
    assert not [(file, page) for file, page in named if not (PROJECT / page).exists()]


# Commands


@pytest.mark.parametrize("page", pages())
def test_commands_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = read(page)
    for command in sorted(set(re.findall(r"python -m conformance\s+([a-z]\w*)", text))):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0, f"python -m conformance {command}: {capsys.readouterr().err}"
    for name in sorted(set(re.findall(r"python -m benchmarks\.(\w+)", text))):
        files = [PROJECT / "benchmarks" / file for file in (f"{name}.py", f"{name}/__main__.py")]
        assert any(file.is_file() for file in files), f"python -m benchmarks.{name}"


# Laws


def test_blind_spots_has_a_row_for_each_law() -> None:
    assert set(first_column(read("docs/blind_spots.md"))) == laws()


def test_the_kill_matrix_has_a_row_for_each_defect() -> None:
    rows = set(re.findall(r"^\| \[([a-z0-9-]+)\]\(", read("docs/kill_matrix.md"), re.MULTILINE))
    assert rows == {defect.id for defect in defects()}


def test_the_page_on_reports_names_each_substrate() -> None:
    (row,) = (line for line in read("docs/report.md").splitlines() if line.startswith("| `substrate` |"))
    assert _SPAN.findall(row) == ["substrate", *get_args(Substrate)]


# Length, and what changes from day to day


def words(page: str) -> int:
    """Return the number of words of prose: a code span is one word, marks of tables and lists and code blocks none."""
    text = _SPAN.sub("code", _INDENTED.sub("", prose(page)))
    return sum(any(character.isalnum() for character in word) for word in text.split())


def test_documentation_is_short() -> None:
    """The README is read in a minute; two pages are 1,000 words."""
    by_page = {page: words(page) for page in pages(but=GENERATED)}
    assert sum(by_page.values()) <= MAX_WORDS, by_page
    assert len(pages(but=NO_PAGES)) <= MAX_PAGES, pages(but=NO_PAGES)
    assert by_page["CHANGELOG.md"] <= 600
    assert by_page["docs/architecture.md"] <= 1000
    assert len(read("README.md").splitlines()) <= 130


@pytest.mark.parametrize("page", pages(but=GENERATED))
def test_lines_are_wrapped_and_counts_and_durations_are_generated(page: str) -> None:
    """Tables, links and code may be long. A command writes counts into a block, or they are left out.

    Limits that are part of the design are said in words, such as "a deadline of one second".
    """
    written = prose(page)
    long = [line for line in written.splitlines() if len(line) > WRAP and not line.startswith("    ")]
    assert not [line for line in long if not line.lstrip().startswith(("|", "["))]
    in_one_line = " ".join(written.split())
    assert not [match[0] for pattern in (_COUNT, _DURATION) for match in pattern.finditer(in_one_line)]


def test_the_check_of_counts_sees_them() -> None:
    for text in ("2,877 cases", "138 of 138 defects", "65 laws", "3 correct twins", "12 exact laws"):
        assert _COUNT.search(text), text
    for text in ("took 12 s", "37 minutes", "0.25 s per case", "a 60-second deadline", "150 ms", "2 h"):
        assert _DURATION.search(text), text
    for text in ("two laws", "fp32 cells", "2^-24", "3 sigma", "8 ranks", "10^4 s", "up to 16 steps", "MEM-6 has 50."):
        assert not _COUNT.search(text), text
        assert not _DURATION.search(text), text


def test_generated_blocks_are_closed() -> None:
    for page in pages():
        text = read(page)
        marks = re.findall(r"<!-- ([\w-]+): (begin|end) -->", _SPAN.sub("", text))
        assert len(marks) == 2 * len(_GENERATED_BLOCK.findall(text)), page


# A cell's way


def stops() -> list[tuple[str, str]]:
    """Return file and function of each stop on a cell's way to its verdict, in docs/architecture.md."""
    way = read("docs/architecture.md").partition("## A cell's way to its verdict")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)::([\w.]+)`", way, re.MULTILINE)


def test_a_cells_way_has_at_most_twelve_stops_which_are_functions() -> None:
    assert 1 <= len(stops()) <= 12
    for file, function in stops():
        body: list[ast.stmt] = ast.parse(read(file)).body
        for name in function.split("."):
            (found,) = (node for node in body if getattr(node, "name", None) == name)
            body = getattr(found, "body", [])
        assert isinstance(found, ast.FunctionDef), f"{file} has no function {function}"


# docs/symptoms.md: each command judges a law in a few cells, on which the defect of its entry shows the symptom

MAX_CASES, MAX_RANKS = 5, 4
DEFECTS = {defect.id: defect for defect in defects()}
MATRIX = the_matrix()

_ENTRY = re.compile(
    r"^- \*\*(?P<symptom>.*?)(?P<text>\*\*.*?)\n\n {6}(?P<command>pytest .*?)$", re.MULTILINE | re.DOTALL
)
ENTRIES = [match.groups() for match in _ENTRY.finditer(read("docs/symptoms.md"))]


@pytest.mark.parametrize(("symptom", "text", "command"), ENTRIES, ids=[symptom[:40] for symptom, *_ in ENTRIES])
def test_a_command_judges_the_law_where_the_defect_shows(symptom: str, text: str, command: str) -> None:
    pytest_, directory, laws_option, laws_text, cells_option, cells_text = shlex.split(command)
    assert [pytest_, directory, laws_option, cells_option] == ["pytest", "conformance/", "--laws", "--cells"], symptom
    selected = parse_laws(laws_text, MATRIX.laws())
    cases = [case for case in MATRIX.cases(DEFAULT_PROFILE, only=parse(cells_text)) if case.law in selected]
    assert 1 <= len(cases) <= MAX_CASES
    assert max(case.cell.world_size for case in cases) <= MAX_RANKS
    assert {case.law for case in cases} == set(_LAW.findall(text))
    assert re.search(r"https://github\.com/", text)
    (defect,) = [DEFECTS[name] for name in re.findall(r"`([a-z0-9-]+)`", text) if name in DEFECTS]
    shows = parse(defect.cells)
    assert any(case.law in defect.laws and shows(case.cell) for case in cases)


def test_all_commands_are_checked() -> None:
    text = read("docs/symptoms.md")
    programs = re.findall(r"^ *python -m conformance findings ([a-z0-9_]+)$", text, re.MULTILINE)
    assert sorted(programs) == sorted(finding.name for finding in findings())
    assert len(ENTRIES) == len(re.findall(r"^ *pytest ", text, re.MULTILINE)) == text.count("\n- **") - len(programs)
