"""Cells that took longest in the last session come first in the next."""

import json
from pathlib import Path

from tests.sessions import finish, suite

CELLS = "mesh = dp1 and model = tiny and precision = fp32 and (optimizer = sgd or clip = 0)"


def test_the_longest_cell_of_a_mesh_is_first(tmp_path: Path) -> None:
    """With a worker, to whom the controller tells what it knows."""
    durations = tmp_path / "cache" / "v" / "conformance" / "durations_s"
    first = finish(suite(tmp_path / "a", "conformance/", "--cells", CELLS, cache=tmp_path / "cache"), tmp_path / "a")
    assert first.status == 0, first.output
    in_order = cells_in_order(first.directory)
    assert len(in_order) > 2
    known = json.loads(durations.read_text())
    spent_s = {case.cell: case.duration_s for case in first.report.cases if case.law == first.report.cases[0].law}
    assert set(known) == set(in_order) == set(spent_s)
    assert all(known[cell] >= spent_s[cell] for cell in spent_s)

    last = in_order[-1]
    durations.write_text(json.dumps({**known, last: 1000.0}))
    command = suite(tmp_path / "b", "conformance/", "--cells", CELLS, workers=1, cache=tmp_path / "cache")
    second = finish(command, tmp_path / "b")
    assert cells_in_order(second.directory)[0] == last, second.output
    assert json.loads(durations.read_text())[last] < 1000.0


def cells_in_order(directory: Path) -> list[str]:
    """As their cases came in."""
    lines = [json.loads(line) for line in (directory / "report.jsonl").read_text().splitlines()]
    return list(dict.fromkeys(line["cell"] for line in lines if line["type"] == "case"))
