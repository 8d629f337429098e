"""Lines that a run prints on rank 0: the first, progress, and the last."""

from collections.abc import Mapping

import torch

from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims

_GIB = 1024**3


def first_line(config: TrainerConfig, dims: ParallelDims, device: torch.device, *, outputs: str) -> str:
    """Return the size of the model, the ranks and their mesh, the device, the options that matter most, and outputs."""
    mesh = " x ".join(f"{name} {size}" for name, size in dims.mesh_shape().items())
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
