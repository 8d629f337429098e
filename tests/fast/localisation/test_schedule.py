"""First collective out of place in a stream of made-up ones."""

import pytest

from conformance.localisation.schedule import Key, Misfit, first_misfit

EXPECTED = [
    Key("forward", "all_gather", "dp_shard", 8, "float32", None, "layers.0", "layers.0"),
    Key("forward", "all_gather", "dp_shard", 8, "float32", None, "layers.1", "layers.1"),
    Key("backward", "reduce_scatter", "dp_shard", 16, "float32", None, "", "layers.1"),
    Key("backward", "reduce_scatter", "dp_shard", 16, "float32", None, "", "layers.0"),
]
"""Collectives of two groups that are kept after forward."""
FIRST, SECOND, THIRD, FOURTH = EXPECTED


def misfit(issued: list[Key], *, ordered: bool = True) -> Misfit:
    found = first_misfit(1, 0, "FSDP", list(enumerate(issued, 10)), EXPECTED, ordered=ordered)
    assert found is not None
    assert found.rank == 1
    return found


def test_equal_collectives_fit() -> None:
    assert first_misfit(0, 0, "FSDP", list(enumerate(EXPECTED)), EXPECTED, ordered=True) is None


def test_groups_that_have_no_name_yet_get_that_of_the_expected_one() -> None:
    unnamed = [FIRST._replace(purpose=""), *EXPECTED[1:]]
    assert first_misfit(0, 0, "FSDP", list(enumerate(unnamed)), EXPECTED, ordered=True) is None


@pytest.mark.parametrize(
    ("issued", "index", "wrong", "clause"),
    [
        ([FIRST, FIRST, SECOND, THIRD, FOURTH], 11, FIRST, "superfluous"),
        ([FIRST, THIRD, FOURTH], 11, SECOND, "missing"),
        ([FIRST, SECOND, FOURTH, THIRD], 12, FOURTH, "another order, where reduce_scatter over dp_shard"),
        ([FIRST._replace(dtype="bfloat16"), SECOND, THIRD, FOURTH], 10, FIRST, "in bfloat16, expected float32"),
        ([FIRST, SECOND._replace(during="layers.0"), THIRD, FOURTH], 11, SECOND, "when forward has entered layers.0"),
    ],
)
def test_the_first_misfit_is_told(issued: list[Key], index: int, wrong: Key, clause: str) -> None:
    found = misfit(issued)
    assert (found.index, (found.issued or found.expected or FIRST).what) == (index, wrong.what)
    assert clause in found.clause


def test_without_an_order_the_surplus_is_told() -> None:
    found = misfit([SECOND, FIRST, FOURTH, THIRD, THIRD], ordered=False)
    assert (found.index, found.issued) == (14, THIRD)
    assert misfit([SECOND, FIRST, FOURTH], ordered=False).expected == THIRD
