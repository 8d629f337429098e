"""Hugging Face Trainer: over a model that transformers has sharded, and with its own FSDP2.

Tried with transformers 5.23.0 and accelerate 1.15.0. https://huggingface.co/docs/transformers/main/en/main_classes/trainer
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import Batch, LoopedRun, StepObserver
from conformance.subjects.shipped.accelerate import NO_ACCELERATOR, SHIM, apply_shim, forget_state
from conformance.subjects.shipped.transformers import TransformersNative, shared_by_rank0


class HuggingFaceTrainer(TransformersNative):
    """Llama that transformers loads and shards, and that `transformers.Trainer` trains."""

    name = "hf-trainer"
    packages = ("transformers", "accelerate")

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for tensor parallelism, and for resuming."""
        if cell.device != "cpu":
            return NO_ACCELERATOR
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


class HuggingFaceTrainerWithFsdp(TransformersNative):
    """Llama that `transformers.Trainer` shards by itself when it begins to train, with `fsdp=True`."""

    name = "hf-trainer-fsdp"
    packages = ("transformers", "accelerate")
    shims: Sequence[str] = (f"{SHIM}, after TrainingArguments",)

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for meshes of two dimensions, and for the limits of `transformers`."""
        if cell.device != "cpu":
            return NO_ACCELERATOR
        if len(cell.shape) > 1:
            return "the Trainer's own FSDP has one dimension"
        return super().unsupported(cell)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> LoopedRun:
        """Make the model, whole."""
        forget_state()
        return FsdpTrainerRun(self, cell, max_norm)


class TrainerRun:
    """One rank that trains by `Trainer.train`, see `protocol.LoopedRun`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, accumulation: Sequence[int], max_norm: float) -> None:
        self.model, self.optimizer = model, optimizer
        self.data_rank = dist.get_rank()
        self._max_norm = max_norm
        self._accumulation = accumulation

    def train(self, steps: Sequence[Sequence[Batch]], observer: StepObserver) -> list[float]:
        """Train on all micro-batches; returns the losses that the Trainer logs."""
        with tempfile.TemporaryDirectory() as directory:
            arguments = arguments_for(
                directory, steps=len(steps), accumulation=self._accumulation, max_norm=self._max_norm
            )
            told = Told(observer)
            trainer = ObservedTrainer(epochs_of(steps), told, self.model, arguments, optimizer=self.optimizer)
            trainer.train()
        return told.losses


class FsdpTrainerRun:
    """One rank that trains by `Trainer.train`, which shards the model: a `SelfShardingRun` that is `Resumable`."""

    shards_in_train = True

    def __init__(self, subject: HuggingFaceTrainerWithFsdp, cell: SubjectCell, max_norm: float) -> None:
        self.model = subject.model(tied=cell.tied)
        self.optimizer = subject.make_optimizer(self.model.parameters())  # until the Trainer makes its own
        self.data_rank = dist.get_rank()
        self._subject, self._cell, self._max_norm = subject, cell, max_norm
        self._own = tempfile.TemporaryDirectory()
        self._checkpoint: Path | None = None
        self._steps_done = 0

    def begun(self, model: nn.Module, wrapped: Any) -> None:
        """Take the Trainer's parallel model, and the optimizer of torch that accelerate has wrapped."""
        self.model, self.optimizer = model, wrapped.optimizer

    def save(self, directory: Path) -> None:
        """Copy the checkpoint that the Trainer has saved after its last step."""
        if dist.get_rank() == 0:
            checkpoint = Path(self._own.name) / f"checkpoint-{self._steps_done}"
            shutil.copytree(checkpoint, directory / checkpoint.name)

    def load(self, directory: Path) -> None:
        """Let the next `train` resume from the copy of `save`."""
        (self._checkpoint,) = directory.iterdir()
        self._steps_done = int(self._checkpoint.name.partition("-")[2])

    def train(self, steps: Sequence[Sequence[Batch]], observer: StepObserver) -> list[float]:
        """Train on all micro-batches, after those of a checkpoint; returns the losses that the Trainer logs."""
        self._steps_done += len(steps)
        arguments = arguments_for(
            shared_by_rank0(self._own.name),
            steps=self._steps_done,
            accumulation=self._cell.accumulation,
            max_norm=self._max_norm,
            bf16=self._cell.precision == "bf16",
            save_strategy="steps" if self._cell.resumed else "no",
            fsdp=True,
            fsdp_config={
                "version": 2,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        )
        told = Told(observer, begun=self.begun)
        _ = arguments.device  # makes accelerate's state anew
        apply_shim()
        trainer = ObservedTrainer(
            epochs_of(steps), told, self.model, arguments, make_optimizer=self._subject.make_optimizer
        )
        trainer.train(resume_from_checkpoint=str(self._checkpoint) if self._checkpoint else None)
        return told.losses


def arguments_for(
    directory: str, *, steps: int, accumulation: Sequence[int], max_norm: float, **options: Any
) -> TrainingArguments:
    """Return arguments for a run that ends after so many steps, in which the Trainer logs each."""
    return TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        max_steps=steps,
        gradient_accumulation_steps=max(accumulation),
        max_grad_norm=max_norm,
        lr_scheduler_type="constant",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=1,
        ignore_data_skip=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )


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

    def __init__(self, observer: StepObserver, *, begun: Callable[[nn.Module, Any], None] | None = None) -> None:
        self.observer = observer
        self.losses: list[float] = []
        self._begun = begun

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_kwargs: Any,
    ) -> None:
        """Tell that the Trainer has made the model parallel, if it does that itself."""
        if self._begun is not None and model is not None:
            self._begun(model, optimizer)
            self.observer.built()

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
    """Trainer that tells the observer of its phases, and computes as before."""

    def __init__(
        self,
        epochs: Sequence[Sequence[Batch]],
        told: Told,
        model: nn.Module,
        arguments: TrainingArguments,
        *,
        optimizer: Optimizer | None = None,
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    ) -> None:
        super().__init__(model, arguments, optimizers=(optimizer, None), callbacks=[told])
        self._epochs, self._told, self._make_optimizer = epochs, told, make_optimizer
        self._clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._observed_clip

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the suite's optimizer where the Trainer would make its own: with FSDP it takes none that exists."""
        if self._make_optimizer is None:
            made: Optimizer = super().create_optimizer(model)
            return made
        self.optimizer = self._make_optimizer((model or self.model).parameters())
        return self.optimizer

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
