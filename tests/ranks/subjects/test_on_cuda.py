"""A trainer on CUDA devices, tried without one: tasks of ranks, and one process on a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from conformance.judge.judge import judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.plan.matrix import TRAINER_CELLS, Case
from conformance.run.devices.hardware import DETERMINISM, Hardware
from conformance.run.pool import Pools, Task
from conformance.run.store import RecordStore
from conformance.sim import device as simulated
from conformance.subjects import one_process, reference
from conformance.subjects.cells import Workload
from conformance.subjects.decorated import load_subject
from conformance.subjects.probes import require_sum
from conformance.subjects.running import SubjectRuns
from tests.support.fake_devices import some_devices
from tests.support.simulated_processes import exit_code

RIGHT = "tests.support.subjects_on_device:right"
BY_ID = {cell.id: cell for cell in TRAINER_CELLS}
DP2 = BY_ID["dp2-fp32-default-full"]
OLD_NCCL = (2, 29, 7)


@dataclass
class OnProcessors:
    """Pools that note the tasks for devices, and let processors do them."""

    pools: Pools
    asked: list[tuple[Task, Mapping[str, str]]] = field(default_factory=list)
    waited_s: float = 0.0
    trained_s: float = 0.0
    max_world_size: int = 8

    def prepare(self, template: object = None) -> None:
        pass

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        self.asked.append((task, env or {}))
        plain = msgspec.structs.replace(task, accelerated=False)
        return self.pools.run(plain, world_size=world_size, deadline_s=deadline_s)

    def close(self) -> None:
        pass


def store_of(pools: OnProcessors, directory: Path, devices: int, *, ranks_per_device: int) -> RecordStore:
    hardware = Hardware(devices=some_devices(devices), ranks_per_device=ranks_per_device, nccl=OLD_NCCL)
    return RecordStore(directory, "test", str(torch.__version__), None, 60.0, pools, hardware=hardware, subject=RIGHT)


@pytest.mark.parametrize(("devices", "substrate"), [(1, "nccl-shared"), (2, "nccl")])
def test_ranks_and_their_reference_ask_for_devices(pools: Pools, tmp_path: Path, devices: int, substrate: str) -> None:
    noting = OnProcessors(pools)
    store = store_of(noting, tmp_path, devices, ranks_per_device=4)
    evidence = SubjectRuns(store).evidence(DP2)
    assert evidence.cell.device == "cuda"
    ranks, environment = noting.asked[-1]
    assert {task.function.rpartition(":")[2] for task, _ in noting.asked} == {
        "describe",
        "train_reference",
        "train_subject",
    }
    assert all(task.accelerated for task, _ in noting.asked)
    assert all(environment.items() >= DETERMINISM.items() for _, environment in noting.asked)
    assert environment["LOCAL_RANK"] == "0"  # CUDA shows a rank its own device alone
    assert ("NCCL_HOSTID" in environment) == (substrate == "nccl-shared")
    assert ranks.payload["cell"]["device"] == "cuda"


def test_laws_of_memory_are_judged_there_and_laws_of_streams_are_not(pools: Pools, tmp_path: Path) -> None:
    store = store_of(OnProcessors(pools), tmp_path, 1, ranks_per_device=4)
    machine = Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=8)
    laws = {name: asserted_laws()[name] for name in ("memory-held", "gradients", "unordered-accesses")}
    judged = {
        name: judge(Case(name, DP2, "right"), each.law, each.test, store, machine=machine)
        for name, each in laws.items()
    }
    assert {name: (each.verdict, each.substrate) for name, each in judged.items()} == {
        "memory-held": (Verdict.PASS, "nccl-shared"),
        "gradients": (Verdict.PASS, "nccl-shared"),
        "unordered-accesses": (Verdict.UNSUPPORTED, "sim"),
    }


def test_worlds_that_are_wider_than_the_devices_run_on_processors(pools: Pools, tmp_path: Path) -> None:
    noting = OnProcessors(pools)
    store = store_of(noting, tmp_path, 2, ranks_per_device=1)
    assert SubjectRuns(store).evidence(BY_ID["hsdp2x2-fp32-default-full"]).cell.device == "cpu"
    assert not any(task.accelerated for task, _ in noting.asked[1:])


def test_one_process_computes_on_a_device_what_it_computes_on_the_cpu() -> None:
    assert exit_code(compute_on_both) == 0


def compute_on_both() -> None:
    """Compute a reference on the CPU, and on a device whose tensors no operator mixes with the CPU's."""
    here = load_subject(RIGHT)
    there: Any = one_process.OnDevice(here, simulated.device())  # `sim` takes the place of `cuda`
    workload = Workload(tied=False, data_ranks=2, accumulation=(2, 1), uneven=False)
    for dtype in (torch.float64, torch.float32):
        mine, theirs = (
            reference.train(subject, workload, dtype=dtype, order=1, max_norm=None) for subject in (here, there)
        )
        assert {tensor.device.type for tensor in theirs.parameters[-1].values()} == {simulated.NAME}
        for name, tensor in mine.parameters[-1].items():
            torch.testing.assert_close(theirs.parameters[-1][name].cpu(), tensor)
        torch.testing.assert_close(theirs.losses, mine.losses)
    reference.require_proportional(there, workload, dtype=torch.float64)
    assert require_sum(there, workload, dtype=torch.float64) == []
    way = reference.InBf16("cast", reference.kept_in_fp32(there, workload))
    run = reference.train(there, workload, dtype=torch.float32, order=0, max_norm=None, in_bf16=way)
    assert way.matmul_dtypes == ["bfloat16"]
    assert {gradient.device.type for gradient in run.gradients[0].values()} == {simulated.NAME}
