"""torchtune's recipe `full_finetune_distributed`: its model on the meta device, its loading, sharding and loop.

Tried with torchtune 0.6.1, which imports names that torchao had until 0.15.0. https://github.com/pytorch/torchtune
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchtune import training
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

from conformance.importing import load_file
from conformance.subjects.cells import SubjectCell
from conformance.subjects.own_loop import LoopConfig, own_loop
from conformance.subjects.protocol import Batch
from conformance.subjects.shipped.workload import IGNORED, SAMPLES, tokens_and_labels

SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 16,
}
CHUNKS = 4
RECIPES = load_file(Path(training.__file__).parents[2] / "recipes" / "full_finetune_distributed.py")
"""Module of the recipe, which torchtune installs as a file that is not to be imported."""


def llama() -> nn.Module:
    """Return a small Llama 3 whose output comes in chunks, as the recipe's loss takes it."""
    model = llama3(**SIZES)
    model.set_num_output_chunks(CHUNKS)
    return model  # type: ignore[no-any-return]


def instruction(generator: torch.Generator) -> Batch:
    """Return tokens, and labels that the recipe shifts; the first, which predicts nothing, is masked as in a prompt."""
    batch = tokens_and_labels(generator)
    batch["labels"][:, 0] = IGNORED
    return {"tokens": batch["input_ids"], "labels": batch["labels"]}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed cross entropy of each next label that counts."""
    logits = torch.cat(model(tokens=batch["tokens"]), dim=1)[:, :-1]
    labels = batch["labels"][:, 1:]
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def refuses(cell: SubjectCell) -> str | None:
    """Return the reason for tensor parallelism, and for other devices than processors."""
    if cell.device != "cpu":
        return "torchtune has names for the accelerators that it knows: this adapter runs it on processors"
    return "torchtune leaves norms off the tensor-parallel mesh" if "tp" in cell.shape else None


class Recipe(RECIPES.FullFinetuneRecipeDistributed):  # type: ignore[name-defined, misc]
    """Recipe whose attributes are those of a configuration of the suite, in place of a file."""

    def __init__(self, config: LoopConfig) -> None:
        self._device, self._dtype, self._compile = config.device, torch.float32, False
        self.world_size = self.data_parallel_dim = dist.get_world_size()
        self.tensor_parallel_dim = 1
        self._is_rank_zero = False  # which would measure the memory of a GPU
        self._model = self._setup_model(
            OmegaConf.create({"_component_": "torchtune.models.llama3.llama3", **SIZES}),
            enable_activation_checkpointing=False,
            enable_activation_offloading=False,
            fsdp_cpu_offload=False,
            reshard_after_forward=True,
            model_state_dict=config.model().state_dict(),
        )
        self._is_rank_zero = True  # all ranks log
        self._loss_fn = CEWithChunkedOutputLoss(CHUNKS)
        self._model.set_num_output_chunks(CHUNKS)
        self.activations_handling_ctx = nullcontext()
        self.ignore_labels_cache = torch.full((SAMPLES, 1), IGNORED, device=config.device)
        self._optimizer, self._optimizer_in_bwd = config.optimizer(self._model.parameters()), False
        self._clip_grad_norm, self._gradient_accumulation_steps = config.max_norm, config.accumulation
        self._lr_scheduler = None
        self._profiler, self.profiler_profile_memory = training.DummyProfiler(), False
        self.seed = self.epochs_run = self.global_step = 0
        self.total_epochs, self.max_steps_per_epoch = 1, -1
        self._dataloader = Batches(config.loader)
        self._steps_per_epoch = len(self._dataloader)
        self._log_every_n_steps, self._log_peak_memory_stats = 1, False
        self.logged: list[Mapping[str, float]] = []
        self._metric_logger = SimpleNamespace(log_dict=lambda logs, step: self.logged.append(logs))
        self._checkpoint_client = SimpleNamespace(save_checkpoint=lambda **_unused: None)


class Batches:
    """Loader of copies of the suite's micro-batches, of which the recipe takes the labels out."""

    sampler = SimpleNamespace(set_epoch=lambda _epoch: None)

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return ({**batch} for batch in self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing that is kept."""
        return {}


@own_loop(
    model=llama,
    loss=loss,
    batch=instruction,
    accumulation="even",
    packages=["torchtune", "torchao"],
    refuses=refuses,
    shims=["torchtune.training.cleanup_before_training = gc.collect"],
)
def torchtune(config: LoopConfig) -> list[Mapping[str, float]]:
    """Train by the recipe's own `train`."""
    training.cleanup_before_training = gc.collect  # its own empties a cache that processors lack
    recipe = Recipe(config)
    recipe.train()
    return recipe.logged
