"""Hugging Face Trainer over a model that transformers has sharded.

Tried with transformers 5.23.0 and accelerate 1.15.0. https://huggingface.co/docs/transformers/main/en/main_classes/trainer
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import Batch, LoopedRun, StepObserver
from conformance.subjects.shipped.accelerate import forget_state
from conformance.subjects.shipped.transformers import TransformersNative


class HuggingFaceTrainer(TransformersNative):
    """Llama that transformers loads and shards, and that `transformers.Trainer` trains."""

    name = "hf-trainer"
    packages = ("transformers", "accelerate")

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for tensor parallelism, and for resuming."""
        if "tp" in cell.shape:
            return "on the CPU the Trainer refuses tensor parallelism: ParallelismConfig wants an accelerator"
        if cell.resumed:
            return "the Trainer refuses to resume with a model that was sharded when it was loaded"
        return super().unsupported(cell)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> LoopedRun:
        """Load the model sharded, and make a Trainer and its optimizer."""
        forget_state()
        model = self.load_sharded(cell)
        return TrainerRun(model, self.make_optimizer(model.parameters()), cell.accumulation, max_norm)


class TrainerRun:
    """One rank that trains by `Trainer.train`, see `protocol.LoopedRun`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, accumulation: Sequence[int], max_norm: float) -> None:
        self.model, self.optimizer = model, optimizer
        self.data_rank = dist.get_rank()
        self._max_norm = max_norm
        self._accumulation = accumulation

    def train(self, steps: Sequence[Sequence[Batch]], observer: StepObserver) -> list[float]:
        """Train on all micro-batches; returns the losses that the Trainer logs."""
        most, epochs = max(self._accumulation), epochs_of(steps)
        with tempfile.TemporaryDirectory() as directory:
            arguments = TrainingArguments(
                output_dir=directory,
                use_cpu=True,
                max_steps=len(steps),
                gradient_accumulation_steps=most,
                max_grad_norm=self._max_norm,
                lr_scheduler_type="constant",
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            told = Told(observer)
            trainer = ObservedTrainer(epochs, told, self.model, arguments, optimizer=self.optimizer)
            trainer.train()
        return told.losses


def epochs_of(steps: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
    """Return the micro-batches by epoch: the Trainer accumulates fewer than it is told at the end of an epoch alone."""
    epochs: list[list[Batch]] = []
    most, ended = max(map(len, steps)), True
    for step in steps:
        if ended:
            epochs.append([])
        epochs[-1] += step
        ended = len(step) < most
    return epochs


class Epochs(IterableDataset[Batch]):
    """Micro-batches as the Trainer reads them: those of the next epoch each time."""

    def __init__(self, epochs: Sequence[Sequence[Batch]]) -> None:
        self._epochs, self._read = epochs, 0

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __iter__(self) -> Iterator[Batch]:
        self._read += 1
        return iter(self._epochs[self._read - 1])


class Told(TrainerCallback):  # type: ignore[misc]
    """Callback that tells the observer where the Trainer is, and keeps the losses that it logs."""

    def __init__(self, observer: StepObserver) -> None:
        self.observer = observer
        self.losses: list[float] = []

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Tell that the optimizer is about to step."""
        self.observer.phase("optimizer", step=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Tell that the step is over."""
        self.observer.phase("idle", step=state.global_step - 1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **_kwargs: Any,
    ) -> None:
        """Keep the loss of a step."""
        if logs is not None and "loss" in logs:
            self.losses.append(logs["loss"])


class ObservedTrainer(Trainer):  # type: ignore[misc]
    """Trainer that tells the observer of its phases; what it computes is left alone."""

    def __init__(
        self,
        epochs: Sequence[Sequence[Batch]],
        told: Told,
        model: nn.Module,
        arguments: TrainingArguments,
        *,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(model, arguments, optimizers=(optimizer, None), callbacks=[told])
        self._epochs, self._told = epochs, told
        self._clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._observed_clip

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Return the micro-batches of this rank, each with labels that are shifted already."""
        epochs = [[{**batch, "shift_labels": batch["labels"]} for batch in epoch] for epoch in self._epochs]
        return DataLoader(Epochs(epochs), batch_size=None)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss between two phases."""
        self._told.observer.phase("forward", step=self.state.global_step)
        loss = super().compute_loss(*args, **kwargs)
        self._told.observer.phase("backward", step=self.state.global_step)
        return loss

    def _observed_clip(self, *args: Any, **kwargs: Any) -> Tensor:
        step, observer = self.state.global_step, self._told.observer
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm: Tensor = self._clip(*args, **kwargs)
        observer.clipped(self.model, norm=norm, step=step)
        return norm
