"""Examples in the docstrings of assertions, which show a newcomer their names and messages."""

import doctest

import pytest
import torch

from conformance.assertions import compare, sweeps
from conformance.bound import EXACT, bound


@pytest.mark.parametrize(("module", "least"), [(compare, 9), (sweeps, 2)])
def test_examples_are_right(module: object, least: int) -> None:
    names = {**vars(module), "torch": torch, "bound": bound, "EXACT": EXACT}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in finder.find(module, globs=names):
        runner.run(example)
    failed, tried = runner.summarize()
    assert failed == 0
    assert tried >= least
