"""Records of runs: full tensors from shards, the store, and failures with the rank that failed first."""

import errno
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.facts import RankFacts
from conformance.outcomes import ConformanceFailure, Failure, Unsupported
from conformance.plan.cells import RECORD_STREAMS, Cell
from conformance.project import PACKAGE, PROJECT
from conformance.run.case_runs import CaseRuns, to_failure
from conformance.run.devices.hardware import Hardware
from conformance.run.experiment import SAVING, TRAINING
from conformance.run.failures import RunFailed, find_cause, waits_for_peers
from conformance.run.ranks.messages import RankReport, Task
from conformance.run.record import Header, Record, RecordFile, read_record, write_record
from conformance.run.shards import tensor_file
from conformance.run.store import Clock, RecordStore, Unwritable
from tests.support.fake_devices import some_devices
from tests.support.no_pools import NoPools


def record_of_two_ranks(
    directory: Path, shards: list[dict[str, Tensor]], facts_of_ranks: Sequence[dict[str, Any]] = ({}, {})
) -> Record:
    parameters = {"w": {"group": "", "shape": [3, 2], "shard_dims": {"dp_shard": 0}}}
    kinds = {field.name: get_origin(field.type) for field in msgspec.structs.fields(RankFacts)}
    facts: dict[str, Any] = {name: kind() for name, kind in kinds.items() if kind in (list, dict)}
    facts |= dict.fromkeys(("checkpoint", "checkpoint_format", "communication", "expandable_segments"))
    facts |= {
        "blocks": {"graphs": 0, "compiled": 0, "eager": 0, "breaks": 0},
        "calibration_s": 0.001,
        "parameters": parameters,
    }
    for rank, tensors in enumerate(shards):
        save_file(tensors, directory / tensor_file(rank))
    header = Header(cell=Cell(), session="s", torch="2", substrate="gloo", defect=None)
    ranks = msgspec.Raw(msgspec.json.encode([{"rank": rank, **facts, **facts_of_ranks[rank]} for rank in (0, 1)]))
    return Record(directory, RecordFile(header=header, ranks=ranks))


def test_select_assembles_full_tensors(tmp_path: Path) -> None:
    layouts = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5]])]
    shards = [
        {"layout/w": layout, "final/parameter/w": layout + 0.5, "final/buffer/b": torch.ones(1)} for layout in layouts
    ]
    record = record_of_two_ranks(tmp_path, shards)
    assert record.select("final/parameter/")["w"].tolist() == [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]
    assert record.select("final/buffer/")["b"].tolist() == [1.0]
    with pytest.raises(ConformanceFailure, match=r"no rank of .* has a tensor step0/"):
        record.select("step0/")


@pytest.mark.parametrize(
    ("shape", "layouts", "is_partitioned"),
    [
        ([3], [[0, 1], [2]], True),
        ([3], [[0, 1, 2], [0, 1, 2]], True),
        ([3], [[0, 1], [1, 2]], False),
        ([3], [[0, 1], []], False),
        ([3], [], False),
        ([0], [[], []], True),
        ([0], [], False),
    ],
)
def test_ranks_partition_a_parameter(
    tmp_path: Path, shape: list[int], layouts: list[list[int]], is_partitioned: bool
) -> None:
    parameters = {"parameters": {"w": {"group": "", "shape": shape, "shard_dims": {"dp_shard": 0}}}}
    shards = [{"layout/w": torch.tensor(layout, dtype=torch.int64)} for layout in layouts] or [{}, {}]
    record = record_of_two_ranks(tmp_path, shards, (parameters, parameters))
    assert record.is_partitioned("w") == is_partitioned


def test_select_fills_holes_with_nan_and_refuses_shards_of_another_shape(tmp_path: Path) -> None:
    shard = {"layout/w": torch.tensor([[0, 1], [2, 3]]), "final/parameter/w": torch.ones(2, 2)}
    record = record_of_two_ranks(tmp_path, [shard, shard])
    assert record.select("final/parameter/")["w"].isnan().tolist() == [[False] * 2, [False] * 2, [True] * 2]
    wrong = {**shard, "final/parameter/w": torch.ones(3, 2)}
    with pytest.raises(
        ConformanceFailure, match=r"rank 1 holds a tensor of shape \(3, 2\), its shard has shape \(2, 2\)"
    ):
        record_of_two_ranks(tmp_path, [shard, wrong]).select("final/parameter/")
    del wrong["final/parameter/w"]
    with pytest.raises(ConformanceFailure, match="rank 1 holds nothing"):
        record_of_two_ranks(tmp_path, [shard, wrong]).select("final/parameter/")


@pytest.mark.parametrize(
    ("layouts", "is_refused"), [(("all", "all"), True), (("first half", "second half"), False), ((), True)]
)
def test_select_refuses_copies_that_differ(tmp_path: Path, layouts: tuple[str, ...], is_refused: bool) -> None:
    """Only one rank's copy is assembled; elements of different shards are no copies of each other."""
    key = "final/parameter/w"
    facts = [
        {"fingerprints": {key: f"bits of rank {rank}"}, "layouts": {"w": layouts[rank]} if layouts else {}}
        for rank in (0, 1)
    ]
    shard = {"layout/w": torch.tensor([[0, 1]]), key: torch.ones(1, 2), "initial/parameter/w": torch.ones(1, 2)}
    record = record_of_two_ranks(tmp_path, [shard, shard], facts)
    assert "w" in record.select("initial/parameter/")
    assert record.unequal_copies == ([(key, 1)] if is_refused else [])
    if is_refused:
        with pytest.raises(ConformanceFailure, match="w: rank 1 holds other bits"):
            record.select("final/parameter/")


@pytest.mark.parametrize(
    "failure", [None, Failure(kind="timeout", first_rank=1, reason="rank 1 hung", details="stacks")]
)
def test_record_round_trip(tmp_path: Path, failure: Failure | None) -> None:
    cell = Cell(mesh="dp2-tp2", clip=0.0)
    header = Header(cell=cell, session="s", torch="2.13.0", substrate="gloo", defect=None)
    content = RecordFile(header=header, train_s=0.5, ranks=msgspec.Raw(b'[{"rank":0}]'), failure=failure)
    assert read_record(tmp_path) is None
    write_record(tmp_path, content)
    read = read_record(tmp_path)
    assert read is not None
    assert (read.header, read.train_s, read.failure) == (header, 0.5, failure)
    assert msgspec.json.decode(read.ranks) == [{"rank": 0}]
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]
    assert Record(tmp_path, read).cell == cell


# Store


HEADER = Header(cell=Cell(mesh="dp2"), session="s", torch="2.13.0", substrate="gloo", defect=None)


def store(directory: Path) -> RecordStore:
    return RecordStore(directory=directory, session="s", torch_version="2.13.0", defect=None, deadline_s=60)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), TimeoutError("no lease")])
def test_an_error_of_a_run_is_not_one_of_the_records(error: OSError, tmp_path: Path) -> None:
    def execute(_directory: Path) -> RecordFile:
        raise error

    with pytest.raises(type(error)) as raised:
        store(tmp_path).record(HEADER, execute, Clock())
    assert raised.value is error


def test_a_record_that_cannot_be_written_is_told_with_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(Unwritable, match=rf"no record can be written to {file}: Not a directory"):
        store(file).record(HEADER, lambda _: RecordFile(header=HEADER), Clock())

    def remove(directory: Path) -> RecordFile:
        for each in directory.iterdir():
            each.unlink()
        directory.rmdir()
        return RecordFile(header=HEADER)

    with pytest.raises(Unwritable, match="No such file or directory"):
        store(tmp_path / "records").record(HEADER, remove, Clock())


@pytest.mark.parametrize(("slower", "limit_s"), [(0.5, 60.0), (1.0, 60.0), (2.5, 150.0)])
def test_a_slower_machine_has_more_time(tmp_path: Path, slower: float, limit_s: float) -> None:
    session_store = store(tmp_path)
    session_store.lengthen(slower)
    assert session_store.deadline_s == limit_s


def test_a_store_with_less_time_shares_the_read_records(tmp_path: Path) -> None:
    session_store = store(tmp_path)
    record = session_store.record(HEADER, lambda _: RecordFile(header=HEADER, ranks=msgspec.Raw(b"[]")), Clock())

    def execute(_directory: Path) -> RecordFile:
        raise AssertionError("recorded already")

    for limit_s in (3.0, 600.0):
        shorter = session_store.within(limit_s)
        assert shorter.record(HEADER, execute, Clock()) is record
        assert (shorter.deadline_s, session_store.deadline_s) == (min(limit_s, 60), 60)


# Runs of cases


def raised_at(file: str) -> RunFailed:
    report = RankReport(rank=1, state="raised", stamp_s=1.0, exception_type="E", message="m", innermost_file=file)
    ranks = (RankReport(rank=0, state="finished"), report)
    return RunFailed(kind="raised", first_rank=1, reason="rank 1 raised E: m", ranks=ranks)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (str(PACKAGE / "instruments" / "poison.py"), "suite-error"),
        (str(PACKAGE / "defects" / "gradient_faults.py"), "suite-error"),
        (str(PACKAGE.with_name("conformance_of_others") / "x.py"), "raised"),
        (str(PROJECT / "reference_trainer" / "train.py"), "raised"),
        (torch.__file__, "raised"),
        ("<string>", "raised"),
        ("", "raised"),
    ],
)
def test_to_failure_blames_the_owner_of_the_innermost_file(file: str, kind: str) -> None:
    failure = to_failure(raised_at(file))
    assert (failure.kind, failure.first_rank, failure.reason) == (kind, 1, "rank 1 raised E: m")
    assert "--- rank 0 finished" in failure.details


def test_to_failure_of_an_operator_under_the_dispatch_tap_blames_torch() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught, DispatchTap([]):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    innermost = str(caught.traceback[-1].path)
    assert to_failure(raised_at(innermost)).kind == "raised"


def test_a_second_cell_for_which_there_are_too_few_devices_is_unsupported(tmp_path: Path) -> None:
    """Laws compare a cell with others, of which the machine may be too small for one alone."""
    devices = Hardware(devices=some_devices(2), ranks_per_device=1)
    store = RecordStore(tmp_path, "s", "2.13.0", defect=None, deadline_s=60, hardware=devices)
    with pytest.raises(Unsupported, match="this machine has no nccl for 4 ranks"):
        CaseRuns(store, ("nccl",)).run(Cell(mesh="hsdp2x2"))


class Environments(NoPools):
    """Pools that keep the environment of each task by its function."""

    def __init__(self) -> None:
        self.by_function: dict[str, Mapping[str, str]] = {}

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        self.by_function[task.function] = env or {}
        return [{"facts": {}}] * world_size


def test_the_run_that_saves_has_the_environment_of_the_run_that_resumes(tmp_path: Path) -> None:
    pools = Environments()
    store = RecordStore(tmp_path, "test", str(torch.__version__), defect=None, deadline_s=60.0, pools=pools)
    CaseRuns(store).run(Cell(mesh="dp2", steps=4, saved_on="same", record_streams="1"))
    variables = {function: env.get(RECORD_STREAMS) for function, env in pools.by_function.items()}
    assert variables == {SAVING: "1", TRAINING: "1"}


# Failures


def report(rank: int, state: Any, stamp_s: float = math.inf, **details: Any) -> RankReport:
    return RankReport(rank=rank, state=state, stamp_s=stamp_s, **details)


def lost(rank: int, stamp_s: float) -> RankReport:
    return report(rank, "raised", stamp_s, exception_type="RuntimeError", message="Connection closed by peer [::1]:5")


WAITING = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 1 in f'
BUSY = 'Current thread 0x1 (most recent call first):\n  File "/x/model.py", line 1 in f'


def wrong(rank: int, stamp_s: float) -> RankReport:
    return report(rank, "raised", stamp_s, exception_type="ValueError")


CAUSES = {
    "a-death-beats-complaints": ([lost(0, 1.0), report(1, "died", 2.0)], 1, "crash"),
    "an-earlier-error-beats-a-death": ([wrong(0, 1.0), report(1, "died", 2.0)], 0, "raised"),
    "a-death-beats-a-later-error": ([wrong(0, 3.0), report(1, "died", 2.0)], 1, "crash"),
    "an-error-beats-complaints": ([lost(0, 1.0), wrong(1, 2.0)], 1, "raised"),
    "only-complaints": ([lost(0, 2.0), lost(1, 1.0)], 1, "raised"),
    "a-waiting-peer-is-no-cause": ([lost(0, 2.0), report(1, "hung", stack=WAITING)], 0, "raised"),
    "a-peer-that-never-answered": ([lost(0, 2.0), report(1, "hung", stack=BUSY)], 1, "timeout"),
    "all-hung": ([report(0, "hung", stack=WAITING), report(1, "hung", stack=BUSY)], 1, "timeout"),
}


@pytest.mark.parametrize(("ranks", "first_rank", "kind"), CAUSES.values(), ids=CAUSES)
def test_find_cause_names_the_rank_that_failed_first(ranks: list[RankReport], first_rank: int, kind: str) -> None:
    failure = find_cause(ranks, deadline_s=5)
    assert (failure.first_rank, failure.kind) == (first_rank, kind)


def test_waits_for_peers_looks_at_innermost_frames_only() -> None:
    frames = [f'  File "/x/model.py", line {line} in f' for line in range(3)]
    assert not waits_for_peers("\n".join(["Thread 0x1 (most recent call first):", *frames, WAITING.split("\n")[1]]))
    assert waits_for_peers("\n".join(["Thread 0x1 (most recent call first):", *frames, WAITING]))


def test_waits_for_peers_sees_through_the_dispatch_tap() -> None:
    """Otherwise a waiting rank would be blamed for the hang of another rank."""

    def stack(*files: str) -> str:
        return "\n".join(["Thread 0x1 (most recent call first):", *(f'  File "{f}", line 1 in f' for f in files)])

    tap = ["/x/torch/_ops.py", "/y/conformance/instruments/dispatch_tap.py", "/x/torch/_dynamo/eval_frame.py"]
    tap += ["/x/torch/_compile.py", "/x/torch/_library/autograd.py", "/x/torch/_ops.py"]
    assert waits_for_peers(stack(*tap, "/x/torch/distributed/_functional_collectives.py"))
    assert not waits_for_peers(stack(*tap, *["/x/model.py"] * 3, "/x/torch/distributed/fsdp/_fsdp_state.py"))
