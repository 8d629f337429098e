"""NCCL's flight recorder, on dumps that tests write."""

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d

from conformance.project import PROJECT
from conformance.run.devices.leases import Leases
from conformance.run.pool import Pools, RunFailed, Task
from conformance.run.ranks.flight_recorder import collect_dumps, summary, variables
from conformance.run.ranks.messages import RankFiles
from conformance.run.ranks.process import Rank, environment


def entry(number: int, state: str, **other: Any) -> dict[str, Any]:
    """Return an entry of a dump as torch 2.13 writes it."""
    return {
        "record_id": number - 1,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": ("1", "dp_shard"),
        "profiling_name": "nccl:_all_gather_base",
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8, 2]],
        "output_dtypes": ["Float"],
        "state": state,
        "frames": [],
        **other,
    }


def dump(*entries: object) -> bytes:
    return pickle.dumps({"version": "2.10", "pg_config": {}, "entries": list(entries)})


@pytest.fixture
def files(tmp_path: Path) -> RankFiles:
    return RankFiles(tmp_path, 3)


def test_the_last_collectives_are_told(files: RankFiles) -> None:
    rest = [entry(number, "completed") for number in range(1, 30)]
    files.flight.write_bytes(dump(*rest, entry(30, "started"), entry(31, "scheduled", is_p2p=True, p2p_seq_id=5)))
    lines = summary(files.flight).splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("#24 ")
    assert lines[-2] == "#30 nccl:_all_gather_base of dp_shard: started; Float [4, 2] -> Float [8, 2]"
    assert lines[-1].startswith("#5 nccl:_all_gather_base of dp_shard: scheduled; ")


def test_fields_that_an_older_torch_does_not_have(files: RankFiles) -> None:
    old = {"profiling_name": "nccl:all_reduce", "state": "started", "input_sizes": [[2]], "collective_seq_id": 7}
    files.flight.write_bytes(dump(old))
    assert summary(files.flight) == "#7 nccl:all_reduce of None: started; ? [2] -> nothing"


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    "content",
    [b"", dump(entry(1, "started"))[:-9], b"text", pickle.dumps([1]), pickle.dumps({"entries": 3}), dump("no entry")],
)
def test_what_is_no_dump_tells_nothing(files: RankFiles, content: bytes) -> None:
    assert summary(files.flight) == ""
    files.flight.write_bytes(content)
    assert summary(files.flight) == ""


def test_a_pickle_of_anything_but_builtins_is_refused(
    files: RankFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files.flight.write_bytes(pickle.dumps({"entries": [entry(1, "started")], "other": Harmful()}))
    assert summary(files.flight) == ""
    assert not (tmp_path / "harm").exists()


def test_ranks_on_devices_have_them(files: RankFiles) -> None:
    for device, expected in (("", dict.fromkeys(variables(files))), ("GPU-1", variables(files))):
        assert files.flight_pipe.exists() is False
        with environment({}):
            rank = Rank(rank=3, world_size=4, directory=files.directory, device=device)
            rank._set_environment()
            assert {name: os.environ.get(name) for name in expected} == expected


def listen(fd: int, files: RankFiles) -> None:
    """Substitute for the thread of torch that looks at the pipe."""
    os.read(fd, 64)
    files.flight.write_bytes(dump(entry(1, "started"))[:-9])  # half of it
    time.sleep(0.1)
    files.flight.write_bytes(dump(entry(1, "started")))


def test_a_rank_that_hangs_is_asked_for_its_dump(files: RankFiles) -> None:
    os.mkfifo(files.flight_pipe)
    holder = os.open(files.flight_pipe, os.O_RDWR)  # does not wait for somebody who writes
    thread = threading.Thread(target=listen, args=(holder, files), daemon=True)
    thread.start()
    collect_dumps([files, RankFiles(files.directory, 4)])
    thread.join(timeout=5)
    os.close(holder)
    assert summary(files.flight).startswith("#1 nccl:_all_gather_base of dp_shard: started")


def test_nobody_is_waited_for_who_does_not_listen_or_dump(files: RankFiles) -> None:
    start_s = time.monotonic()
    collect_dumps([files])
    assert time.monotonic() - start_s < 0.5
    os.mkfifo(files.flight_pipe)
    holder = os.open(files.flight_pipe, os.O_RDWR)
    collect_dumps([files], limit_s=0.2)
    os.close(holder)
    assert 0.2 <= time.monotonic() - start_s < 2.0


def test_the_failure_of_a_task_has_the_last_collectives() -> None:
    """A rank that raises after its watchdog has dumped has them; its peer, with an earlier task's dump, does not."""
    payload = {"dump": dump(entry(1, "completed"), entry(2, "started")).hex()}
    with Pools() as pools:
        pools.run(Task("tests.support.pool_tasks:leave_dump", payload), world_size=2, deadline_s=30)
        with pytest.raises(RunFailed) as caught:
            pools.run(Task("tests.support.pool_tasks:fail_with_dump", payload), world_size=2, deadline_s=30)
    told = caught.value.details()
    assert "last collectives of rank 0:\n#1 nccl:_all_gather_base of dp_shard: completed;" in told
    assert "#2 nccl:_all_gather_base of dp_shard: started; Float [4, 2] -> Float [8, 2]" in told
    assert "last collectives of rank 1" not in told


LISTENING = """
import sys, time
from pathlib import Path
from conformance.run.ranks.flight_recorder import listen
from conformance.run.ranks.messages import RankFiles
listen(RankFiles(Path(sys.argv[1]), 3))
print(flush=True)
time.sleep(60)
"""


def test_a_process_dumps_as_often_as_it_is_asked(files: RankFiles) -> None:
    """Also one that has communicated nothing, of a torch with NCCL or without."""
    command = [sys.executable, "-c", LISTENING, str(files.directory)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(2):
            files.flight.unlink(missing_ok=True)
            collect_dumps([files])
            assert has_dumped(files) == any(hasattr(c10d, f"_dump_{of}_trace") for of in ("nccl", "fr"))
        process.kill()


def has_dumped(files: RankFiles) -> bool:
    return files.flight.exists() and "version" in pickle.loads(files.flight.read_bytes())


@pytest.mark.skipif(hasattr(c10d, "_dump_nccl_trace"), reason="this torch dumps what NCCL did, which is nothing here")
def test_a_warm_rank_that_hangs_in_a_later_task_dumps() -> None:
    """The devices are names: ranks have the recorder's settings and communicate by gloo."""
    with Pools(devices=Leases(["GPU-a", "GPU-b"])) as pools:
        first, second = (
            Task("tests.support.pool_tasks:reduce_and_hang", {"hangs": hangs}, accelerated=True)
            for hangs in (False, True)
        )
        pids = pools.run(first, world_size=2, deadline_s=30)
        assert pools.run(first, world_size=2, deadline_s=30) == pids, "the ranks are warm"
        with pytest.raises(RunFailed) as caught:
            pools.run(second, world_size=2, deadline_s=3)
    if not hasattr(c10d, "_dump_fr_trace"):
        pytest.skip(f"torch {torch.__version__} dumps no gloo")
    for rank in range(2):
        assert f"last collectives of rank {rank}:\n#" in caught.value.details()
    assert "gloo:all_reduce of default_pg" in caught.value.details()
