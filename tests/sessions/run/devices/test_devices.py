"""CUDA devices, and the hardware that worlds run on, tested without a device."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from msgspec.structs import replace

from conformance.defects.catalogue import defects
from conformance.detection.case_judge import the_matrix
from conformance.judge.law import law_of
from conformance.judge.registry import asserted_laws, law_tests
from conformance.judge.support import Machine, unsupported
from conformance.judge.verdicts import Verdict, exit_status
from conformance.numerics.arithmetic import Arithmetic
from conformance.plan.cells import Cell
from conformance.plan.substrates import CUDA, REAL, SIMULATED, STREAMS, Substrate
from conformance.project import PROJECT
from conformance.report.facts import environment_facts
from conformance.run.devices import nvml as module
from conformance.run.devices.hardware import (
    DETERMINISM,
    NO_DEVICES,
    Hardware,
    SimulatedDevice,
    device_type,
    devices_for,
    find_hardware,
    kernel_type,
    nccl_version,
)
from conformance.run.devices.nvml import (
    SESSION_VARIABLE,
    Device,
    NoDevices,
    foreign_processes,
    machine_devices,
    sees_process,
    select,
    visible_devices,
)
from conformance.run.ranks.messages import RANK_IN_VALUE
from conformance.sim import schedules
from conformance.sim.building import LIBRARY_VARIABLE
from tests.support.fake_devices import FakeDevices, some_devices
from tests.support.sessions import finish, suite

THREE = some_devices(3)


# CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("0,-1,2", [0]),
        ("0,7,2", [0]),
        ("GPU-1,GPU-0abc", [1, 0]),
        ("GPU-", []),  # names all, so none
        ("NoDevFiles", []),
    ],
)
def test_select_by_index_and_uuid(visible: str | None, indices: list[int]) -> None:
    assert select(THREE, visible, in_pci_order=False) == tuple(THREE[index] for index in indices)


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("0,0", "CUDA_VISIBLE_DEVICES is 0,0: 0 names a device a second time"),
        ("1,GPU-1", "GPU-1 names a device a second time"),
        ("MIG-123", "slices of a device .MIG. are not supported; name full devices"),
    ],
)
def test_unclear_selections_are_refused(visible: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(THREE, visible, in_pci_order=False)


def test_an_index_among_different_devices_needs_an_order() -> None:
    mixed = (*THREE, Device("GPU-9", "Fake 2000", 1))
    with pytest.raises(ValueError, match="but devices differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs"):
        select(mixed, "3", in_pci_order=False)
    assert select(mixed, "3", in_pci_order=True) == (mixed[3],)
    assert select(mixed, "GPU-9", in_pci_order=False) == (mixed[3],)


def test_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert visible_devices(FakeDevices(THREE)) == (THREE[2],)


# NVML


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    interface = machine_devices()
    assert isinstance(interface, NoDevices)
    assert (interface.devices(), interface.driver()) == ((), None)
    for ask in (interface.used_bytes, interface.processes):
        with pytest.raises(ValueError, match="there is no device GPU-1: this machine has no NVIDIA driver"):
            ask("GPU-1")


NVML = SimpleNamespace(
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
    nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
    nvmlDeviceGetUUID=lambda handle: handle,
    nvmlDeviceGetName=lambda handle: f"name of {handle}",
    nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80, used=7),
    nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=42, usedGpuMemory=None)],
    NVML_COMPUTEMODE_DEFAULT=0,
    nvmlDeviceGetComputeMode=lambda handle: 3 if handle == "GPU-1" else 0,
    nvmlSystemGetDriverVersion=lambda: "999.1",
    NVMLError=pynvml.NVMLError,
)
"""Substitute for pynvml with two devices."""


def test_devices_as_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pynvml", NVML)
    interface = machine_devices()
    assert interface.devices() == tuple(Device(f"GPU-{i}", f"name of GPU-{i}", 80, bool(i)) for i in (0, 1))
    assert (interface.used_bytes("GPU-1"), interface.driver()) == (7, "999.1")
    assert [(process.pid, process.used_bytes) for process in interface.processes("GPU-1")] == [(42, None)]


def test_processes_of_other_sessions_are_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, str(os.getpid()))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        gone = subprocess.Popen(["true"])
        gone.wait()
        present = FakeDevices(THREE, running={"GPU-0abc": [os.getpid(), child.pid, os.getppid(), gone.pid]})
        assert foreign_processes(present, "GPU-0abc") == [os.getppid(), gone.pid]
        assert foreign_processes(present, "GPU-1abc") == []
        child.communicate(b"\n")


# What worlds run on


@pytest.mark.parametrize(
    ("devices", "per_device", "world_size", "substrate"),
    [
        (0, 4, 1, "gloo"),
        (1, 4, 1, "nccl"),
        (1, 4, 4, "nccl-shared"),
        (1, 4, 8, "gloo"),
        (1, 1, 2, "gloo"),
        (8, 1, 8, "nccl"),
        (3, 4, 8, "nccl-shared"),
    ],
)
def test_the_strongest_substrate_is_used(devices: int, per_device: int, world_size: int, substrate: Substrate) -> None:
    hardware = Hardware(devices=some_devices(devices), ranks_per_device=per_device)
    assert hardware.substrate(world_size, REAL) == substrate
    assert hardware.substrate(world_size, SIMULATED) == "simulated"
    assert hardware.substrate(world_size, ("gloo",)) == "gloo"
    on_cuda = None if substrate == "gloo" else substrate
    assert hardware.substrate(world_size, CUDA) == on_cuda
    assert device_type(substrate) == ("cpu" if substrate == "gloo" else "cuda")


@pytest.mark.parametrize(
    ("world_size", "among", "count"), [(1, 1, 1), (4, 1, 1), (2, 8, 2), (4, 3, 2), (8, 3, 3), (5, 2, 2)]
)
def test_a_world_takes_as_few_devices_as_it_needs(world_size: int, among: int, count: int) -> None:
    assert devices_for(world_size, among=among) == count


def test_environment_of_ranks() -> None:
    old, new = (Hardware(devices=THREE, nccl=version) for version in ((2, 29, 7), (2, 30, 3)))
    assert old.environment("gloo") == {}
    assert old.environment("nccl") == DETERMINISM
    assert old.environment("nccl-shared")["NCCL_HOSTID"] == f"conformance-{RANK_IN_VALUE}"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in old.environment("nccl-shared")
    assert new.environment("nccl-shared")["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new.environment("nccl-shared")


def test_processes_of_a_session_are_pinned_as_ranks_are_and_compile_alone() -> None:
    on_devices = Hardware(devices=THREE).session_environment()
    assert on_devices.items() >= DETERMINISM.items()
    assert on_devices["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert on_devices["OMP_NUM_THREADS"] == "1"
    assert NO_DEVICES.session_environment() == {name: "1" for name in on_devices if name.endswith("NUM_THREADS")}


def test_oracles_of_each_worker_compute_on_a_device_of_their_own() -> None:
    """Else the contexts of all workers would lie on the first device."""
    hardware = Hardware(devices=THREE)
    shown = [hardware.session_environment(worker=worker)["CUDA_VISIBLE_DEVICES"] for worker in range(4)]
    assert shown == [*(device.uuid for device in THREE), THREE[0].uuid]


@pytest.mark.parametrize(("accelerator", "refused"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_devices_for_one_process_alone_are_refused(accelerator: str, refused: bool) -> None:
    device = replace(THREE[0], is_exclusive=True)
    if not refused:
        assert find_hardware(FakeDevices((device,)), accelerator=accelerator, share_gpu="auto") is not None
        return
    with pytest.raises(ValueError, match=r"GPU-0abc: the compute mode allows one process.*nvidia-smi --compute-mode 0"):
        find_hardware(FakeDevices((device,)), accelerator=accelerator, share_gpu="auto")


def test_a_process_is_missing_where_the_driver_counts_in_another_namespace() -> None:
    here = FakeDevices(THREE, running={THREE[0].uuid: [17, 18]})
    assert sees_process(here, THREE[0].uuid, 17)
    assert not sees_process(here, THREE[0].uuid, 19)


def test_find_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("conformance.run.devices.hardware.nccl_version", lambda: (2, 29, 7))
    here = FakeDevices(THREE)
    hardware = find_hardware(here, accelerator="auto", share_gpu="auto")
    assert hardware == Hardware(devices=THREE, ranks_per_device=4, nccl=(2, 29, 7), driver="999.1")
    assert find_hardware(here, accelerator="cuda", share_gpu="never").ranks_per_device == 1
    assert find_hardware(here, accelerator="auto", share_gpu="2").ranks_per_device == 2
    assert find_hardware(here, accelerator="cpu", share_gpu="never") == NO_DEVICES
    assert find_hardware(FakeDevices(), accelerator="auto", share_gpu="auto") == Hardware(ranks_per_device=4)


@pytest.mark.parametrize(
    ("accelerator", "share_gpu", "message"),
    [
        ("gpu", "auto", r"--accelerator gpu: write auto, cpu, cuda or sim\[:SCHEDULE\]"),
        ("cuda", "auto", "--accelerator cuda: no CUDA device is visible; check the driver"),
        ("auto", "0", "--share-gpu 0: write auto, never, or how many ranks may share a GPU"),
        ("auto", "many", "--share-gpu many"),
    ],
)
def test_find_hardware_refuses_unknown_options(accelerator: str, share_gpu: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_hardware(FakeDevices(), accelerator=accelerator, share_gpu=share_gpu)


def test_nccl_of_the_package_or_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.run.devices.hardware.version", lambda name: {"nvidia-nccl-cu13": "2.30.7"}[name])
    assert nccl_version() == (2, 30, 7)


# Cases and profiles


CPU, GPUS = NO_DEVICES, Hardware(devices=THREE)
ONE_GPU, ONE_SHARED = (Hardware(devices=some_devices(1), ranks_per_device=ranks) for ranks in (1, 2))
SIM = Hardware(simulated=SimulatedDevice(schedule="lazy", library="/cache/simdev.so"))
OTHER_KERNELS = Hardware(arithmetic=Arithmetic(kernels="other:1", sums="ring"))
ON_CPU, ON_SIM = "this run is on the CPU", "this run is on the simulated accelerator"
OTHER_MEMORY = "is about the memory of torch's own kernels and of gloo, and this session has others"
DP2 = Cell(mesh="dp2")
PINNED, TF32, EXPANDABLE = DP2.but(offload="cpu", pin_memory=True), DP2.but(tf32=True), DP2.but(expandable_segments="1")


def missing(law: str, cell: Cell, hardware: Hardware, *, profile: str = "pr") -> str | None:
    machine = Machine(hardware=hardware, torch_version="2.13.0", max_world_size=8)
    return unsupported(asserted_laws()[law].law, cell, machine, profile=the_matrix().profile(profile))


@pytest.mark.parametrize(
    ("law", "cell", "hardware", "reason"),
    [
        ("ENV-4", DP2, ONE_SHARED, None),
        ("ENV-4", Cell(mesh="dp4"), ONE_SHARED, "needs 4 GPUs (nccl) or 2 shared GPUs (nccl-shared); 1 found"),
        ("ENV-4", DP2, ONE_GPU, "needs 2 GPUs (nccl); 1 found"),
        ("ENV-4", DP2, SIM, "needs 2 GPUs (nccl); none found"),
        ("OFF-2", PINNED, GPUS, None),
        ("OFF-2", PINNED, SIM, None),
        ("OFF-2", PINNED, CPU, f"needs an accelerator for which host memory is pinned; {ON_CPU}"),
        ("PAR-1", TF32, GPUS, None),
        ("PAR-1", TF32, CPU, f"needs a CUDA device, which rounds products to TF32; {ON_CPU}"),
        ("PAR-1", TF32, SIM, f"needs a CUDA device, which rounds products to TF32; {ON_SIM}"),
        ("AXIS-1", EXPANDABLE, GPUS, None),
        ("AXIS-1", EXPANDABLE, CPU, f"needs CUDA expandable segments; {ON_CPU}"),
        ("AXIS-1", DP2.but(expandable_segments="0"), SIM, f"needs CUDA expandable segments; {ON_SIM}"),
        ("PAR-1", DP2, SIM, None),
        ("PAR-1", DP2, Hardware(simulated=SimulatedDevice(schedule="lazy", lacks="install g++")), "install g++"),
        ("PAR-1", DP2, OTHER_KERNELS, None),
        ("MEM-3", DP2, OTHER_KERNELS, OTHER_MEMORY),
    ],
)
def test_unsupported_cases_say_why(law: str, cell: Cell, hardware: Hardware, reason: str | None) -> None:
    assert missing(law, cell, hardware) == reason


def test_laws_on_the_memory_of_torchs_kernels_are_marked() -> None:
    assert {name for name, asserted in asserted_laws().items() if asserted.law.memory} == {"MEM-2", "MEM-3"}


def test_the_simulated_device_serves_laws_of_ranks_and_streams_and_nothing_for_certify() -> None:
    served = [SIM.substrate(2, among) for among in (REAL, STREAMS, CUDA, SIMULATED, ("gloo",))]
    assert served == ["sim", "sim", None, "simulated", "gloo"]
    assert SIM.environment("sim") == {LIBRARY_VARIABLE: "/cache/simdev.so", schedules.VARIABLE: "lazy"}
    assert SIM.environment("gloo") == {}
    assert (device_type("sim"), kernel_type("sim")) == ("sim", "cpu")
    assert "the profile needs 8 GPUs; none found" in (missing("PAR-1", DP2, SIM, profile="certify") or "")
    facts = environment_facts(SIM)
    assert facts["device"] == {"type": "sim", "name": "simulated accelerator, schedule lazy", "count": 1}
    assert "the simulated accelerator is a model" in facts["cannot_show"]


def test_inductor_needs_a_c_compiler_on_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = DP2.but(compile=True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = "needs a C compiler for the kernels that inductor generates: install gcc; this run is on CUDA devices"
    assert missing("PAR-1", compiled, GPUS) == reason
    assert missing("PAR-1", DP2, GPUS) is None
    assert missing("PAR-1", compiled, CPU) is None, "aot_eager needs none"
    (tmp_path / "gcc").touch(mode=0o755)
    assert missing("PAR-1", compiled, GPUS) is None


def test_where_nothing_may_be_unsupported_the_session_is_incomplete() -> None:
    counts = {Verdict.PASS: 3, Verdict.UNSUPPORTED: 1}
    assert (exit_status(counts), exit_status(counts, allows=["waived"])) == (0, 5)


def test_certifying_without_devices_is_no_result(tmp_path: Path) -> None:
    directory = tmp_path / "report"
    cells = "mesh = dp4 and model = tiny and (optimizer = sgd or clip = 0)"
    session = finish(suite(directory, "conformance/", "--cells", cells, profile="certify"), directory)
    report = session.report
    assert (session.status, report.exit_code) == (5, 5), session.output
    assert report.planned == report.verdicts["unsupported"]
    assert report.planned > 0
    assert {case.reason for case in report.cases} == {"the profile needs 8 GPUs; none found"}


def test_rows_of_what_ran_on_devices_name_laws_and_their_substrates() -> None:
    """A law without a row is unverified, which the page says."""
    status = (PROJECT / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| ([A-Z]+-\d+) \| ([a-z-]+) \|", status, re.MULTILINE)
    laws = [law for test in law_tests().values() if (law := law_of(test))]
    assert set(rows) <= {(law.id, substrate) for law in laws for substrate in law.substrates if substrate in CUDA}
    assert len(rows) == len(set(rows))
    assert "A law without a row" in " ".join(status.split())


def test_every_defect_of_devices_has_its_state_in_the_docs() -> None:
    status = (PROJECT / "docs" / "gpu.md").read_text()
    listed = {line.split("`")[1] for line in status.splitlines() if line.startswith("| defect `")}
    assert listed == {defect.id for defect in defects() if set(defect.substrates) <= set(STREAMS)}
