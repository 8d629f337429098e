"""Substrate `sim` in sessions: cases that run on it, unsupported ones, and the lines in a report."""

from conformance.detection.case_judge import the_matrix
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine, unsupported
from conformance.plan.cells import Cell
from conformance.plan.substrates import CUDA, REAL, SIMULATED, STREAMS
from conformance.report.facts import environment_facts
from conformance.run.devices.hardware import Hardware, SimulatedDevice, device_type, kernel_type
from conformance.simulated_device import schedules
from conformance.simulated_device.building import LIBRARY_VARIABLE

HARDWARE = Hardware(simulated=SimulatedDevice(schedule="lazy", library="/cache/simdev.so"))
CELL = Cell(mesh="dp2")


def lacking(law: str, cell: Cell, hardware: Hardware = HARDWARE, *, profile: str = "pr") -> str | None:
    machine = Machine(hardware=hardware, torch_version="2.13.0+cpu", max_world_size=8)
    return unsupported(asserted_laws()[law].law, cell, machine, profile=the_matrix().profile(profile))


def test_laws_of_ranks_and_of_streams_run_on_it() -> None:
    assert [HARDWARE.substrate(2, among) for among in (REAL, STREAMS, CUDA, SIMULATED, ("gloo",))] == [
        "sim",
        "sim",
        None,
        "simulated",
        "gloo",
    ]
    assert HARDWARE.environment("sim") == {LIBRARY_VARIABLE: "/cache/simdev.so", schedules.VARIABLE: "lazy"}
    assert HARDWARE.environment("gloo") == {}
    assert (device_type("sim"), kernel_type("sim")) == ("sim", "cpu")


def test_nothing_on_it_counts_for_certify() -> None:
    reason = lacking("PAR-1", CELL, profile="certify")
    assert reason is not None
    assert "the profile needs 8 GPUs; none found" in reason


def test_what_it_lacks_is_unsupported_with_a_reason() -> None:
    assert lacking("PAR-1", CELL) is None
    assert lacking("OFF-2", CELL.but(offload="cpu", pin_memory=True)) is None
    assert lacking("ENV-4", CELL) == "needs 2 GPUs (nccl); none found"
    where = "this run is on the simulated accelerator"
    assert lacking("PAR-1", CELL.but(tf32=True)) == f"needs a CUDA device, which rounds products to TF32; {where}"
    assert lacking("PAR-1", CELL.but(expandable_segments="1")) == f"needs CUDA expandable segments; {where}"


def test_a_device_that_cannot_be_compiled_is_no_pass() -> None:
    missing = Hardware(simulated=SimulatedDevice(schedule="lazy", lacks="install g++"))
    assert lacking("PAR-1", CELL, missing) == "install g++"


def test_a_report_says_what_it_cannot_show() -> None:
    facts = environment_facts(HARDWARE)
    assert facts["device"] == {"type": "sim", "name": "simulated accelerator, schedule lazy", "count": 1}
    assert "NCCL" in facts["cannot_show"]
    assert "the simulated accelerator is a model" in facts["cannot_show"]
