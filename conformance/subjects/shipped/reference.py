"""The suite's reference trainer as a subject: judged by the same eyes as the trainers of others."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import Batch, Run, StepObserver
from conformance.subjects.shipped.workload import DIM, LAYERS, SEQ_LEN, VOCAB_SIZE, OfDecoder, token_loss
from reference_trainer.checkpoint import Checkpoints, resume
from reference_trainer.config import DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from reference_trainer.data import Batches
from reference_trainer.init_weights import init_weights
from reference_trainer.mesh import dp_rank
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase
from reference_trainer.train import Trainer


def _model(*, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        dim=DIM,
        n_layers=LAYERS,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=2 * DIM,
        max_seq_len=SEQ_LEN,
        norm_std=0.1,
        tied_embeddings=tied,
    )


class ReferenceTrainer(OfDecoder):
    """`reference_trainer.Trainer` on its own model, with the suite's batches."""

    name = "reference"
    shims: Sequence[str] = ()

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return None: the reference trainer runs every cell."""
        return None

    def model(self, *, tied: bool) -> nn.Module:
        """Return the Transformer, initialised."""
        model = Transformer(_model(tied=tied))
        init_weights(model, seed=0)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss."""
        return token_loss(model(batch["input_ids"]), batch["labels"])

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run:
        """Build a Trainer with the options of the cell; its optimizer is the one of `decorated.sgd`."""
        config = TrainerConfig(
            model=_model(tied=cell.tied),
            mesh=MeshConfig(**cell.shape),
            data=DataConfig(seq_len=SEQ_LEN),
            optimizer=OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, max_norm=max_norm),
            precision="bf16-mp" if cell.precision == "bf16" else "fp32",
            init=cell.init,
            offload="cpu" if cell.offload else "none",
            pin_memory=cell.offload and device.type != "cpu",
        )
        return ReferenceRun(Trainer(config, device=device, world_size=dist.get_world_size()))


class ReferenceRun:
    """One rank that trains by `Trainer.train_step`, see `protocol.Run`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def model(self) -> nn.Module:
        """Parallel model."""
        return self._trainer.model

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the trainer."""
        return self._trainer.optimizer

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return dp_rank(self._trainer.mesh)

    def save(self, directory: Path) -> None:
        """Save the trainer's state."""
        Checkpoints(directory).save(self._trainer, steps_done=1)

    def load(self, directory: Path) -> None:
        """Load it."""
        resume(self._trainer, directory)

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float:
        """Train a step on these micro-batches in place of the trainer's own data."""
        self._trainer.batches = Given(micro_batches)
        self._trainer.observer = Told(observer)
        return self._trainer.train_step(step).loss


class Given(Batches):
    """Micro-batches of a step, made by the suite."""

    def __init__(self, micro_batches: Sequence[Batch]) -> None:
        self._micro_batches = micro_batches

    def micro_batches(self, step: int, *, dp_rank: int, dp_size: int, accumulation: int) -> list[tuple[Tensor, Tensor]]:
        """Return these micro-batches in place of the trainer's own."""
        return [(batch["input_ids"], batch["labels"]) for batch in self._micro_batches]


class Told(Observer):
    """Observer of the trainer that tells the suite's."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer

    def phase(self, name: Phase, *, step: int) -> None:
        """Tell the phase."""
        self._observer.phase(name, step=step)

    def gradients(self, model: nn.Module, *, step: int) -> None:
        """Tell that gradients are reduced."""
        self._observer.gradients(model, step=step)

    def clipped(self, model: nn.Module, *, norm: Tensor, step: int) -> None:
        """Tell that gradients are clipped."""
        self._observer.clipped(model, norm=norm, step=step)
