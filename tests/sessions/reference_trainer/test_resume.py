"""Checkpoints of a run: atomic under kill -9, refused when damaged, and resumed from the command line."""

import random
import re
import shutil
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from reference_trainer.checkpoint import Checkpoints, newest_checkpoint, resume
from reference_trainer.config import DataConfig, ModelConfig, TrainerConfig
from reference_trainer.mesh import init_process_group
from reference_trainer.train import Trainer
from tests.sessions.reference_trainer.test_cli import TINY, command, numbers, refusal, rows_of, run, trained_here
from tests.support import forked

CONFIG = TrainerConfig(
    model=ModelConfig(vocab_size=31, dim=16, n_layers=1, ffn_dim=24, max_seq_len=8, dropout=0.1),
    data=DataConfig(seq_len=8, global_batch_size=4),
    steps=30,
    device="cpu",
)
ROUNDS, RANKS = 10, 2


def train(rank: int, directory: Path, rendezvous: Path, report: Path) -> None:
    """Resume from the newest checkpoint if there is one, save after each step, and report each step's loss."""
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout_s=60.0)
    trainer = Trainer(CONFIG, device=torch.device("cpu"), world_size=RANKS)
    begun = any(directory.glob("step-*"))
    first = resume(trainer, directory) if begun else 0
    checkpoints = Checkpoints(directory, resumed=begun)
    for step in range(first, CONFIG.steps):
        metrics = trainer.train_step(step)
        if rank == 0:
            with report.open("ab") as file:
                file.write(msgspec.json.encode([step, metrics.loss]) + b"\n")
        checkpoints.save(trainer, steps_done=step + 1)
    dist.destroy_process_group()


def started(directory: Path, rendezvous: Path, report: Path) -> list[BaseProcess]:
    processes: list[BaseProcess] = [
        forked.context().Process(target=train, args=(rank, directory, rendezvous, report)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    return processes


def wait_for_save(directory: Path, *, deadline_s: float) -> bool:
    """Wait until a save is under way; False if none begins."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if any(directory.glob(".step-*")):
            return True
        time.sleep(0.001)  # far less than a save takes
    return False


def losses(report: Path) -> dict[int, float]:
    """Return the loss of each step; raises AssertionError if a repeated step has another loss."""
    by_step: dict[int, float] = {}
    for line in report.read_bytes().splitlines():
        step, loss = msgspec.json.decode(line)
        assert by_step.setdefault(step, loss) == loss, f"step {step} was repeated with another result"
    return by_step


def test_a_kill_during_a_save_loses_nothing(tmp_path: Path) -> None:
    """After ten kills at random times, complete checkpoints are there, and training goes on bit for bit."""
    rng = random.Random(0)
    directory, report = tmp_path / "checkpoints", tmp_path / "losses"
    done = 0
    for number in range(ROUNDS):
        processes = started(directory, tmp_path / f"rendezvous{number}", report)
        assert wait_for_save(directory, deadline_s=60.0)
        time.sleep(rng.uniform(0.0, 0.03))
        for process in rng.sample(processes, RANKS):
            process.kill()
            time.sleep(rng.uniform(0.0, 0.01))
        for process in processes:
            process.join()
        if any(directory.glob("step-*")):
            _, manifest = newest_checkpoint(directory, CONFIG)
            assert manifest.steps_done >= done, "a complete checkpoint was lost"
            done = manifest.steps_done
    for process in (last := started(directory, tmp_path / "rendezvous", report)):
        process.join()
    assert [process.exitcode for process in last] == [0] * RANKS
    assert not list(directory.glob(".step-*"))
    undisturbed = tmp_path / "undisturbed"
    for process in started(tmp_path / "others", tmp_path / "rendezvous-undisturbed", undisturbed):
        process.join()
    assert losses(report) == losses(undisturbed)
    assert losses(report).keys() == set(range(CONFIG.steps))


SHORT = ["--set", "steps=4", "--set", "model.dropout=0.1", "--set", "data.global_batch_size=2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of four steps with checkpoints after two and four."""
    directory = tmp_path_factory.mktemp("saved")
    save = ["--save-every", "2", "--save-dir", str(directory / "checkpoints")]
    result = run(command("--metrics", str(directory / "metrics.jsonl"), *SHORT, *save))
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    return directory


def copy_of(saved: Path, tmp_path: Path) -> Path:
    """Copy the run without its last checkpoint, but with the metrics of all steps."""
    shutil.copytree(saved, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    return tmp_path / "run"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_a_run_is_resumed_from_the_command_line(saved: Path, tmp_path: Path, asynchronous: bool) -> None:
    """The resumed run saves, too, and replaces the metrics of repeated steps."""
    directory = copy_of(saved, tmp_path)
    metrics = directory / "metrics.jsonl"
    with metrics.open("ab") as file:
        file.write(b'{"step": 4, "lo')  # as a kill leaves it
    arguments = ["--resume", str(directory / "checkpoints"), "--save-every", "1", "--metrics", str(metrics)]
    result = run(command(*arguments, *SHORT, *(["--save-async"] if asynchronous else [])))
    assert (result.returncode, result.stderr) == (0, "")
    before, after = rows_of(saved / "metrics.jsonl"), rows_of(metrics)
    for field in ("step", "loss", "grad_norm", "lr"):
        assert numbers(after, field) == numbers(before, field)
    names = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003", "step-00000004"]


def truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is damaged: __0_0.distcp has"),
        (lambda path: (path / "__0_0.distcp").unlink(), "is damaged: __0_0.distcp is missing"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
        (shutil.rmtree, "holds no checkpoint"),
    ],
    ids=["cut", "missing", "empty manifest", "no manifest", "no checkpoint"],
)
def test_a_damaged_checkpoint_is_one_clear_error(
    saved: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    directory = copy_of(saved, tmp_path)
    damage(directory / "checkpoints" / "step-00000002")
    before = {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}
    metrics = str(directory / "metrics.jsonl")
    result = refusal(["--resume", str(directory / "checkpoints"), "--metrics", metrics, *SHORT])
    assert result.returncode == 4
    assert re.fullmatch(rf"reference_trainer: .*{re.escape(message)}.*\n", result.stderr)
    assert {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "model.dim=64"], "is of another run: its model is "),
        (["--set", "optimizer.lr=0.1"], "is of another run: its optimizer is "),
        (["--set", "seed=1"], "is of another run: its seed is "),
        (["--set", "data.seq_len=16"], "is of another run: its data is "),
        (["--set", "steps=5"], "falls over 4 steps, this run's over 5: set optimizer.lr_decay_steps=4"),
        (["--set", "steps=3", "--set", "optimizer.lr_decay_steps=4"], "has done 4 steps, but steps is 3"),
        (["--metrics", str(TINY)], f"{TINY} holds no metrics of a run ("),
    ],
)
def test_a_checkpoint_of_another_run_or_metrics_elsewhere_are_refused(
    saved: Path, options: list[str], message: str
) -> None:
    before = TINY.read_bytes()
    result = refusal(["--resume", str(saved / "checkpoints"), *SHORT, *options])
    assert (result.returncode, TINY.read_bytes()) == (4, before)
    assert message in result.stderr


def test_a_new_run_does_not_mix_its_checkpoints_with_anothers(saved: Path) -> None:
    result = refusal(["--save-every", "1", "--save-dir", str(saved / "checkpoints"), *SHORT])
    assert result.returncode == 4
    assert "already holds checkpoints: resume from it, or save in another directory" in result.stderr


FALLING = ["--set", "optimizer.lr_decay_steps=2"]
CONSTANT = ["--set", "optimizer.final_lr_fraction=1"]


@pytest.mark.parametrize(
    ("before", "after"), [(CONSTANT, CONSTANT), ([], FALLING), (FALLING, FALLING)], ids=["constant", "set", "kept"]
)
def test_an_extended_run_is_the_run_that_had_all_steps(tmp_path: Path, before: list[str], after: list[str]) -> None:
    """The learning rate is constant, or falls over the steps of the run before it is extended."""
    rows, files = [], []
    for name, runs in {"extended": [(2, before), (4, after)], "undisturbed": [(4, after)]}.items():
        directory, metrics = tmp_path / name, tmp_path / f"{name}.jsonl"
        for steps, options in runs:
            resumed = ["--resume", str(directory)] if directory.exists() else ["--save-dir", str(directory)]
            outputs = [*resumed, "--save-every", "2", "--metrics", str(metrics)]
            result = trained_here(*SHORT, *outputs, "--set", f"steps={steps}", *options)
            assert (result.returncode, result.stderr) == (0, "")
        rows.append([numbers(rows_of(metrics), field) for field in ("step", "loss", "grad_norm", "lr")])
        files.append((directory / "step-00000004" / "__0_0.distcp").read_bytes())
    assert rows[0] == rows[1]
    assert rows[0][0] == [0, 1, 2, 3]
    assert files[0] == files[1]


def test_a_run_that_is_done_says_how_it_can_be_extended(saved: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    result = trained_here("--resume", str(saved / "checkpoints"), "--metrics", str(metrics), *SHORT)
    assert (result.returncode, result.stderr) == (0, "")
    _first, resumed, last = result.stdout.splitlines()
    assert resumed == f"resumed from {saved / 'checkpoints'}: 4 of 4 steps are done"
    assert last == f"4 steps were done before: set steps to more to go on; metrics: {metrics}, checkpoints: none"
