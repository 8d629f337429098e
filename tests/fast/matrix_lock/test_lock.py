"""matrix.lock: cells that the matrix derives, best first, and refusal of a file of another matrix."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.__main__ import main
from conformance.matrix_lock.derivation import estimated_s
from conformance.matrix_lock.lock_file import HEADER_LINES, Gains, best_first
from conformance.plan.cells import Cell, cell_from_axes, cell_from_id
from conformance.plan.lock import STARTUP_S, PlannedCell, lock_file, parse_budget, within
from conformance.plan.matrix import Matrix, load_matrix
from conformance.project import PROJECT
from reference_trainer.strict_yaml import ConfigError
from tests.support.matrices import written_matrix

MATRIX = """\
schema: 2
axes:
  mesh: [dp2, tp2]
  optimizer: [adamw, sgd]
cells:
  singles: {note: each feature alone, meshes: [dp2]}
  pairs: {note: any two meet, strength: 2}
profiles:
  pr: {note: all, must: [singles, pairs], deadline_s: 60}
"""
DERIVED = [
    ("singles", "dp2-fp32-default-meta"),
    ("singles", "tp2-fp32-default-meta"),
    ("singles", "dp2-fp32-default-meta-sgd"),
    ("pairs", "tp2-fp32-default-meta-sgd"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small matrix without a lock file."""
    file = tmp_path / "matrix.yaml"
    file.write_text(MATRIX)
    return file


def planned(matrix: Matrix) -> list[tuple[str, str]]:
    return [(each.section, each.cell.id) for each in matrix.planned]


def write_lock(file: Path) -> list[str]:
    """Write the lock file; returns its lines."""
    assert main(["lock", f"--matrix={file}", "--write"]) == 0
    return lock_file(file).read_text().splitlines(keepends=True)


def test_the_lock_file_of_the_project_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Reviewed cells, their order and ids are those that the matrix, the laws and the defects derive."""
    assert main(["lock", f"--matrix={PROJECT / 'matrix.yaml'}"]) == 0, capsys.readouterr().out


def test_a_matrix_without_a_lock_file_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", f"--matrix={file}"]) == 4
    assert capsys.readouterr().err == (
        f"conformance: {file} has no matrix.lock: run `python -m conformance lock --write --matrix {file}`\n"
    )
    assert main(["lock", "--write", "--matrix", str(file)]) == 0
    assert main(["list", f"--matrix={file}", "--laws=PAR-1"]) == 0


def test_a_lock_file_has_the_cells_best_first(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = written_matrix(file, MATRIX)
    assert planned(matrix) == DERIVED, "in the order of the sections"
    assert matrix.seconds == {name: estimated_s(cell) for name, cell in matrix.cells.items()}
    lines = write_lock(file)
    assert capsys.readouterr().out == "matrix.lock: 4 cells\n"
    locked = load_matrix(file)
    assert sorted(planned(locked)) == sorted(DERIVED)
    assert [line.split()[2] for line in lines[HEADER_LINES:]] == list(locked.cells)
    lock_file(file).write_text("".join([*lines[:HEADER_LINES], *reversed(lines[HEADER_LINES:])]))
    assert list(load_matrix(file).cells) == list(locked.cells)[::-1], "the order is that of the file"


def test_measured_durations_stay(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write_lock(file)
    header = lines[:HEADER_LINES]
    first = lines[HEADER_LINES].split()[2]
    estimate = f" ~{estimated_s(cell_from_id(first)):.2f} "
    assert estimate in lines[HEADER_LINES]
    lock_file(file).write_text("".join([*header, f"singles ~99.25 {first}\n", *lines[HEADER_LINES + 1 :]]))
    assert main(["lock", f"--matrix={file}"]) == 1
    assert estimate in write_lock(file)[HEADER_LINES], "an estimate is made again"
    capsys.readouterr()
    lock_file(file).write_text("".join([*header, f"singles 99.25 {first}\n", *lines[HEADER_LINES + 1 :]]))
    assert load_matrix(file).seconds[first] == 99.25
    assert main(["lock", f"--matrix={file}"]) == 1
    assert "run `conformance lock --write`" in capsys.readouterr().out
    assert write_lock(file)[HEADER_LINES].split()[2] != first, "it is too slow to be the best"
    assert load_matrix(file).seconds[first] == 99.25
    assert main(["lock", f"--matrix={file}"]) == 0


def ids(file: Path) -> set[str]:
    return set(load_matrix(file).cells)


def test_ids_stay_when_the_matrix_changes(file: Path) -> None:
    """A new value adds cells, and takes its own away with it; a line that is no cell any more is forgotten."""
    write_lock(file)
    before = ids(file)
    file.write_text(MATRIX.replace("tp2]", "tp2, dp4]"))
    lock_file(file).write_text(lock_file(file).read_text() + "pairs 1.00 dp2-no-axis\n")
    write_lock(file)
    assert ids(file) == before | {"dp4-fp32-default-meta", "dp4-fp32-default-meta-sgd"}
    file.write_text(MATRIX)
    write_lock(file)
    assert ids(file) == before


def test_all_cells_are_derived_afresh(file: Path) -> None:
    """Two sets of four cells have all pairs of three axes with two values: either stays, until `--afresh`."""
    text = MATRIX.replace("  singles: {note: each feature alone, meshes: [dp2]}\n", "").replace(
        "[singles, pairs]", "[pairs]"
    )
    file.write_text(text.replace("[adamw, sgd]", "[adamw, sgd]\n  reshard: [default, never]"))
    write_lock(file)
    derived = ids(file)
    every = {
        cell_from_axes({"mesh": mesh, "optimizer": optimizer, "reshard": reshard}).id
        for mesh, optimizer, reshard in itertools.product(("dp2", "tp2"), ("adamw", "sgd"), ("default", "never"))
    }
    others = every - derived
    header = lock_file(file).read_text().splitlines(keepends=True)[:HEADER_LINES]
    lock_file(file).write_text("".join([*header, *(f"pairs 1.00 {name}\n" for name in sorted(others))]))
    write_lock(file)
    assert ids(file) == others
    assert main(["lock", f"--matrix={file}", "--write", "--afresh"]) == 0
    assert ids(file) == derived


def test_a_lock_file_of_another_matrix_is_refused(file: Path) -> None:
    write_lock(file)
    file.write_text(MATRIX.replace("deadline_s: 60", "deadline_s: 90"))
    assert load_matrix(file).profile("pr").deadline_s == 90, "profiles choose among cells, and derive none"
    file.write_text(MATRIX.replace("tp2]", "tp2, dp4]"))
    with pytest.raises(ConfigError) as caught:
        load_matrix(file)
    assert str(caught.value) == (
        "matrix.lock is of another version of matrix.yaml: run `python -m conformance lock --write`"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("singles dp2-fp32-default-meta\n", "9: not `SECTION SECONDS CELL [not LAWS]`: run"),
        ("singles x dp2-fp32-default-meta\n", "9: not `SECTION SECONDS CELL [not LAWS]`: run"),
        ("singles 1.2.3 dp2-fp32-default-meta\n", "9: not `SECTION SECONDS CELL [not LAWS]`: run"),
        ("\n", "9: not `SECTION SECONDS CELL [not LAWS]`: run"),
        ("singles 1.00 dp2-fp32-default\n", "9: no cell has the id 'dp2-fp32-default'"),
    ],
)
def test_mistakes_have_a_line(file: Path, line: str, message: str) -> None:
    lock_file(file).write_text("".join([*write_lock(file), line]))
    with pytest.raises(ConfigError) as caught:
        load_matrix(file)
    assert str(caught.value).startswith(f"matrix.lock:{message}")


def test_a_budget_has_the_longest_beginning_that_fits() -> None:
    cells = [PlannedCell("pairs", seconds, Cell(seed=seed)) for seed, seconds in enumerate((0.5, 2.0, 0.25))]
    for left_s, count in ((0.0, 0), (0.5, 1), (2.25, 1), (2.5, 2), (2.75, 3), (100.0, 3)):
        assert within(cells, STARTUP_S + left_s) == cells[:count]


def test_budgets() -> None:
    assert [parse_budget(text) for text in ("90s", "5m", "1h", "1.5m")] == [90.0, 300.0, 3600.0, 90.0]


@pytest.mark.parametrize("text", ["", "90", "s", "-5m", "0s", "1h30m", "5 m", "5M", "1e3s"])
def test_budgets_without_a_unit_or_time_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"budget `{text}`: write a time with its unit, such as 90s, 5m or 1h"):
        parse_budget(text)


# Order of cells: greedy, best first, by gain per second

NAMES = "abcdefgh"
GAINS = st.dictionaries(
    st.sampled_from(NAMES), st.dictionaries(st.integers(0, 9), st.sampled_from([0.25, 0.5, 1.0])), min_size=1
)
SECONDS = st.fixed_dictionaries({name: st.sampled_from([0.25, 0.5, 1.0, 4.0]) for name in NAMES})


def rate(name: str, gains: dict[str, Gains], seconds: dict[str, float], before: list[str]) -> float:
    """Return the gains that a name adds to those before it, per second."""
    seen = {gain for other in before for gain in gains[other]}
    return sum(weight for gain, weight in gains[name].items() if gain not in seen) / seconds[name]


@given(GAINS, SECONDS)
def test_each_name_adds_most_of_those_left(gains: dict[str, Gains], seconds: dict[str, float]) -> None:
    """Values and durations are sums and powers of two: rates are exact, so that ties are ties."""
    ordered = best_first(list(gains), gains, seconds)
    assert sorted(ordered) == sorted(gains)
    for position, name in enumerate(ordered):
        before, left = ordered[:position], ordered[position:]
        rates = {other: rate(other, gains, seconds, before) for other in left}
        assert rates[name] == max(rates.values())
        earlier = [other for other in left if list(gains).index(other) < list(gains).index(name)]
        assert all(rates[other] < rates[name] for other in earlier), "ties keep their order"


def test_a_short_cell_comes_before_a_longer_one_that_adds_more() -> None:
    gains: dict[str, Gains] = {"long": {1: 1.0, 2: 1.0, 3: 1.0}, "short": {1: 1.0}, "same": {1: 1.0}}
    assert best_first(list(gains), gains, {"long": 4.0, "short": 1.0, "same": 1.0}) == ["short", "long", "same"]
