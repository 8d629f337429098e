"""Command line: `torchrun --nproc-per-node N -m reference_trainer --config FILE [--set key=value ...]`."""

import argparse
import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import msgspec
import torch
import torch.distributed as dist

from reference_trainer.checkpoint import (
    Checkpoints,
    check_can_be_saved,
    newest_checkpoint,
    require_no_checkpoints,
    resume,
)
from reference_trainer.checks import require
from reference_trainer.config import TrainerConfig, load_config
from reference_trainer.data import Batches
from reference_trainer.mesh import backends, check_device, choose_device, destroy_process_group, init_process_group
from reference_trainer.parallel_dims import check_fits_mesh, resolve_mesh
from reference_trainer.reshard import ReshardPolicy, reshard_policy
from reference_trainer.train import StepMetrics, Trainer
from reference_trainer.weights import check_checkpoint

_GIB = 1024**3
_PROCESS_GROUP_TIMEOUT_S = 300.0
_PROGRESS_INTERVAL = 10  # steps
_HEAD_START_S = 30.0  # torchrun ends all processes once one has failed: the process that explains must be the first
_EXIT_USAGE, _EXIT_INTERRUPTED = 2, 130


def main() -> int:
    """Train, and return the exit status: 0, 2 for a configuration that cannot be used, 130 after Ctrl-C."""
    arguments = _parse_arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _silence_harmless_warnings()
    try:
        config, device, saving, steps_done = _prepare(arguments, world_size=world_size)
        # Only rank 0 reports: metrics are equal on every rank.
        metrics_file = _open_metrics(arguments.metrics if rank == 0 else Path(os.devnull), steps_done=steps_done)
    except (ValueError, OSError) as error:
        _complain(" ".join(str(error).split()))
        return _EXIT_USAGE
    try:
        with metrics_file, tempfile.TemporaryDirectory() as directory:
            init_method = "env://" if "RANK" in os.environ else f"file://{directory}/rendezvous"
            # torch.distributed.checkpoint copies to the CPU before it saves asynchronously, and coordinates there.
            backend = backends(device, cpu_tensors=config.offload == "cpu" or saving.asynchronous)
            init_process_group(
                backend, init_method=init_method, rank=rank, world_size=world_size, timeout_s=_PROCESS_GROUP_TIMEOUT_S
            )
            try:
                train(config, device=device, metrics_file=metrics_file, saving=saving)
            finally:
                destroy_process_group()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Checkpoints that a run resumes from and writes."""

    resume: Path | None = None
    """Directory from whose newest checkpoint the run goes on."""
    save_every: int | None = None
    """Steps between checkpoints; the last step is saved too. None: no checkpoints are written."""
    directory: Path = Path("checkpoints")
    """Directory into which checkpoints are written."""
    asynchronous: bool = False
    """Train on while a checkpoint is written."""

    @property
    def resumes_there(self) -> bool:
        """True if the run resumes from the directory into which it writes."""
        return self.resume is not None and self.resume.resolve() == self.directory.resolve()


def train(
    config: TrainerConfig, *, device: torch.device, metrics_file: IO[bytes], saving: Saving | None = None
) -> None:
    """Run all steps; append the metrics of each to the file, and print progress on rank 0."""
    saving = saving or Saving()
    trainer = Trainer(config, device=device, world_size=dist.get_world_size())
    _tell_reshard_policy(trainer.reshard)
    first = resume(trainer, saving.resume) if saving.resume else 0
    checkpoints = None
    if saving.save_every is not None:
        checkpoints = Checkpoints(saving.directory, asynchronous=saving.asynchronous, resumed=saving.resumes_there)
    for step in range(first, config.steps):
        start_s = time.perf_counter()
        metrics = trainer.train_step(step)
        row = _row(metrics, time.perf_counter() - start_s, config=config, device=device)
        # JSON has no NaN or infinity: msgspec writes null for them.
        metrics_file.write(msgspec.json.encode(row) + b"\n")
        metrics_file.flush()
        last = step == config.steps - 1
        if dist.get_rank() == 0 and (step % _PROGRESS_INTERVAL == 0 or last):
            _print_progress(row, steps=config.steps, memory_kind="device" if device.type == "cuda" else "RSS")
        if checkpoints:
            checkpoints.poll()
            if saving.save_every and ((step + 1) % saving.save_every == 0 or last):
                checkpoints.save(trainer, steps_done=step + 1)
    if checkpoints:
        checkpoints.finish()


def _tell_reshard_policy(policy: ReshardPolicy) -> None:
    """Log the policy; one that `auto` has chosen is also printed, with the reason."""
    if dist.get_rank() == 0:
        logging.getLogger(__name__).info("reshard after forward: %s", policy.describe())
        if policy.reason:
            print(f"{policy.reason}; {policy.describe()}", flush=True)


def _row(
    metrics: StepMetrics, duration_s: float, *, config: TrainerConfig, device: torch.device
) -> dict[str, int | float]:
    """One line of the metrics file; times and memory are those of this process."""
    return {
        **asdict(metrics),
        "step_s": duration_s,
        "tokens_per_s": config.data.global_batch_size * config.data.seq_len / duration_s,
        "peak_memory_bytes": peak_memory_bytes(device),
    }


def _print_progress(row: dict[str, int | float], *, steps: int, memory_kind: str) -> None:
    print(
        f"step {row['step']:5d}/{steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.4f}  "
        f"{row['tokens_per_s']:,.0f} tokens/s  peak {row['peak_memory_bytes'] / _GIB:.2f} GiB {memory_kind}",
        flush=True,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak allocated on a CUDA device; on the CPU, the peak resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="reference_trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see reference_trainer/configs/")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a field: mesh.tp=2"
    )
    parser.add_argument("--data", metavar="FILE", help="token file, the same as --set 'data.path=\"FILE\"'")
    parser.add_argument("--metrics", type=Path, default=Path("metrics.jsonl"), help="where metrics are written")
    parser.add_argument("--save-every", type=int, metavar="N", help="save a checkpoint every N steps, and at the end")
    parser.add_argument("--save-dir", type=Path, metavar="DIR", help="where (default: as --resume, or checkpoints)")
    parser.add_argument("--save-async", action="store_true", help="train on while a checkpoint is written")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from the newest checkpoint in DIR")
    arguments = parser.parse_args()
    if arguments.data is not None:
        # Quoted, so that a file named `1` or `a: b` is a string.
        arguments.overrides.append(f"data.path={json.dumps(arguments.data, ensure_ascii=False)}")
    return arguments


def _prepare(arguments: argparse.Namespace, *, world_size: int) -> tuple[TrainerConfig, torch.device, Saving, int]:
    """Configuration, this process's device, checkpoints, and the number of steps that are done already.

    Raises ValueError or OSError for a run that is not possible.
    """
    config = load_config(arguments.config, arguments.overrides)
    dims = resolve_mesh(config.mesh, world_size=world_size)
    check_fits_mesh(config, dims)
    Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    check_checkpoint(config)
    saving = Saving(
        resume=arguments.resume,
        save_every=arguments.save_every,
        directory=arguments.save_dir or arguments.resume or Path("checkpoints"),
        asynchronous=arguments.save_async,
    )
    if saving.save_every is not None or saving.resume is not None:
        check_can_be_saved(config)
    require(saving.save_every is None or saving.save_every >= 1, f"--save-every {saving.save_every}: at least 1")
    if saving.save_every is not None and not saving.resumes_there:
        require_no_checkpoints(saving.directory)
    steps_done = newest_checkpoint(saving.resume, config)[1].steps_done if saving.resume else 0
    device = choose_device(config)
    check_device(config, device)
    reshard_policy(config, dims, device)
    return config, device, saving, steps_done


def _open_metrics(path: Path, *, steps_done: int) -> IO[bytes]:
    """File with the metrics of the steps before the checkpoint; steps after the checkpoint are done again."""
    lines = path.read_bytes().splitlines(keepends=True) if steps_done and path.is_file() else []
    file = path.open("wb")
    file.writelines(line for line in lines if msgspec.json.decode(line)["step"] < steps_done)
    return file


def _complain(problem: str) -> None:
    """Write one line to stderr, from one process of each node.

    torchrun adds its own ChildFailedError, traceback included, to every exit status but 0, and has no option against it
    (torch 2.13, torch/distributed/launcher/api.py). The error ends in a summary which quotes the error file of the
    process that failed first (https://pytorch.org/docs/stable/elastic/errors.html): our line is there, last on the
    screen.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_HEAD_START_S)
        return
    message = f"reference_trainer: {problem}"
    print(message, file=sys.stderr, flush=True)
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(error_file).write_bytes(msgspec.json.encode(content))


def _silence_harmless_warnings() -> None:
    # A view returned by a module matters to who modifies it in place: nothing here does. With tensor parallelism each
    # DTensor.to_local is such a view. Can go with https://github.com/pytorch/pytorch/pull/197154.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    # A first step that is skipped because gradients overflow; the schedule follows the number of the step.
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before", category=UserWarning)
    # The gradient norm, one number, is reduced over dp and tp one after the other: no time is lost. Can go when DTensor
    # flattens meshes by itself, https://github.com/pytorch/pytorch/issues/171916.
    redistribute_logger = logging.getLogger("torch.distributed.tensor._redistribute")
    redistribute_logger.addFilter(lambda record: not str(record.msg).startswith("While redistributing from"))


if __name__ == "__main__":
    sys.exit(main())
