"""Command line: `torchrun --nproc-per-node N -m reference_trainer --config FILE [--set key=value ...]`."""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import IO, NoReturn

import msgspec
import torch

from reference_trainer.checkpoint import check_can_be_saved, newest_checkpoint, require_no_checkpoints
from reference_trainer.checks import UsageError, require
from reference_trainer.config import TrainerConfig, load_config
from reference_trainer.data import Batches
from reference_trainer.loop import Saving, train
from reference_trainer.mesh import backends, check_device, choose_device, destroy_process_group, init_process_group
from reference_trainer.nonfinite import NonFiniteError
from reference_trainer.parallel_dims import check_fits_mesh, resolve_mesh
from reference_trainer.pipeline import check_pipeline
from reference_trainer.reshard import reshard_policy
from reference_trainer.weights import check_checkpoint

_PROCESS_GROUP_TIMEOUT_S = 300.0
_HEAD_START_S = 30.0  # torchrun ends all processes once one has failed: the process that explains must be the first
_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 4, 130
_EPILOG = """exit status: 0 trained; 1 training failed, for example by a loss that is not finite; 4 the command line,
configuration or a file named there cannot be used; 130 interrupted. That of torchrun is 1 for all of them but 0."""


def main() -> int:
    """Train, and return the exit status that `--help` explains."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _silence_harmless_warnings()
    try:
        arguments = _parse_arguments()
        config, device, saving, steps_done = _prepare(arguments, world_size=world_size)
        # Only rank 0 reports: metrics are equal on every rank.
        metrics_file = _open_metrics(arguments.metrics if rank == 0 else Path(os.devnull), steps_done=steps_done)
    except (UsageError, OSError) as error:
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
    except NonFiniteError as error:
        _complain(str(error))
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are usage errors, like those of the configuration."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; see --help")


def _parse_arguments() -> argparse.Namespace:
    parser = _Parser(prog="reference_trainer", description=__doc__, epilog=_EPILOG)
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
    """Return the configuration, this process's device, checkpoints, and the number of steps done before.

    Raises UsageError or OSError for a run that is not possible.
    """
    config = load_config(arguments.config, arguments.overrides)
    dims = resolve_mesh(config.mesh, world_size=world_size)
    check_fits_mesh(config, dims)
    check_pipeline(config, dims)
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


class _Row(msgspec.Struct):
    """Fields of a row of the metrics file that a resumed run reads."""

    step: int


def _open_metrics(path: Path, *, steps_done: int) -> IO[bytes]:
    """File with the metrics of the steps before the checkpoint; steps after the checkpoint are done again."""
    rows = _rows_before(path, steps_done) if steps_done and path.is_file() else []
    file = path.open("wb")
    file.writelines(rows)
    return file


def _rows_before(path: Path, steps_done: int) -> list[bytes]:
    """Return the complete lines about earlier steps; a process that was killed may have left an incomplete one."""
    rows = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        return [row for row in rows if msgspec.json.decode(row, type=_Row).step < steps_done]
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} holds no metrics of a run ({error}): name another file with --metrics") from None


def _complain(problem: str) -> None:
    """Write one line to stderr, from one process of each node.

    torchrun adds its own ChildFailedError, traceback included, to every exit status but 0, and has no option against it
    (torch 2.13, torch/distributed/launcher/api.py). The error ends in a summary which quotes the error file of the
    process that failed first (https://pytorch.org/docs/stable/elastic/errors.html): our line is there, last on the
    screen.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        if error_file:
            time.sleep(_HEAD_START_S)
        return
    message = f"reference_trainer: {problem}"
    print(message, file=sys.stderr, flush=True)
    if error_file:
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
