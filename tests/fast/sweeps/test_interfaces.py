"""Interfaces that are swept by covering arrays: no parameter is left out, and defaults keep all rules."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.sweeps.dtensor_interface import interfaces
from conformance.sweeps.interface_sweep import Interface, layout_of, layouts
from conformance.sweeps.style_options import style_interfaces
from reference_trainer.checks import UsageError

MESHES = [
    SimpleNamespace(ndim=1, size=lambda dim=0: 2),
    SimpleNamespace(ndim=2, size=lambda dim=None: 4 if dim is None else 2),
]
EVERY = [*style_interfaces(), *(each for mesh in MESHES for each in interfaces(cast("Any", mesh)))]


@pytest.mark.parametrize("interface", EVERY, ids=[f"{index} {each.name}" for index, each in enumerate(EVERY)])
def test_every_parameter_has_values_and_defaults_keep_the_rules(interface: Interface) -> None:
    options = interface.options  # raises for a parameter without values
    assert all(len(values) == len(set(map(repr, values))) for values in options.values())
    defaults = {option: values[0] for option, values in options.items()}
    for rule in interface.rules:
        assert {*rule.axes} <= options.keys()
        assert not rule.forbids(defaults)


def test_a_parameter_without_values_is_an_error() -> None:
    def function(x: int, switch: bool = False, other: str = "") -> None: ...

    interface = Interface("function", function, {}, lambda _options, _mesh: iter(()), given=("x",))
    with pytest.raises(UsageError, match="function: give values for its parameter other"):
        _ = interface.options
    told = Interface("function", function, {"other": ("", "a"), "gone": (1,)}, interface.faults, given=("x",))
    assert told.options == {"other": ("", "a"), "switch": (False, True)}


def test_layouts_are_read_back_from_their_text() -> None:
    for ndim, count in ((1, 3), (2, 9)):
        texts = layouts(ndim, ("R", "S0", "P"))
        assert len(texts) == count
        assert all(len(layout_of(text)) == ndim for text in texts)
