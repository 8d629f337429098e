"""Any program on the simulated device: the door, several devices, random numbers, children, `conformance sim run`."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conformance.sim import device, generators
from conformance.sim import torch_sim as SIM  # noqa: N812 - as programs name it, torch.sim
from conformance.sim.schedules import Schedule
from conformance.sim.settings import DEVICES_VARIABLE, SCHEDULE_VARIABLE
from tests.support.programs import output_of
from tests.support.simulated_processes import enabled_exit_code


def devices_have_memory_and_streams_of_their_own() -> None:
    one, other = torch.ones(3, device="sim:1"), torch.ones(3, device="sim")
    assert (torch.accelerator.device_count(), other.device) == (2, torch.device("sim", 0))
    with pytest.raises(RuntimeError, match=r"same device.*sim:1 and sim:0"):
        one + other
    with pytest.raises(RuntimeError, match="invalid device ordinal: sim:2 of 2"):
        torch.ones(1, device="sim:2")
    assert SIM.memory_allocated(0) == SIM.memory_allocated(1) == 512
    with SIM.device(1):
        assert (one * 2).device == torch.device("sim", SIM.current_device())
        stream = SIM.Stream()
    assert SIM.current_device() == 0
    with SIM.stream(stream):
        assert SIM.current_stream() == stream
        assert SIM.current_stream(0) == SIM.default_stream(0)
    (segment,) = SIM.memory_snapshot(1)
    assert segment["total_size"] == SIM.memory_reserved(1)
    assert next(block["state"] for block in segment["blocks"]) == "active_allocated"


def devices_are_initialized_by_their_first_use() -> None:
    """DeviceMesh chooses the device of LOCAL_RANK where the program has used none."""
    module = torch.get_device_module("sim")
    assert not module.is_initialized()
    torch.ones(1, device="sim:1")
    assert module.is_initialized()


def pinned_memory_is_returned() -> None:
    pinned = torch.ones(100, pin_memory=True)
    device = pinned.to("sim", non_blocking=True)
    del pinned
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", lambda: None)  # not in all versions of torch
    empty_host_cache()
    assert device.sum().item() == 100
    empty_host_cache()
    assert torch.zeros(100, pin_memory=True).is_pinned()


def copies_between_devices_wait_for_both() -> None:
    """The copy follows earlier work on both devices, and precedes later work."""
    source, target = torch.zeros(4, device="sim:0"), torch.full((4,), 7.0, device="sim:1")
    for _ in range(3):
        source.add_(1)
        read = target * 1
        target.copy_(source)
        source.zero_()
        assert target.tolist() == [1.0] * 4
        assert read.tolist() in ([7.0] * 4, [1.0] * 4)


def generators_are_seeded_and_restored() -> None:
    torch.manual_seed(3)
    state = generators.get_rng_state()
    first, second = torch.randn(20, device="sim"), torch.randn(20, device="sim")
    host = torch.randn(20)
    assert torch.equal(first.cpu(), host), "the first numbers are the CPU's, whose state is another"
    assert not torch.equal(first, second)
    generators.set_rng_state(state)
    assert torch.equal(torch.randn(20, device="sim"), first)
    generator = torch.Generator(device="sim:1").manual_seed(3)
    assert torch.equal(torch.randn(20, generator=generator, device="sim:1").cpu(), host)
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(2, generator=torch.Generator().manual_seed(1), device="sim")
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.rand(3, device="sim")
    assert torch.equal(torch.randn(20, device="sim"), second)


def no_schedule_changes_random_numbers() -> None:
    """Operators are seeded when the host issues them, and run in the order of their stream, without a wait."""
    shares = torch.full((8, 4), 0.5, device="sim")
    samples = []
    for schedule in ("eager", "lazy", "random:5"):
        device.follow(Schedule.parse(schedule))
        torch.manual_seed(3)
        waits = device.counts()["waits"]
        drawn = [
            torch.rand(8, 4, device="sim"),
            torch.randperm(8, device="sim"),
            torch.bernoulli(shares),
            torch.normal(shares, 1.0),
            torch.multinomial(shares, 2),
            torch.nn.functional.dropout(shares),
        ]
        assert device.counts()["waits"] == waits
        samples.append([tensor.cpu() for tensor in drawn])
    for eager, *others in zip(*samples, strict=True):
        assert all(torch.equal(eager, other) for other in others)


def events_are_timed() -> None:
    start, end = SIM.Event(enable_timing=True), SIM.Event(enable_timing=True)
    start.record()
    torch.ones(4, device="sim").exp_()
    end.record()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    SIM.synchronize()
    assert start.elapsed_time(end) >= 0
    assert isinstance(start, SIM.Event)
    assert isinstance(SIM.current_stream(), SIM.Stream)


def forks_before_the_first_tensor_have_the_device() -> None:
    assert exit_code_of_fork(lambda: torch.ones(2, device="sim").sum().item()) == 0
    torch.ones(1, device="sim")
    with pytest.raises(RuntimeError, match="forked subprocess"):
        in_fork(lambda: torch.ones(2, device="sim"))


def exit_code_of_fork(check: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        signal.alarm(60)
        check()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def in_fork(check: Callable[[], object]) -> None:
    """Call `check` in a fork; raises the RuntimeError of the fork."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            check()
        except RuntimeError as error:
            os.write(write, str(error).encode()[:1000])
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    if message := os.read(read, 1000):
        raise RuntimeError(message.decode())


@pytest.mark.parametrize(
    "check",
    [
        devices_have_memory_and_streams_of_their_own,
        devices_are_initialized_by_their_first_use,
        pinned_memory_is_returned,
        copies_between_devices_wait_for_both,
        generators_are_seeded_and_restored,
        no_schedule_changes_random_numbers,
        events_are_timed,
        forks_before_the_first_tensor_have_the_device,
    ],
    ids=lambda check: check.__name__,
)
def test_programs_have(check: Callable[[], None]) -> None:
    assert enabled_exit_code(check, devices=2) == 0


DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
for (x,) in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True, num_workers=1):
    print(x.is_pinned(), x.to("sim", non_blocking=True).sum().item())
"""


@pytest.mark.usefixtures("compiled_device")
def test_the_environment_gives_the_device_to_a_process_that_imports_torch() -> None:
    assert output_of("-c", DATA, variables={SCHEDULE_VARIABLE: "lazy"}) == "True 6.0\nTrue 22.0\n"
    assert "unknown" not in output_of("-c", "import conformance.simulated_device, torch; torch.ones(1, device='sim')")
    wrong = output_of("-c", "import torch", status=1, variables={SCHEDULE_VARIABLE: "late"})
    assert "write eager, lazy" in wrong


RANK = """
import os, sys
import torch
import torch.distributed as dist
accelerator = torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,sim:simccl")
x = torch.full((2,), dist.get_rank() + 1.0, device=accelerator)
dist.all_reduce(x)
if dist.get_rank() == 0:
    x.tolist()  # rank 1 does not wait for its device, but for rank 0 on the host
host = torch.ones(1)
dist.all_reduce(host)
if dist.get_rank() == 1:
    print(x.device, x.tolist(), sys.argv[1:])
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("compiled_device")
def test_a_script_runs_in_several_ranks_each_on_its_device(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK)
    out = output_of("-m", "conformance", "sim", "run", "--world", "2", str(script), "--schedule", "mine")
    assert "sim:1 [3.0, 3.0] ['--schedule', 'mine']" in out


TESTS = """
import torch

def test_sum():
    assert torch.ones(2, device="sim:1").sum().item() == 2
"""


@pytest.mark.usefixtures("compiled_device")
def test_tests_of_any_project_run_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "test_sum.py").write_text(TESTS)
    pytest_command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert "1 passed" in output_of(*pytest_command, "--sim", "--sim-devices", "2")
    assert "1 passed" in output_of("-m", "conformance", "sim", "run", "--devices", "2", *pytest_command)
    assert "write a number from 1 to 8" in output_of(*pytest_command, "--sim", "--sim-devices", "9", status=4)
    assert "1 failed" in output_of(*pytest_command, status=1, variables={DEVICES_VARIABLE: ""})


def test_programs_that_are_missing_are_usage_errors() -> None:
    assert "is no file" in output_of("-m", "conformance", "sim", "run", "nothing.py", status=4)
    assert "no program" in output_of("-m", "conformance", "sim", "run", status=4)
