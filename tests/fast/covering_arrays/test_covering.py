"""Covering arrays: every possible combination is there, none that is forbidden, and expensive values are rare."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering_arrays.combinations import Row, Rule, possible, seen
from conformance.covering_arrays.covering import Cost, covering_rows

Axes = dict[str, list[Any]]

AXES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.sampled_from([True, False, 1, 0, 2, "x", "y"]), min_size=2, max_size=4, unique_by=repr),
    min_size=3,
    max_size=5,
)


def combinations(axes: Axes, strength: int) -> list[dict[str, Any]]:
    """Return all combinations of values of `strength` different axes."""
    return [
        dict(zip(names, values, strict=True))
        for names in itertools.combinations(axes, strength)
        for values in itertools.product(*(axes[name] for name in names))
    ]


def contains(row: Row, values: Row) -> bool:
    """Return whether a row has these values; True is not 1."""
    return all(row[name] == value and type(row[name]) is type(value) for name, value in values.items())


def some_rules(axes: Axes, data: st.DataObject) -> list[Rule]:
    """Return rules that forbid some combinations of two or three values each, often enough that others follow."""
    nogoods = combinations(axes, 2) + combinations(axes, 3)
    forbidden = data.draw(st.lists(st.sampled_from(nogoods), max_size=12))
    return [Rule(values.keys(), lambda row, values=values: contains(row, values)) for values in forbidden]  # type: ignore[misc]


def allowed_rows(axes: Axes, rules: list[Rule]) -> list[dict[str, Any]]:
    everything = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [row for row in everything if not any(rule.forbids(row) for rule in rules)]


def in_rows(rows: list[dict[str, Any]], axes: Axes, strength: int) -> list[dict[str, Any]]:
    """Return the combinations that are in a row, by trying each."""
    return [wanted for wanted in combinations(axes, strength) if any(contains(row, wanted) for row in rows)]


def keys(members: Any) -> list[str]:
    """Return combinations in a form that tells True from 1 and forgets the order."""
    return sorted(repr(sorted(values.items(), key=lambda item: item[0])) for values in members)


@settings(max_examples=60, deadline=None)
@given(AXES, st.integers(1, 3), st.data())
def test_possible_are_the_combinations_of_all_allowed_rows(axes: Axes, strength: int, data: st.DataObject) -> None:
    rules = some_rules(axes, data)
    expected = in_rows(allowed_rows(axes, rules), axes, strength)
    assert keys(possible(axes, strength=strength, rules=rules)) == keys(expected)


@settings(max_examples=40, deadline=None)
@given(AXES, st.integers(1, 3), st.data())
def test_every_possible_combination_is_in_a_row(axes: Axes, strength: int, data: st.DataObject) -> None:
    rules = some_rules(axes, data)
    everything = allowed_rows(axes, rules)
    present = data.draw(st.lists(st.sampled_from(everything), max_size=3)) if everything else []
    rows = covering_rows(axes, strength=strength, rules=rules, given=present, rounds=2)
    assert keys(in_rows([*rows, *present], axes, strength)) == keys(in_rows(everything, axes, strength))
    assert all(row in everything for row in rows)
    assert all(list(row) == list(axes) for row in rows)
    assert len(rows) <= len(everything)
    assert rows == covering_rows(axes, strength=strength, rules=rules, given=present, rounds=2)


def test_impossible_without_a_rule_of_its_own() -> None:
    """a=1 needs b=1, which needs c=1, so a=1 and c=2 cannot be in one row."""
    axes = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    rules = [
        Rule(("a", "b"), lambda row: row["a"] == 1 and row["b"] == 2),
        Rule(("b", "c"), lambda row: row["b"] == 1 and row["c"] == 2),
    ]
    missing = keys(row for row in combinations(axes, 2) if row not in list(possible(axes, strength=2, rules=rules)))
    assert missing == keys([{"a": 1, "b": 2}, {"a": 1, "c": 2}, {"b": 1, "c": 2}])


def test_rules_that_contradict_each_other_leave_nothing() -> None:
    rules = [Rule(("a",), lambda row: True)]
    assert covering_rows({"a": [1, 2], "b": [1, 2]}, strength=2, rules=rules) == []


def test_rows_are_the_same_on_every_machine() -> None:
    axes: Axes = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False]}
    cost = Cost(("a",), lambda row: 0.1 * row["a"])
    rows = covering_rows(axes, strength=2, rules=[], cost=cost)
    pairs = [(1, "x", False), (1, "y", True), (3, "x", True), (2, "x", True), (2, "y", False), (3, "y", False)]
    assert [tuple(row.values()) for row in rows] == pairs


SIZES: Axes = {"ranks": [2, 4, 8], "compile": [False, True], **{name: [0, 1, 2] for name in "abcdef"}}
SECONDS = Cost(("ranks", "compile"), lambda row: {2: 0.6, 4: 1.5, 8: 5.0}[row["ranks"]] + 15 * row["compile"])


def total(rows: list[dict[str, Any]]) -> float:
    return sum(map(SECONDS.seconds, rows))


def test_expensive_values_are_in_few_rows() -> None:
    cheap = covering_rows(SIZES, strength=2, rules=[], cost=SECONDS)
    few = covering_rows(SIZES, strength=2, rules=[])
    assert keys(seen(cheap, SIZES, 2)) == keys(seen(few, SIZES, 2)) == keys(combinations(SIZES, 2))
    assert sum(row["compile"] for row in cheap) == 3, "one with each number of ranks, which is the least"
    assert total(cheap) < 0.8 * total(few)
    assert len(few) <= len(cheap)


def test_given_rows_need_not_be_repeated() -> None:
    rows = covering_rows(SIZES, strength=2, rules=[])
    assert covering_rows(SIZES, strength=2, rules=[], given=rows) == []
    others = [{"ranks": 16, "a": 0, "unknown": 1}, {"b": 1}]
    assert covering_rows(SIZES, strength=2, rules=[], given=others) == rows, "they have no pair of these values"


def test_rows_of_an_earlier_array_stay() -> None:
    """Another value adds rows, another rule takes away those that break it, and what others cover goes."""
    old = covering_rows(SIZES, strength=2, rules=[])
    assert covering_rows(SIZES, strength=2, rules=[], kept=old) == old
    assert keys(covering_rows(SIZES, strength=2, rules=[], kept=[*old, old[0]])) == keys(old)
    gone = [row for row in old if row["ranks"] == 8 and row["a"] == 2]
    forbidden = Rule(("ranks", "a"), lambda row: row["ranks"] == 8 and row["a"] == 2)
    rows = covering_rows(SIZES, strength=2, rules=[forbidden], kept=old)
    assert gone
    assert [row for row in old if row not in rows] == gone
    wider = covering_rows(SIZES | {"b": [0, 1, 2, 3]}, strength=2, rules=[], kept=old)
    assert wider[: len(old)] == old
    assert len(seen(wider, SIZES | {"b": [0, 1, 2, 3]}, 2)) > len(seen(old, SIZES, 2))


def test_a_share_is_covered_by_the_cheapest_rows() -> None:
    rows = covering_rows(SIZES, strength=3, rules=[], cost=SECONDS, until=0.8, rounds=2)
    wanted = possible(SIZES, strength=3, rules=[])
    assert len(seen(rows, SIZES, 3) & wanted) >= 0.8 * len(wanted)
    assert total(rows) < 0.4 * total(covering_rows(SIZES, strength=3, rules=[], cost=SECONDS, rounds=2))


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ({"a": [1, 2], "b": [1, 2]}, {"strength": 3}, "strength 3 needs at least as many axes .*; there are 2"),
        ({"a": [1, 2], "b": []}, {"strength": 2}, "an axis needs values, each once: correct b"),
        ({"a": [1, 1], "b": [1]}, {"strength": 2}, "an axis needs values, each once: correct a"),
        ({"a": [1, 2], "b": [1]}, {"strength": 1, "until": 1.5}, "until = 1.5: give a share"),
        ({"a": [1, 2], "b": [1]}, {"strength": 1, "cost": Cost((), lambda row: 0)}, "costs 0 s: give a time of more"),
    ],
)
def test_refused(axes: Axes, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        covering_rows(axes, rules=[], **options)


def test_a_rule_on_too_many_axes_is_refused() -> None:
    axes = {f"axis{number}": list(range(10)) for number in range(7)}
    with pytest.raises(ValueError, match="10000000 combinations: split it"):
        possible(axes, strength=2, rules=[Rule(axes, lambda row: False)])
