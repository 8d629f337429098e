"""Execution of programs of findings: outcomes by status, and programs that hang, die or fail."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conformance.findings.execution import Shown, run_program
from conformance.run.pool import Pools

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    before = psutil.Process().children(recursive=True)
    with Pools(isolate=True) as pools:
        yield pools
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def run(pools: Pools, directory: Path, code: str, *, ranks: int = 2, limit_s: float = LIMIT_S) -> Shown:
    file = directory / "program.py"
    file.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{code}\n")
    return run_program(pools, file, ranks=ranks, limit_s=limit_s)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("", "right"),
        ("sys.exit(0)", "right"),
        ("sys.exit(rank)", "wrong"),
        ("sys.exit(1 + rank)", "wrong"),
        ("sys.exit(2 * rank)", "refused"),
        ("sys.exit('no reason')", "wrong"),
        ("sys.exit(7)", "error"),
        ("1 / 0", "error"),
        ("os.kill(os.getpid(), 11 * rank)", "dies"),
    ],
)
def test_the_outcome_is_what_the_ranks_end_with(pools: Pools, tmp_path: Path, code: str, outcome: str) -> None:
    assert run(pools, tmp_path, code).outcome == outcome


def test_what_ranks_print_is_kept(pools: Pools, tmp_path: Path) -> None:
    shown = run(pools, tmp_path, "print('rank', rank, 'of', os.environ['WORLD_SIZE']); 1 / (1 - rank)")
    assert "rank 0 of 2\n" in shown.output
    assert "ZeroDivisionError: " in shown.output


def test_a_program_that_hangs_leaves_no_process(pools: Pools, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import subprocess
child = subprocess.Popen(["sleep", "60"])
with open({str(pids)!r}, "a") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}\\n")
time.sleep(60 * rank)
"""
    assert run(pools, tmp_path, code, limit_s=2.0).outcome == "hangs"
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_ranks_meet_by_the_variables_of_torchrun(pools: Pools, tmp_path: Path) -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(rank)])
dist.all_reduce(total)
sys.exit(0 if total.item() == 1.0 else 7)
"""
    assert run(pools, tmp_path, code).outcome == "right"
    assert run(pools, tmp_path, code).outcome == "right", "no process serves two programs"
