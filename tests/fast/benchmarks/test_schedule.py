"""Simulated schedules of hand-made steps: shared runs, waits for runs and processors, and the effect of orders."""

import pytest

from benchmarks.schedule import Outcome, Place, Run, Step, as_reported, by_kind, dealt, longest_cells_first, simulate


def run(name: str, seconds: float, *, ranks: int = 2, kind: str = "dp2") -> Run:
    return Run(name, ranks, seconds, kind)


def steps(cell: str, seconds: float, *, judging_s: float = 1.0, cases: int = 2, **options: object) -> list[Step]:
    """Cases of a cell, all of which need its run."""
    own = run(cell, seconds, **options)  # type: ignore[arg-type]
    return [Step(f"PAR-{number}", cell, judging_s, (own,)) for number in range(cases)]


def outcome(given: list[Step], *, workers: int, processors: int) -> Outcome:
    return simulate(given, Place(workers, processors))


def test_one_worker_does_everything_and_runs_each_cell_once() -> None:
    assert outcome(steps("a", 10.0) + steps("b", 5.0), workers=1, processors=2).duration_s == pytest.approx(19.0)


def test_a_wide_world_is_faster_on_more_processors() -> None:
    wide = steps("a", 8.0, cases=1, ranks=4)
    assert [outcome(wide, workers=1, processors=count).duration_s for count in (1, 2, 4, 8)] == [17.0, 9.0, 5.0, 5.0]


def test_cases_of_one_cell_wait_for_its_run() -> None:
    """A worker holds two cases: those of `a` go to two workers, of which one waits for the run."""
    both = [step for pair in zip(steps("a", 10.0), steps("b", 10.0), strict=True) for step in pair]
    ended = outcome([both[0], both[1], both[2], both[3]], workers=2, processors=4)
    assert ended.duration_s == pytest.approx(22.0), "gw0 has a and b, gw1 waits for a and then has b as well"
    assert ended.waited_s["another's run"] == pytest.approx(20.0)


def test_two_worlds_do_not_share_processors() -> None:
    apart = [*steps("a", 10.0, cases=1), *steps("x", 0.0, cases=1), *steps("b", 10.0, cases=1)]
    assert outcome(apart, workers=2, processors=2).waited_s["slots"] > 9.0
    assert not outcome(apart, workers=2, processors=4).waited_s["slots"]


def test_judging_slows_runs_down_where_processors_are_too_few() -> None:
    """A run keeps both processors busy while another worker judges: 3 of 2 processors, so that both take longer."""
    mixed = [Step("PAR-1", "a", 0.0, (run("a", 10.0),)), Step("x", "x", 0.0), Step("PAR-1", "b", 10.0)]
    assert outcome(mixed, workers=2, processors=2).duration_s == pytest.approx(15.0)
    assert outcome(mixed, workers=2, processors=4).duration_s == pytest.approx(10.0)


def test_a_device_starts_a_world_for_each_change_of_kind() -> None:
    kinds = [*steps("a", 1.0, kind="dp2"), *steps("b", 1.0, kind="tp2"), *steps("c", 1.0, kind="dp2")]
    place = Place(workers=1, processors=8, devices=2, world_start_s=6.0)
    assert simulate(as_reported(kinds, 1), place).worlds == 3
    grouped = simulate(by_kind(kinds, 1), place)
    assert grouped.worlds == 2
    assert grouped.duration_s == pytest.approx(2 * 6.0 + 3 * 1.0 + 6 * 1.0)


def test_ranks_that_share_devices_take_turns() -> None:
    place = Place(workers=1, processors=8, devices=1)
    assert simulate(steps("a", 5.0, cases=1), place).duration_s == pytest.approx(11.0)


def test_cells_alternate_so_that_workers_do_not_wait() -> None:
    cells = [*steps("a", 10.0, cases=4), *steps("b", 10.0, cases=4)]
    assert [step.cell for step in dealt(cells, 2)] == ["a", "b"] * 4
    assert dealt(cells, 1) == cells
    first = [Step("ENV-1", "x", 0.1)] * 4  # of which each worker holds two
    together, apart = (
        outcome(first + order(cells, 2), workers=2, processors=4).duration_s for order in (as_reported, dealt)
    )
    assert together == pytest.approx(0.2 + 2 * 10.0 + 4.0)
    assert apart == pytest.approx(0.2 + 10.0 + 4.0)


def test_the_longest_cell_comes_first_after_preconditions() -> None:
    cells = [Step("ENV-1", "a", 0.1), *steps("a", 1.0, cases=1), *steps("b", 9.0, cases=1)]
    assert [step.cell for step in longest_cells_first(cells, 1)] == ["a", "b", "a"]
