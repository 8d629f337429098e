"""Hugging Face Trainer: over a model that transformers has sharded, and with its own FSDP2.

Tried with transformers 5.23.0 and accelerate 1.15.0. https://huggingface.co/docs/transformers/main/en/main_classes/trainer
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

from conformance.subjects.cells import SubjectCell
from conformance.subjects.own_loop import LoopConfig, own_loop
from conformance.subjects.protocol import Batch
from conformance.subjects.shipped.accelerate import NO_ACCELERATOR, SHIM, apply_shim, forget_state
from conformance.subjects.shipped.transformers import TransformersNative, pretrained
from conformance.subjects.shipped.workload import shared_by_rank0, tokens_and_labels

LLAMA = TransformersNative()


def shifted(generator: torch.Generator) -> Batch:
    """Return a micro-batch whose labels are shifted already."""
    batch = tokens_and_labels(generator)
    return {**batch, "shift_labels": batch["labels"]}


def refuses(cell: SubjectCell) -> str | None:
    """Return the reason for tensor parallelism, and for resuming, of a model that transformers has sharded."""
    if cell.device != "cpu":
        return NO_ACCELERATOR
    if "tp" in cell.shape:
        return "on the CPU the Trainer refuses tensor parallelism: ParallelismConfig wants an accelerator"
    if cell.resumed:
        return "the Trainer refuses to resume with a model that was sharded when it was loaded"
    return LLAMA.unsupported(cell)


def refuses_with_fsdp(cell: SubjectCell) -> str | None:
    """Return the reason for meshes of two dimensions, and for the limits of `transformers`."""
    if cell.device != "cpu":
        return NO_ACCELERATOR
    return "the Trainer's own FSDP has one dimension" if len(cell.shape) > 1 else LLAMA.unsupported(cell)


judged = partial(
    own_loop,
    model=partial(LLAMA.model, tied=False),
    tied_model=partial(LLAMA.model, tied=True),
    loss=LLAMA.loss,
    batch=shifted,
    precisions=("fp32", "bf16"),
    packages=("transformers", "accelerate"),
)


@judged(meshes=("dp2", "hsdp2x2"), refuses=refuses)
def hf_trainer(config: LoopConfig) -> list[Mapping[str, float]]:
    """Train a model that transformers loads and shards."""
    forget_state()
    return trained(config, loaded(config), arguments_for(config))


def loaded(config: LoopConfig) -> nn.Module:
    """Return the model as transformers loads and shards it; the full one ends with this function."""
    with tempfile.TemporaryDirectory() as own:
        directory = shared_by_rank0(own)
        full: Any = config.model()
        full.save_pretrained(directory)
        dist.barrier()  # until rank 0 has written
        model = pretrained(directory, config)
        dist.barrier()  # until all have read
    return model


@judged(resumes=True, refuses=refuses_with_fsdp, shims=(f"{SHIM}, after TrainingArguments",))
def hf_trainer_fsdp(config: LoopConfig) -> list[Mapping[str, float]]:
    """Train a model that the Trainer shards by itself, with `fsdp=True`."""
    forget_state()
    fsdp_config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    arguments = arguments_for(config, bf16=config.precision == "bf16", fsdp=True, fsdp_config=fsdp_config)
    _ = arguments.device  # makes accelerate's state anew
    apply_shim()
    return trained(config, config.model(), arguments)


def arguments_for(config: LoopConfig, **options: Any) -> TrainingArguments:
    """Return arguments with which the Trainer logs each step, and saves as the configuration says."""
    return TrainingArguments(
        output_dir=str(config.save_to or Path(tempfile.gettempdir()) / "unused"),
        use_cpu=True,
        gradient_accumulation_steps=config.accumulation,
        max_grad_norm=config.max_norm,
        lr_scheduler_type="constant",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps" if config.save_to else "no",
        save_steps=1,
        ignore_data_skip=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def trained(config: LoopConfig, model: nn.Module, arguments: TrainingArguments) -> list[Mapping[str, float]]:
    """Train on all steps, after those of a checkpoint; returns the Trainer's log of each."""
    steps, checkpoint = [*config.steps], next(config.load_from.iterdir()) if config.load_from else None
    done = int(checkpoint.name.partition("-")[2]) if checkpoint else 0
    arguments.max_steps = done + len(steps)
    trainer = TrainerWithBatches(model, arguments, config=config, steps=steps)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > done]


class TrainerWithBatches(Trainer):  # type: ignore[misc]
    """Trainer with the optimizer and the micro-batches of a configuration."""

    def __init__(
        self, model: nn.Module, arguments: TrainingArguments, *, config: LoopConfig, steps: Sequence[Sequence[Batch]]
    ) -> None:
        super().__init__(model, arguments)
        self._config, self._micro_batches = config, Epochs(steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer when the Trainer does: with its own FSDP it takes none that exists."""
        optimizer: Optimizer = self._config.optimizer((self.model if model is None else model).parameters())
        self.optimizer = optimizer
        return optimizer

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Return the micro-batches of this rank."""
        return DataLoader(self._micro_batches, batch_size=None)


class Epochs(IterableDataset[Batch]):
    """Micro-batches as the Trainer reads them: those of the next epoch each time.

    The Trainer accumulates fewer than it is told at the end of an epoch alone.
    """

    def __init__(self, steps: Sequence[Sequence[Batch]]) -> None:
        most = max(map(len, steps))
        self._epochs: list[list[Batch]] = [[]]
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            self._epochs[-1] += step
            if len(step) < most and following is not None:
                self._epochs.append([])
        self._read = 0

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __iter__(self) -> Iterator[Batch]:
        self._read += 1
        return iter(self._epochs[self._read - 1])
