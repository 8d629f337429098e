"""Support of cases by a version of torch."""

import pytest

from conformance.judge.support import Machine, unsupported
from conformance.laws.registry import asserted_laws
from conformance.plan.cells import Cell
from conformance.run.devices.hardware import Hardware

ZERO_BUBBLE = Cell(mesh="pp2-dp2", model="cut", accumulation=4, pipeline="zbv-zero-bubble")


@pytest.mark.parametrize(
    ("torch_version", "cell", "is_supported"),
    [
        ("2.11.0", ZERO_BUBBLE, False),
        ("2.13.0", ZERO_BUBBLE, True),
        ("2.11.0", ZERO_BUBBLE.but(pipeline="interleaved-zero-bubble"), True),
    ],
)
def test_stages_of_one_rank_that_send_to_each_other(torch_version: str, cell: Cell, is_supported: bool) -> None:
    """Gloo cannot send from a rank to itself, which torch asks of it up to 2.12."""
    machine = Machine(hardware=Hardware(), torch_version=torch_version, max_world_size=8)
    reason = unsupported(asserted_laws()["PP-1"].law, cell, machine)
    assert reason is None if is_supported else reason and "gloo cannot do" in reason
