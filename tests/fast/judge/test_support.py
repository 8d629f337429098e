"""Support of cases by a version of torch."""

import pytest
from msgspec.structs import replace

from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine, unsupported
from conformance.plan.cells import Cell
from conformance.run.devices.hardware import Hardware, SimulatedDevice
from tests.support.fake_devices import some_devices

ZERO_BUBBLE = Cell(mesh="pp2-dp2", model="cut", accumulation=4, pipeline="zbv-zero-bubble")


@pytest.mark.parametrize(
    ("torch_version", "cell", "reason"),
    [
        ("2.9.1", ZERO_BUBBLE.but(pipeline="1f1b"), "pipelines are judged from 2.10 on"),
        ("2.10.0", ZERO_BUBBLE.but(pipeline="1f1b"), None),
        ("2.11.0", ZERO_BUBBLE, "the stages of one rank send to each other, which gloo cannot do"),
        ("2.13.0", ZERO_BUBBLE, None),
        ("2.11.0", ZERO_BUBBLE.but(pipeline="interleaved-zero-bubble"), None),
    ],
)
def test_pipelines_by_version(torch_version: str, cell: Cell, reason: str | None) -> None:
    """Gloo refuses the metadata that stages of older versions exchange before their first step."""
    machine = Machine(hardware=Hardware(), torch_version=torch_version, max_world_size=8)
    found = unsupported(asserted_laws()["PP-1"].law, cell, machine)
    assert found == reason or (reason and found and reason in found)


@pytest.mark.parametrize(("torch_version", "refused"), [("2.11.0", False), ("2.12.1", True), ("2.13.0", False)])
def test_pipelines_on_the_simulated_device_by_version(torch_version: str, refused: bool) -> None:
    """Since https://github.com/pytorch/pytorch/pull/177728, until https://github.com/pytorch/pytorch/pull/180512."""
    simulated = Hardware(simulated=SimulatedDevice(schedule="lazy", library="/cache/simdev.so"))
    machine = Machine(hardware=simulated, torch_version=torch_version, max_world_size=8)
    found = unsupported(asserted_laws()["PP-1"].law, ZERO_BUBBLE.but(pipeline="1f1b"), machine)
    assert (found is not None and "forks CUDA's generators" in found) == refused


def test_the_run_that_saves_needs_its_ranks_too() -> None:
    """A cell that two devices can run resumes a checkpoint of a larger mesh."""
    resumed = Cell(mesh="dp2", saved_on="hsdp2x2", steps=4)
    devices = Hardware(devices=some_devices(2), ranks_per_device=1, nccl=(2, 27, 3))
    law = asserted_laws()["CKPT-1"].law
    on_devices = replace(law, substrates=("nccl",))
    machine = Machine(hardware=devices, torch_version="2.13.0", max_world_size=8)
    assert unsupported(on_devices, resumed, machine) == "needs 4 GPUs (nccl); 2 found"
    assert unsupported(on_devices, resumed.but(saved_on="tp2"), machine) is None
    small = Machine(hardware=Hardware(), torch_version="2.13.0", max_world_size=2)
    assert unsupported(law, resumed, small) == "needs 4 ranks; gloo runs at most 2 here"
    assert unsupported(law, resumed.but(saved_on="tp2"), small) is None
