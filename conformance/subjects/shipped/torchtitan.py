"""torchtitan's `Trainer` with its Llama 3, and a `TrainSpec` for the parts that torchtitan lets its users replace.

Tried with torchtitan 0.2.2, which needs triton for its imports. https://github.com/pytorch/torchtitan
"""

import gc
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD
from torchtitan.components.loss import build_cross_entropy_loss, cross_entropy_loss
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools import utils
from torchtitan.tools.utils import NoColor
from torchtitan.train import Trainer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.decorated import SGD_OPTIONS
from conformance.subjects.own_loop import LoopConfig, own_loop
from conformance.subjects.protocol import Batch
from conformance.subjects.shipped.workload import DIM, LAYERS, SEQ_LEN, VOCAB_SIZE, shared_by_rank0, tokens_and_labels

NAME = "small"
ARGUMENTS = TransformerModelArgs(
    dim=DIM, n_layers=LAYERS, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, multiple_of=DIM, max_seq_len=SEQ_LEN
)


def llama() -> nn.Module:
    """Return a small Llama 3, initialised unless it is on the meta device."""
    model: Any = Transformer(ARGUMENTS)
    with torch.no_grad():
        model.init_weights()
    return model  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return torchtitan's summed loss."""
    summed: Tensor = cross_entropy_loss(model(batch["input_ids"]), batch["labels"])
    return summed


def refuses(cell: SubjectCell) -> str | None:
    """Return the reason for tied weights and for pinned memory."""
    if cell.tied:
        return "Llama 3 of torchtitan has no tied weights"
    if cell.offload:
        return "torchtitan offloads to pinned memory alone, which this adapter has not tried on an accelerator"
    return None


class Kept:
    """Metrics processor that keeps the loss and the norm of the last step, and measures no device."""

    def __init__(self, *_unused: Any) -> None:
        self.color = NoColor()
        self.device_memory_monitor = SimpleNamespace(
            device_name="", get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        )
        self.ntokens_since_last_log, self.data_loading_times = 0, list[float]()
        self.last: tuple[float, float] | None = None

    def should_log(self, _step: int) -> bool:
        """Return True: each step is logged."""
        return True

    def log(self, _step: int, loss: float, _max_loss: float, norm: float, **_unused: Any) -> None:
        """Keep loss and norm."""
        self.last = loss, norm


def parallelize(model: nn.Module, dims: ParallelDims, config: JobConfig) -> nn.Module:
    """Shard as torchtitan does, with a reduction that gloo has: it lacks PREMUL_SUM."""
    parallelize_llama(model, dims, config)
    for module in model.modules():
        if isinstance(module, FSDPModule) and utils.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)
    return model


def sgd(models: list[nn.Module], *_unused: Any) -> OptimizersContainer:
    """Return the suite's optimizer: torchtitan's own choice is between Adam and AdamW."""
    return OptimizersContainer(models, SGD, SGD_OPTIONS)


def constant(optimizers: OptimizersContainer, *_unused: Any) -> LRSchedulersContainer:
    """Return the schedule of a learning rate that stays."""
    return LRSchedulersContainer(optimizers, lambda _step: 1.0)


SPEC = TrainSpec(
    model_cls=Transformer,
    model_args={NAME: ARGUMENTS},
    parallelize_fn=parallelize,
    pipelining_fn=None,
    build_optimizers_fn=sgd,
    build_lr_schedulers_fn=constant,
    build_dataloader_fn=lambda **_unused: None,
    build_tokenizer_fn=None,
    build_loss_fn=build_cross_entropy_loss,
    build_metrics_processor_fn=Kept,
)
register_train_spec(NAME, SPEC)


@own_loop(
    model=llama,
    loss=loss,
    batch=tokens_and_labels,
    meshes=("dp2", "hsdp2x2", "dp2-tp2"),
    precisions=("fp32", "bf16"),
    meta=True,
    resumes=True,
    packages=("torchtitan",),
    refuses=refuses,
    shims=(
        "torchtitan.tools.utils.device_type, device_module = 'cpu', torch.cpu",
        "torchtitan.distributed.parallel_dims.device_type = 'cpu'",
    ),
)
def torchtitan(config: LoopConfig) -> Iterator[tuple[float, float] | None]:
    """Train by `Trainer.train_step`: torchtitan makes the model on the meta device, and loads weights if there are."""
    kind = config.device.type
    utils.device_type, utils.device_module = kind, getattr(torch, kind)
    parallel_dims.device_type = kind
    with tempfile.TemporaryDirectory() as own:
        trainer = Trainer(job_config(config, None if config.on_meta else saved_by_rank0(config.model(), own)))
        gc.enable()  # which torchtitan has switched off for the process
        trainer.checkpointer.load()
        dist.barrier()  # until all have read what rank 0 has written
    for micro_batches in config.steps:
        trainer.step += 1
        trainer.gradient_accumulation_steps = len(micro_batches)
        trainer.train_step(iter(pairs(micro_batches)))
        trainer.checkpointer.save(trainer.step)
        yield trainer.metrics_processor.last


def pairs(micro_batches: Sequence[Batch]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return micro-batches as torchtitan's data loader yields them."""
    return [({"input": batch["input_ids"]}, batch["labels"]) for batch in micro_batches]


def saved_by_rank0(model: nn.Module, directory: str) -> str:
    """Save a model's weights in rank 0's directory, and return that."""
    directory = shared_by_rank0(directory)
    if dist.get_rank() == 0:
        state_dict_saver.save(model.state_dict(), checkpoint_id=directory, no_dist=True)
    dist.barrier()
    return directory


def job_config(config: LoopConfig, initial: str | None) -> JobConfig:
    """Return torchtitan's configuration, which begins with the weights in the directory `initial`, or with its own."""
    job, shape = JobConfig(), config.shape
    job.model.name = job.model.flavor = NAME
    job.training.seq_len, job.training.max_norm = SEQ_LEN, config.max_norm
    job.training.mixed_precision_param = "bfloat16" if config.precision == "bf16" else "float32"
    job.parallelism.data_parallel_replicate_degree = shape.get("dp_replicate", 1)
    job.parallelism.data_parallel_shard_degree = shape["dp_shard"]
    job.parallelism.tensor_parallel_degree = shape.get("tp", 1)
    job.activation_checkpoint.mode = "none"
    folder = config.load_from or config.save_to
    job.checkpoint.enable, job.checkpoint.interval = bool(folder or initial), 1 if config.save_to else 1_000_000
    job.job.dump_folder = str(folder or Path(tempfile.gettempdir()) / "unused")
    job.checkpoint.initial_load_path = initial
    return job
