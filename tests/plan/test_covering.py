"""Covering arrays: every allowed combination is there, none that is forbidden."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.plan.covering import Row, Rule, covering_rows

AXES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.sampled_from([True, False, 1, 0, 2, "x", "y"]), min_size=2, max_size=4, unique_by=repr),
    min_size=3,
    max_size=5,
)


def combinations(axes: dict[str, list[Any]], strength: int) -> list[dict[str, Any]]:
    """Return all combinations of values of `strength` different axes."""
    return [
        dict(zip(names, values, strict=True))
        for names in itertools.combinations(axes, strength)
        for values in itertools.product(*(axes[name] for name in names))
    ]


def contains(row: Row, values: Row) -> bool:
    """Return whether a row has these values; True is not 1."""
    return all(row[name] == value and type(row[name]) is type(value) for name, value in values.items())


@settings(max_examples=40, deadline=None)
@given(AXES, st.integers(2, 3), st.data())
def test_every_allowed_combination_is_in_a_row(axes: dict[str, list[Any]], strength: int, data: st.DataObject) -> None:
    forbidden: list[dict[str, Any]] = data.draw(st.lists(st.sampled_from(combinations(axes, 2)), max_size=2))

    def forbids(row: Row) -> bool:
        return any(values.keys() <= row.keys() and contains(row, values) for values in forbidden)

    rules = [Rule(values.keys(), lambda row, values=values: contains(row, values)) for values in forbidden]  # type: ignore[misc]
    rows = covering_rows(axes, strength=strength, rules=rules)
    everything = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    possible = [row for row in everything if not forbids(row)]
    for wanted in combinations(axes, strength):
        if any(contains(row, wanted) for row in possible):
            assert any(contains(row, wanted) for row in rows), wanted
    assert not any(forbids(row) for row in rows)
    assert len(rows) <= len(everything)
    assert rows == covering_rows(axes, strength=strength, rules=rules), "the same on every machine"


def test_more_strength_than_axes() -> None:
    with pytest.raises(ValueError, match="strength 3 needs at least as many axes with several values; there are 2"):
        covering_rows({"a": [1, 2], "b": [1, 2]}, strength=3, rules=[])
