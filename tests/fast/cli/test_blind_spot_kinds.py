"""Table of kinds of blind spots: each kind has laws or cells that exist, and its row counts those of the matrix."""

from conformance.cli.blind_spot_kinds import KINDS, section
from conformance.defects.catalogue import signatures
from conformance.detection.case_judge import the_matrix
from conformance.plan.content import compiled

MATRIX = the_matrix()
LINES = [line for line in section(MATRIX).splitlines() if line.startswith("| ")]
ROWS = {name: row for name, *row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in LINES)}


def test_each_kind_has_cells_in_the_largest_profile() -> None:
    assert ROWS.keys() == {"kind", "symptoms", *(kind.name for kind in KINDS)}
    numbers = {name: row[1].split(" / ") for name, row in ROWS.items() if name != "kind"}
    assert all(len(each) == 3 and int(each[-1]) > 0 for each in numbers.values()), numbers


def test_a_row_counts_cells_seconds_and_defects_of_a_law() -> None:
    cells = {case.cell.id for case in MATRIX.cases("nightly") if case.law == "LIFE-1"}
    _, counted, seconds, defects = ROWS["life cycle of a module"]
    assert counted.endswith(f" / {len(cells)}")
    assert seconds.endswith(f" / {sum(MATRIX.seconds[cell] for cell in cells):.0f}")
    assert int(defects) == sum("LIFE-1" in defect.laws for defect in signatures())


def test_a_row_of_cells_counts_those_of_all_laws() -> None:
    large = compiled("model = large")
    assert ROWS["size"][1].endswith(f" / {len({case.cell.id for case in MATRIX.cases('nightly') if large(case.cell)})}")
