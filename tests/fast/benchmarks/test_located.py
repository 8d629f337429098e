"""Faults outside of the catalogue are complete: each has a source, a cell, laws, and a place that exists."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks.located import LocatedDefect, faults, is_named, reported_faults, ttrace_faults
from conformance.defects.catalogue import TWIN, defects, require_known
from conformance.defects.places import Place
from conformance.judge.registry import asserted_laws
from conformance.plan.cells import cell_from_id
from conformance.report.location import Location, Stage
from reference_trainer.checks import UsageError
from reference_trainer.config import ModelConfig
from reference_trainer.model import Transformer

MODULES = (ttrace_faults, reported_faults)
FAULTS = [
    pytest.param(f"{module.__file__}:{name}", fault, id=name)
    for module in MODULES
    for name, fault in faults(module).items()
]


def names() -> set[str]:
    """Return the names of modules, parameters and buffers of a model, and the empty name of the run."""
    with torch.device("meta"):
        model = Transformer(ModelConfig(n_layers=5, bias=True))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return {"", *dict(model.named_modules()), *parameters, *buffers}


@pytest.mark.parametrize(("path", "fault"), FAULTS)
def test_fault_is_complete(path: str, fault: LocatedDefect) -> None:
    assert require_known(path) == path
    assert require_known(path + TWIN) == path + TWIN
    assert fault.why
    assert re.match(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+$", fault.source)
    assert fault.laws
    assert set(fault.laws) <= asserted_laws().keys()
    cell = fault.cells.removeprefix("id = ")
    assert cell_from_id(cell).id == cell


@pytest.mark.parametrize(("path", "fault"), FAULTS)
def test_place_exists(path: str, fault: LocatedDefect) -> None:
    place = fault.place
    assert {*place.stages} <= {*get_args(Stage)}
    assert [name for name in names() if re.fullmatch(place.name or "", name)]


def test_faults_are_not_in_the_catalogue() -> None:
    own = [fault.id for module in MODULES for fault in faults(module).values()]
    assert len(own) == len(set(own))
    assert not set(own) & {fault.id for fault in defects()}
    assert len(faults(reported_faults)) == 12


def test_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="named unknown"):
        require_known(f"{Path(ttrace_faults.__file__)}:unknown")


@pytest.mark.parametrize(
    ("changed", "named"),
    [({}, True), ({"name": "layers.1.feed_forward"}, False), ({"stage": "forward"}, False), ({"quantity": ""}, False)],
)
def test_place_is_named_by_all_fields(changed: dict[str, str], named: bool) -> None:
    place = Place(stages=("backward",), name=r"layers\.1\.attention", quantity="gradient")
    fields = {"stage": "backward", "name": "layers.1.attention", "quantity": "gradient of its input"} | changed
    location = Location(case="", cell="", family="tensor", ranks=[0], ranks_text="all ranks", **fields)  # type: ignore[arg-type]
    assert is_named(place, location) is named
