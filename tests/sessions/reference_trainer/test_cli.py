"""Command line of the trainer, in real processes."""

import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from conformance.project import PROJECT
from reference_trainer.__main__ import main
from tests.support import forked

TINY = PROJECT / "reference_trainer" / "configs" / "tiny.yaml"
MODULE = ["-m", "reference_trainer", "--config", str(TINY)]
STEP_FIELDS = ["step", "loss", "grad_norm", "valid_tokens", "lr", "loss_scale", "skipped"]
FIELDS = [*STEP_FIELDS, "step_s", "tokens_per_s", "peak_memory_bytes"]


def command(*arguments: str, nproc: int | None = None) -> list[str]:
    """Return the trainer's command line: one plain process, or `nproc` of them under torchrun."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}", f"--master-port={free_port()}"]
    return [sys.executable, *([] if nproc is None else launcher), *MODULE, *arguments]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # set, so that torchrun need not say that it sets it


def run(arguments: list[str], *, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process that is forked with torch loaded."""
    _interpreter, _option, module, *words = arguments
    return forked.run(module, *words, cwd=cwd, environment=environment())


def run_ranks(arguments: list[str], *, world_size: int, directory: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run the command line on several ranks, which a launcher other than torchrun has started."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words, ranks = command(*arguments)[3:], [str(rank) for rank in range(world_size)]
    own = {rank: {**environment(), **shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks}
    started = [
        forked.started("reference_trainer", words, directory / rank, cwd=PROJECT, environment=own[rank])
        for rank in ranks
    ]
    return [wait() for wait in started]


def trained_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process: starting one takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    _interpreter, _option, _module, *words = command(*arguments)
    with patch.object(sys, "argv", ["reference_trainer", *words]), redirect_stdout(out), redirect_stderr(err):
        status = main()
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def refusal(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, which must end it before it would train."""
    with patch("reference_trainer.__main__.init_process_group", side_effect=AssertionError("it would train")):
        return trained_here(*arguments)


def rows_of(path: Path) -> list[dict[str, float | None]]:
    """Read JSON lines strictly: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def numbers(rows: list[dict[str, float | None]], field: str) -> list[float]:
    values = [row[field] for row in rows]
    assert all(isinstance(value, (int, float)) for value in values)
    return [value for value in values if value is not None]


TP2 = ["--set", "mesh.tp=2", "--set", "optimizer.warmup_steps=0"]


def test_auto_says_what_it_chose_and_why(tmp_path: Path) -> None:
    result = run(command("--metrics", str(tmp_path / "m"), "--set", "reshard=auto", "--set", "steps=1"))
    assert (result.returncode, result.stderr) == (0, "")
    _first, reason, progress, _last = result.stdout.splitlines()
    assert reason.startswith("reshard auto: never, since keeping all parameters needs about ")
    assert reason.endswith("may be used; tok_embeddings to output: never")
    assert progress.startswith("step     0/1")


def test_two_processes_train(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    result = run(command("--metrics", str(metrics), *TP2, "--set", "steps=4", nproc=2))
    assert (result.returncode, result.stderr) == (0, "")
    begun, first, last, done = result.stdout.splitlines()
    outputs = f"metrics: {metrics}, checkpoints: none"
    ranks = "2 ranks (dp_shard 1 x tp 2) on cpu"
    assert begun == f"361,088 parameters, {ranks}, precision fp32, reshard default, 4 steps; {outputs}"
    assert first.startswith("step     0/4  loss 5.5700  grad norm ")
    assert last.startswith("step     3/4  loss ")
    assert "tokens/s  peak" in last
    rows = rows_of(metrics)
    assert re.fullmatch(
        r"trained 4 steps in [0-9.]+ s, [0-9,]+ tokens/s, final loss "
        rf"{numbers(rows, 'loss')[-1]:.4f}; {re.escape(outputs)}",
        done,
    )
    assert [list(row) for row in rows] == [FIELDS] * 4
    assert numbers(rows, "step") == [0, 1, 2, 3]
    assert numbers(rows, "valid_tokens") == [8 * 128] * 4
    losses = numbers(rows, "loss")
    assert math.isclose(losses[0], math.log(256), rel_tol=0.01), "an untrained model knows nothing"
    assert losses == sorted(losses, reverse=True)
    assert not any(numbers(rows, "skipped"))
    assert all(rate > 0 for field in FIELDS[2:] if field != "skipped" for rate in numbers(rows, field))


def test_one_plain_process_trains_on_a_file(tmp_path: Path) -> None:
    tokens, metrics = tmp_path / "1", tmp_path / "metrics.jsonl"
    tokens.write_bytes(bytes(range(256)))
    result = run([*command("--metrics", str(metrics), "--set", "steps=1"), "--data", "1"], cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(rows_of(metrics)) == 1


def test_under_torchrun_the_line_is_printed_once_and_quoted_in_the_summary() -> None:
    result = run(command("--set", "mesh.tp=3", nproc=2))
    line = "reference_trainer: mesh dp_replicate 1 x dp_shard auto x tp 3 does not fit the number of processes, 2"
    assert result.returncode == 1
    assert sum(printed.startswith(line) for printed in result.stderr.splitlines()) == 1
    assert f"traceback : {line}" in result.stderr.partition("Root Cause")[2]
    assert result.stderr.count("Traceback (most recent call last)") <= 1, "torchrun's own, none of ours"


def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("--metrics", str(tmp_path / "metrics.jsonl")),
        cwd=PROJECT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("361,088 parameters")
    assert process.stdout.readline().startswith("step     0/300")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "")


def test_help_explains_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(sys, "argv", ["reference_trainer", "--help"]), pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    help_in_one_line = " ".join(capsys.readouterr().out.split())
    assert "exit status: 0 trained; 1 training failed, for example by a loss that is not finite; 4 " in help_in_one_line
