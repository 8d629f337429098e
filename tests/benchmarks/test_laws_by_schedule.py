"""Table of laws by the schedules of pipelines, from a report."""

from benchmarks.laws_by_schedule import entry, verdicts_by_schedule
from conformance.plan.cells import Cell
from tests.report.sample_reports import case, report

STAGES = Cell(mesh="pp2-dp2", model="cut", accumulation=4)


def test_cells_with_a_pipeline_count_by_law_and_schedule() -> None:
    gpipe, looped = (STAGES.but(pipeline=name) for name in ("gpipe", "looped-bfs"))
    cases = [case(f"{law}/{cell.id}") for law in ("PP-1", "PAR-1") for cell in (gpipe, gpipe.but(steps=8), looped)]
    failed = case(f"PP-1/{looped.but(steps=8).id}", "fail")
    counts = verdicts_by_schedule(report(*cases, failed, case("PAR-1/dp2-fp32-default-meta")))
    assert {key: entry(count) for key, count in counts.items()} == {
        ("PP-1", "gpipe"): "2",
        ("PAR-1", "gpipe"): "2",
        ("PP-1", "looped-bfs"): "1, 1 fail",
        ("PAR-1", "looped-bfs"): "1",
    }
