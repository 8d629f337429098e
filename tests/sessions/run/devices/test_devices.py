"""CUDA devices, and the hardware that worlds run on, tested without a device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from msgspec.structs import replace

from conformance.defects.catalogue import defects
from conformance.judge.law import Law, law_of
from conformance.judge.registry import law_tests
from conformance.judge.support import Machine, unsupported
from conformance.judge.verdicts import Verdict, exit_status
from conformance.plan.cells import Cell
from conformance.plan.scopes import scope
from conformance.plan.substrates import CUDA, REAL, SIMULATED, STREAMS, Substrate
from conformance.project import PROJECT
from conformance.run.devices import nvml as module
from conformance.run.devices.hardware import (
    DETERMINISM,
    NO_DEVICES,
    Hardware,
    device_type,
    devices_for,
    find_hardware,
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
from tests.support.fake_devices import FakeDevices, some_devices
from tests.support.sessions import finish, suite

EVERYWHERE = scope("PAR-1", where="world >= 1")
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


class FakeNvml:
    """Substitute for pynvml with two devices."""

    class Memory:
        total, used = 80, 7

    class Process:
        pid, usedGpuMemory = 42, None  # noqa: N815 - NVML's name

    nvmlInit = staticmethod(lambda: None)  # noqa: N815
    nvmlDeviceGetCount = staticmethod(lambda: 2)  # noqa: N815
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: f"GPU-{index}")  # noqa: N815
    nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: uuid)  # noqa: N815
    nvmlDeviceGetUUID = staticmethod(lambda handle: handle)  # noqa: N815
    nvmlDeviceGetName = staticmethod(lambda handle: f"name of {handle}")  # noqa: N815
    nvmlDeviceGetMemoryInfo = staticmethod(lambda _: FakeNvml.Memory)  # noqa: N815
    nvmlDeviceGetComputeRunningProcesses = staticmethod(lambda _: [FakeNvml.Process])  # noqa: N815
    NVML_COMPUTEMODE_DEFAULT = 0
    nvmlDeviceGetComputeMode = staticmethod(lambda handle: 3 if handle == "GPU-1" else 0)  # noqa: N815
    nvmlSystemGetDriverVersion = staticmethod(lambda: "999.1")  # noqa: N815
    NVMLError = pynvml.NVMLError


def test_devices_as_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pynvml", FakeNvml)
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
        (1, 4, 2, "nccl-shared"),
        (1, 4, 4, "nccl-shared"),
        (1, 4, 8, "gloo"),
        (1, 1, 2, "gloo"),
        (2, 2, 4, "nccl-shared"),
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
    ("world_size", "among", "count"), [(1, 1, 1), (4, 1, 1), (2, 8, 2), (8, 8, 8), (4, 3, 2), (8, 3, 3), (5, 2, 2)]
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


def machine(hardware: Hardware) -> Machine:
    return Machine(hardware=hardware, torch_version="2.13.0", max_world_size=8)


def test_unsupported_says_what_is_missing() -> None:
    law = Law("MEM-10", "It MUST.", "", "2.6", CUDA, EVERYWHERE)
    shared = Hardware(devices=some_devices(1), ranks_per_device=2)
    assert unsupported(law, Cell(mesh="dp2"), machine(shared)) is None
    missing = unsupported(law, Cell(mesh="dp4"), machine(shared))
    assert missing == "needs 4 GPUs (nccl) or 2 shared GPUs (nccl-shared); 1 found"
    never_shared = Hardware(devices=some_devices(1))
    assert unsupported(law, Cell(mesh="dp2"), machine(never_shared)) == "needs 2 GPUs (nccl); 1 found"
    missing = unsupported(law, Cell(mesh="dp2"), machine(Hardware(ranks_per_device=4)))
    assert missing == "needs 2 GPUs (nccl) or 1 shared GPU (nccl-shared); none found"


def test_pinned_memory_needs_an_accelerator() -> None:
    law = Law("OFF-1", "It MUST.", "", "2.6", REAL, EVERYWHERE)
    cell = Cell(mesh="dp2", offload="cpu", pin_memory=True)
    assert unsupported(law, cell, machine(Hardware(devices=THREE))) is None
    missing = unsupported(law, cell, machine(NO_DEVICES))
    assert missing == "needs an accelerator for which host memory is pinned; this run is on the CPU"


def test_tf32_needs_a_cuda_device() -> None:
    law = Law("PAR-1", "It MUST.", "", "2.6", REAL, EVERYWHERE)
    assert unsupported(law, Cell(tf32=True), machine(Hardware(devices=THREE))) is None
    missing = unsupported(law, Cell(tf32=True), machine(NO_DEVICES))
    assert missing == "needs a CUDA device, which rounds products to TF32; this run is on the CPU"


def test_inductor_needs_a_c_compiler_on_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    law = Law("PAR-1", "It MUST.", "", "2.6", REAL, EVERYWHERE)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = unsupported(law, Cell(compile=True), machine(Hardware(devices=THREE)))
    assert (
        missing
        == "needs a C compiler for the kernels that inductor generates: install gcc; this run is on CUDA devices"
    )
    assert unsupported(law, Cell(), machine(Hardware(devices=THREE))) is None
    assert unsupported(law, Cell(compile=True), machine(NO_DEVICES)) is None, "aot_eager needs none"
    (tmp_path / "gcc").touch(mode=0o755)
    assert unsupported(law, Cell(compile=True), machine(Hardware(devices=THREE))) is None


def test_where_nothing_may_be_unsupported_the_session_is_incomplete() -> None:
    counts = {Verdict.PASS: 3, Verdict.UNSUPPORTED: 1}
    assert exit_status(counts) == 0
    assert exit_status(counts, allows=["waived"]) == 5


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
