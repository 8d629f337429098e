"""Command line: `torchrun --nproc-per-node N -m reference_trainer --config FILE [--set key=value ...]`."""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from reference_trainer.config import TrainerConfig, load_config
from reference_trainer.data import Batches
from reference_trainer.mesh import check_divisible, choose_device, init_process_group, resolve_mesh
from reference_trainer.train import StepMetrics, Trainer

_GIB = 1024**3
_PROCESS_GROUP_TIMEOUT_S = 300.0


def main() -> int:
    """Train; returns the exit status: 0, or 2 for a configuration that cannot be used."""
    arguments = _parse_arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_divisible(config, resolve_mesh(config.mesh, world_size=world_size))
        Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
        device = choose_device(config)
    except (ValueError, OSError) as error:
        if rank == 0:
            print(f"reference_trainer: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        init_method = "env://" if "RANK" in os.environ else f"file://{directory}/rendezvous"
        init_process_group(
            device, init_method=init_method, rank=rank, world_size=world_size, timeout_s=_PROCESS_GROUP_TIMEOUT_S
        )
        try:
            train(config, device=device, metrics_path=arguments.metrics if rank == 0 else None)
        finally:
            dist.destroy_process_group()
    return 0


def train(config: TrainerConfig, *, device: torch.device, metrics_path: Path | None) -> None:
    """Run all steps; with a path (rank 0) print a progress line and append metrics to the file."""
    trainer = Trainer(config, device=device, world_size=dist.get_world_size())
    if metrics_path is None:
        for step in range(config.steps):
            trainer.train_step(step)
        return
    with metrics_path.open("w") as metrics_file:
        for step in range(config.steps):
            start_s = time.perf_counter()
            metrics = trainer.train_step(step)
            _report(metrics, time.perf_counter() - start_s, config=config, device=device, file=metrics_file)


def _report(
    metrics: StepMetrics, duration_s: float, *, config: TrainerConfig, device: torch.device, file: IO[str]
) -> None:
    tokens_per_s = config.data.global_batch_size * config.data.seq_len / duration_s
    peak_bytes = peak_memory_bytes(device)
    row = {**asdict(metrics), "step_s": duration_s, "tokens_per_s": tokens_per_s, "peak_memory_bytes": peak_bytes}
    file.write(json.dumps(row) + "\n")
    file.flush()
    if metrics.step % 10 == 0 or metrics.step == config.steps - 1:
        print(
            f"step {metrics.step:5d}/{config.steps}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.4f}  "
            f"{tokens_per_s:,.0f} tokens/s  peak {peak_bytes / _GIB:.2f} GiB {'device' if device.type == 'cuda' else 'RSS'}",
            flush=True,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak allocated on a CUDA device; on the CPU the peak resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="reference_trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see reference_trainer/configs/")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a field: mesh.tp=2"
    )
    parser.add_argument("--data", help="token file, short for --set data.path=FILE")
    parser.add_argument("--metrics", type=Path, default=Path("metrics.jsonl"), help="where metrics are written")
    arguments = parser.parse_args()
    if arguments.data is not None:
        arguments.overrides.append(f"data.path={arguments.data}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
