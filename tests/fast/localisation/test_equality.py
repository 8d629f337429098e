"""Clauses about a wrong tensor: the value that it equals, and its wrong elements."""

import math

import pytest
import torch

from conformance.localisation.equality import (
    deviation,
    elements_clause,
    equals_clause,
    ratio_names,
    weights_of_terms,
)

EXPECTED = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])


@pytest.mark.parametrize(
    ("measured", "clause"),
    [
        (EXPECTED / 2, "0.5 x expected = 1/tp"),
        (EXPECTED * 3, "3 x expected"),
        (EXPECTED * 0, "is zero"),
        (EXPECTED + torch.tensor([0.0, math.nan, 0.0]), "2 of 6 elements are not finite"),
        (EXPECTED[:1], "has shape (1, 3), expected (2, 3)"),
        (EXPECTED.flip(0), "has the expected elements in another order"),
        (EXPECTED.square(), "is the square"),
        (EXPECTED + torch.tensor([5.0, 0.0, 1.0]), ""),
    ],
)
def test_the_value_of_a_wrong_tensor_is_named(measured: torch.Tensor, clause: str) -> None:
    others = {"the square": EXPECTED.square()}
    assert equals_clause(measured, EXPECTED, sizes={"tp": 2.0}, others=others) == clause


def test_a_rounded_tensor_is_told_from_one_in_16_bits() -> None:
    expected = torch.tensor([1.0 + 2.0**-10, 3.0])
    assert equals_clause(expected.bfloat16().float(), expected, sizes={}, others={}) == "is rounded to bf16"
    assert not equals_clause(expected.bfloat16() + 1, expected, sizes={}, others={})


def test_a_tensor_that_hardly_changes_is_not_taken_for_an_earlier_one() -> None:
    measured, earlier = EXPECTED * (1 + 2e-6), EXPECTED * (1 - 1e-6)
    assert equals_clause(measured, EXPECTED, sizes={}, others={"the earlier": earlier}) == ""
    assert equals_clause(earlier, EXPECTED, sizes={}, others={"the earlier": earlier}) == "is the earlier"


def test_numbers_of_other_kinds_are_equal_or_not() -> None:
    tokens = torch.tensor([1, 2])
    assert deviation(tokens, tokens) == 0.0
    assert deviation(tokens, tokens + 1) == math.inf
    assert equals_clause(tokens + 1, tokens, sizes={}, others={"the next": tokens + 1}) == "is the next"
    assert deviation(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert deviation(torch.tensor([math.inf, 1.0]), torch.tensor([math.nan, 1.0])) == 0.0


def test_a_ratio_has_the_names_of_all_sizes_that_it_equals() -> None:
    assert ratio_names(2.0, {"tp": 2, "dp": 4, "pp": 1}) == ["tp", "sqrt(dp)"]
    assert ratio_names(0.25, {"tp": 2, "dp": 4}) == ["1/dp"]


def test_a_sum_tells_the_weights_of_its_terms() -> None:
    terms = [torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 1.0])]
    weights = weights_of_terms(2 * terms[0], terms)
    assert weights is not None
    assert weights == pytest.approx([2.0, 0.0], abs=1e-9)
    assert weights_of_terms(torch.tensor([1.0, 0.0, 0.0]), terms) is None
    assert weights_of_terms(terms[0], [terms[0], terms[0]]) is None  # equal terms have no weights of their own


@pytest.mark.parametrize(
    ("wrong", "clause"),
    [
        ((slice(4, 8), slice(None)), "12 of 24 elements are wrong, in rows 4 to 7 of 8"),
        ((slice(None), 1), "8 of 24 elements are wrong, in columns 1 of 3"),
        ((slice(None), slice(None)), ""),
    ],
)
def test_wrong_elements_are_told_by_rows_or_columns(wrong: tuple[slice, slice | int], clause: str) -> None:
    expected = torch.ones(8, 3)
    measured = expected.clone()
    measured[wrong] += 1.0
    assert elements_clause(measured, expected, within=0.0) == clause
