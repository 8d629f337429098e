"""Training loop of the command line: steps, metrics, printed lines, checkpoints, and a check for finite numbers."""

import math
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import msgspec
import torch
import torch.distributed as dist

from reference_trainer.checkpoint import Checkpoints, resume
from reference_trainer.clip import NonFiniteGradientsError
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.nonfinite import NonFiniteError, NonFiniteWatch
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh
from reference_trainer.train import StepMetrics, Trainer

_PROGRESS_INTERVAL = 10  # steps


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
    """Continue training while a checkpoint is written."""

    @property
    def resumes_there(self) -> bool:
        """True if the run resumes from the directory into which it writes."""
        return self.resume is not None and self.resume.resolve() == self.directory.resolve()


def train(config: TrainerConfig, *, device: torch.device, metrics_file: IO[bytes], saving: Saving) -> None:
    """Run all steps; append the metrics of each to the file, and print progress on rank 0.

    Raises NonFiniteError, on all ranks, after a step with a loss, a gradient norm or parameters that are not finite.
    Checkpoints of earlier steps are complete then.
    """
    dims = resolve_mesh(config.mesh, world_size=dist.get_world_size())
    outputs = f"metrics: {metrics_file.name}, checkpoints: {saving.directory if saving.save_every else 'none'}"
    _print(first_line(config, dims, device, outputs=outputs))
    loop = _Loop(config, device, metrics_file, saving)
    start_s = time.perf_counter()
    for step in range(loop.first, config.steps):
        loop.train_step(step)
    loop.finish()
    duration_s, trained = time.perf_counter() - start_s, config.steps - loop.first
    _print(last_line(config, trained=trained, duration_s=duration_s, loss=loop.loss, outputs=outputs))


class _Loop:
    """State of a run between its steps."""

    def __init__(self, config: TrainerConfig, device: torch.device, metrics_file: IO[bytes], saving: Saving) -> None:
        self._config, self._device, self._metrics_file, self._saving = config, device, metrics_file, saving
        self._watch = NonFiniteWatch(device)
        self._trainer = Trainer(config, device=device, world_size=dist.get_world_size(), observer=self._watch)
        if self._trainer.reshard.reason:
            _print(f"{self._trainer.reshard.reason}; {self._trainer.reshard.describe()}")
        self.loss = math.nan
        self.first = self._resume(saving.resume) if saving.resume else 0
        self._checkpoints: Checkpoints | None = None
        if saving.save_every is not None:
            resumed = saving.resumes_there
            self._checkpoints = Checkpoints(saving.directory, asynchronous=saving.asynchronous, resumed=resumed)

    def train_step(self, step: int) -> None:
        """Train one step, and save a checkpoint if it is time."""
        last, save_every = step == self._config.steps - 1, self._saving.save_every
        saves = save_every is not None and ((step + 1) % save_every == 0 or last)
        try:
            self._measured_step(step, shown=step % _PROGRESS_INTERVAL == 0 or last)
            if saves or last:
                self._watch.require_finite_parameters(self._trainer.model, step=step)
        except NonFiniteError:
            self.finish()
            raise
        if self._checkpoints:
            self._checkpoints.poll()
            if saves:
                self._checkpoints.save(self._trainer, steps_done=step + 1)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self._checkpoints:
            self._checkpoints.finish()

    def _resume(self, directory: Path) -> int:
        steps_done = resume(self._trainer, directory)
        _print(f"resumed from {directory}: {steps_done} of {self._config.steps} steps are done")
        return steps_done

    def _measured_step(self, step: int, *, shown: bool) -> None:
        start_s = time.perf_counter()
        try:
            metrics = self._trainer.train_step(step)
        except NonFiniteGradientsError as error:
            raise self._watch.error(str(error), step=step) from error
        row = self._row(metrics, time.perf_counter() - start_s)
        # JSON has no NaN or infinity: msgspec writes null for them.
        self._metrics_file.write(msgspec.json.encode(row) + b"\n")
        self._metrics_file.flush()
        if shown:
            _print(progress_line(row, steps=self._config.steps, device=self._device))
        self._watch.require_finite(metrics)
        self.loss = metrics.loss

    def _row(self, metrics: StepMetrics, duration_s: float) -> dict[str, int | float]:
        """One line of the metrics file; times and memory are those of this process."""
        data = self._config.data
        return {
            **asdict(metrics),
            "step_s": duration_s,
            "tokens_per_s": data.global_batch_size * data.seq_len / duration_s,
            "peak_memory_bytes": peak_memory_bytes(self._device),
        }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak allocated on a CUDA device; on the CPU, the peak resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


_GIB = 1024**3


def first_line(config: TrainerConfig, dims: ParallelDims, device: torch.device, *, outputs: str) -> str:
    """Return the size of the model, the ranks and their mesh, the device, the options that matter most, and outputs."""
    mesh = " x ".join(f"{name} {size}" for name, size in dims.mesh_shape().items())
    mesh += "".join(f", {name} {size}" for name, size in (("ep", dims.ep), ("cp", dims.cp)) if size > 1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return (
        f"{parameter_count(config):,} parameters, {_count(dims.world_size, 'rank')} ({mesh}) on {name}, precision "
        f"{config.precision}, reshard {config.reshard}, {_count(config.steps, 'step')}; {outputs}"
    )


def parameter_count(config: TrainerConfig) -> int:
    """Return the number of parameters of the full model; tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config.model).parameters())


def progress_line(row: Mapping[str, int | float], *, steps: int, device: torch.device) -> str:
    """Return the metrics of a step in words; `row` is a row of the metrics file."""
    memory = "device" if device.type == "cuda" else "RSS"
    return (
        f"step {row['step']:5d}/{steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.4f}  "
        f"{row['tokens_per_s']:,.0f} tokens/s  peak {row['peak_memory_bytes'] / _GIB:.2f} GiB {memory}"
    )


def last_line(config: TrainerConfig, *, trained: int, duration_s: float, loss: float, outputs: str) -> str:
    """Return the number of steps and seconds of a run, saving included, its final loss, and outputs.

    A run whose steps were all done before has trained none, and has no loss.
    """
    if not trained:
        return f"{_count(config.steps, 'step')} were done before: set steps to more to go on; {outputs}"
    tokens_per_s = trained * config.data.global_batch_size * config.data.seq_len / duration_s
    return (
        f"trained {_count(trained, 'step')} in {duration_s:.1f} s, {tokens_per_s:,.0f} tokens/s, "
        f"final loss {loss:.4f}; {outputs}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
