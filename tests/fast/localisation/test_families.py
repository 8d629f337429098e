"""Places by family: all laws have one, and a law's own finding becomes a location."""

from conformance.judge.measurements import Measurement
from conformance.judge.registry import asserted_laws
from conformance.localisation.families import table_of_places, where_of
from conformance.localisation.findings import own_finding
from conformance.plan.cells import Cell

CELL = Cell(mesh="dp2")


def wrong(name: str, at: str) -> dict[str, Measurement]:
    right = Measurement(kind="exact", value=0.0, lower=0.0, upper=0.0, unit="elements")
    return {"right": right, name: Measurement(kind="exact", value=3.0, lower=0.0, upper=0.0, unit="elements", at=at)}


def test_each_law_has_a_place_and_each_row_of_the_table_is_used() -> None:
    wheres = [where_of(law) for law in asserted_laws()]
    assert all(where.searches[-1] == "finding" for where in wheres)
    assert table_of_places().count("\n") == len(set(wheres)) + 1
    assert all(where.place in table_of_places() for where in wheres)


def test_the_trial_of_a_sweep_is_a_place() -> None:
    metrics = wrong("set_gradient_divide_factor", "{'rank 1: own mesh, factor 4.0': 3}")
    location = own_finding(CELL, metrics, "")
    assert location is not None
    assert (location.family, location.name) == ("trial", "set_gradient_divide_factor")
    assert (location.quantity, location.ranks) == ("own mesh, factor 4.0", [1])
    assert location.equals == "3 elements, expected 0"


def test_the_subject_of_an_operator_is_a_place() -> None:
    location = own_finding(CELL, wrong("mean: wrong", ""), "mean: wrong: 3 calls, expected 0; Shard(0) on rank 0\nmore")
    assert location is not None
    assert (location.name, location.quantity, location.elements) == ("mean", "wrong", "Shard(0) on rank 0")


def test_nothing_is_found_where_all_metrics_are_within_their_bounds() -> None:
    assert own_finding(CELL, {"right": wrong("x", "")["right"]}, "") is None
