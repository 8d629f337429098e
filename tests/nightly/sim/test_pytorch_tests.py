"""`conformance sim pytorch-tests` on a small checkout whose tests of FSDP2 are written for CUDA and NCCL."""

from pathlib import Path

import pytest

from conformance.sim_runs.pytorch_tests.record import Record, read_records
from tests.support.programs import run_python

FILE = "distributed/_composable/fsdp/test_small.py"
TESTS = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_cuda import TEST_CUDA
from torch.testing._internal.common_distributed import requires_nccl, skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread


class TestSmall(FSDPTest):
    @property
    def world_size(self):
        return torch.cuda.device_count()

    @requires_nccl()
    @skip_if_lt_x_gpu(2)
    def test_step(self):
        assert dist.get_backend() == "nccl"
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 4, device="cuda")
        fully_shard(model)
        model(torch.ones(2, 4).cuda()).sum().backward()
        total = model.weight.grad.full_tensor().sum()
        self.assertTrue(total.is_cuda)
        self.assertEqual(total.item(), 32.0)

    @skip_if_lt_x_gpu(2)
    def test_wrong(self):
        self.assertEqual(torch.zeros(1, device="cuda").item(), 1.0)

    @skip_if_lt_x_gpu(4)
    def test_of_four(self):
        pass


class TestThreads(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 2

    def test_all_reduce(self):
        assert TEST_CUDA
        ones = torch.ones(3, device="cuda")
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), 2.0, device="cuda"))
"""
RACE = """
    @skip_if_lt_x_gpu(2)
    def test_missing_wait(self):
        side = torch.cuda.Stream()
        ones = torch.ones(1000, device="cuda")
        with torch.cuda.stream(side):
            twice = ones * 2  # unordered
        torch.cuda.current_stream().wait_stream(side)
        self.assertEqual(twice.sum().item(), 2000.0)
"""


CHANCE = """
import tempfile
import uuid

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread


class TestNames(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2)
    def test_names(self):
        names = [tempfile.mkdtemp(), uuid.uuid4(), [*{"a", "b", "c", "d"}]]
        dist.broadcast_object_list(names)


class TestThreads(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 2

    def test_draws(self):
        for _ in range(20):
            drawn = torch.randn(1000, device="cuda").sum().item()
            dist.all_reduce(torch.full((1,), drawn, device="cuda"))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    file = tmp_path / "pytorch" / "test" / FILE
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)
    (tmp_path / "pytorch" / "version.txt").write_text("2.13.0a0\n")
    return tmp_path / "pytorch"


def run(checkout: Path, *options: str) -> tuple[int, str, Record]:
    report = checkout.parent / "report.json"
    command = ["-m", "conformance", "sim", "pytorch-tests", str(checkout), "--world", "2", *options]
    done = run_python(*command, "--report", str(report), limit_s=1000)
    assert report.exists(), done.stderr
    (record,) = read_records(report)
    return done.returncode, done.stdout, record


def outcomes(record: Record) -> dict[str, str]:
    (run_of_file,) = record.runs
    return {outcome.test.rpartition("::")[2]: outcome.outcome for outcome in run_of_file.outcomes}


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_tests_for_cuda_run_on_the_device(checkout: Path, schedule: str) -> None:
    status, text, record = run(checkout, "--schedule", schedule)
    assert outcomes(record) == {
        "test_step": "passed",
        "test_wrong": "failed",
        "test_of_four": "skipped",
        "test_all_reduce": "passed",
    }
    assert status == 1
    assert f"unexpected failure: {FILE}::TestSmall::test_wrong (sim:{schedule}, 2 ranks)" in text
    assert "AssertionError: Scalars are not close!" in text
    assert "unexpected skip" not in text


def test_without_the_device_they_are_skipped(checkout: Path) -> None:
    status, _, record = run(checkout, "--device", "cpu")
    assert status == 0
    assert set(outcomes(record).values()) == {"failed", "skipped"}


@pytest.mark.parametrize("has_race", [False, True])
def test_races_are_found_whatever_the_outcome_of_a_test(checkout: Path, has_race: bool) -> None:
    file = checkout / "test" / FILE
    source = TESTS.replace("\n\nclass TestThreads", RACE + "\n\nclass TestThreads") if has_race else TESTS
    file.write_text(source)
    status, text, record = run(checkout, "--schedules", "2")
    (search,) = record.races
    assert search.operators > 0
    assert search.schedules == ("eager", "lazy")
    assert status == int(has_race)
    if has_race:
        line = source.splitlines().index("            twice = ones * 2  # unordered") + 1
        assert any(f"{FILE}:{line}" in pair for pair in search.unordered)
        assert all(pair in text for pair in search.unordered)
    else:
        assert search.unordered == ()


def test_two_eager_runs_agree_where_ranks_are_threads_or_tell_each_other_names(checkout: Path) -> None:
    (checkout / "test" / FILE).write_text(CHANCE)
    status, _, record = run(checkout, "--schedules", "2")
    (search,) = record.races
    assert search.operators > 0
    assert search.eager_differences == ()
    assert (search.bits, status) == ("equal", 0)


@pytest.mark.parametrize(
    ("source", "options", "state"),
    [
        ("from torch import no_such_name", (), "failed at import: ImportError: cannot import name 'no_such_name'"),
        ("def test_slow():\n    __import__('time').sleep(100)\n", ("--limit", "5"), "killed at the time limit: not"),
        ("import os\nos._exit(3)\n", (), "failed before its first test: exit status 3"),
        ("def test_cpu():\n    pass\n", (), "no test used the device"),
    ],
)
def test_a_file_that_no_schedule_was_tried_on_says_why(
    checkout: Path, source: str, options: tuple[str, ...], state: str
) -> None:
    (checkout / "test" / FILE).write_text(source)
    status, text, record = run(checkout, "--schedules", "2", *options)
    (search,) = record.races
    assert search.operators == 0
    assert search.bits.startswith(state)
    assert search.bits in text
    assert status == int(search.not_run is not None)
