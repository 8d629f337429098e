"""Pipeline parallelism: the layers of each rank's stages, and the passage of a step's micro-batches through them.

Schedules are those of torch.distributed.pipelining (https://docs.pytorch.org/docs/stable/distributed.pipelining.html).
They reduce gradients once, after the last micro-batch of a stage.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from reference_trainer.checks import require
from reference_trainer.config import ScheduleName, TrainerConfig
from reference_trainer.loss import full_loss
from reference_trainer.mesh import degree
from reference_trainer.mixed_precision import torch_dtype
from reference_trainer.model import StageLayers, Transformer
from reference_trainer.observer import Observer, StageAction
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.precision import PRECISIONS


@dataclass(frozen=True)
class _Schedule:
    """Schedule of torch: its class in torch.distributed.pipelining, and how it places stages on ranks."""

    name: str
    placement: Literal["one", "loop", "v"]
    """`one` stage on each rank; `loop`: stage i on rank i modulo their number; `v`: there and back again."""


_SCHEDULES: dict[ScheduleName, _Schedule] = {
    "gpipe": _Schedule("ScheduleGPipe", "one"),
    "1f1b": _Schedule("Schedule1F1B", "one"),
    "interleaved-1f1b": _Schedule("ScheduleInterleaved1F1B", "loop"),
    "looped-bfs": _Schedule("ScheduleLoopedBFS", "loop"),
    "interleaved-zero-bubble": _Schedule("ScheduleInterleavedZeroBubble", "loop"),
    "zbv-zero-bubble": _Schedule("ScheduleZBVZeroBubble", "v"),
}
_BACKWARD_OF_INPUTS = ("interleaved-zero-bubble", "zbv-zero-bubble")
"""Schedules that compute gradients of activations and of parameters apart."""


def stages_per_rank(config: TrainerConfig) -> int:
    """Return the number of stages of each rank."""
    default = 1 if _SCHEDULES[config.pipeline.schedule].placement == "one" else 2
    return config.pipeline.stages_per_rank or default


def stage_layers(config: TrainerConfig, pp: int) -> list[StageLayers]:
    """Return the layers of each stage of a pipeline over `pp` ranks, first to last."""
    count, layers = pp * stages_per_rank(config), config.model.n_layers
    even = [layers * index // count for index in range(1, count)]
    bounds = [0, *(config.pipeline.cuts or even), layers]
    return [
        StageLayers(range(bounds[index], bounds[index + 1]), first=index == 0, last=index == count - 1)
        for index in range(count)
    ]


def stages_of_rank(config: TrainerConfig, pp: int, *, pp_rank: int) -> list[int]:
    """Return the numbers of the stages that a rank of the pipeline has, in the order of the model."""
    count = stages_per_rank(config)
    if _SCHEDULES[config.pipeline.schedule].placement == "v":
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + pp * index for index in range(count)]


def held_stages(config: TrainerConfig, dims: ParallelDims, mesh: DeviceMesh) -> list[StageLayers] | None:
    """Return the stages that this rank holds; None without a pipeline."""
    if dims.pp == 1:
        return None
    stages = stage_layers(config, dims.pp)
    return [stages[index] for index in stages_of_rank(config, dims.pp, pp_rank=mesh.get_local_rank("pp"))]


def check_pipeline(config: TrainerConfig, dims: ParallelDims) -> None:
    """Raise UsageError for a pipeline that cannot be cut or scheduled, and for options in conflict with a pipeline."""
    options = config.pipeline
    if dims.pp == 1:
        require(options == type(options)(), "pipeline has no effect with mesh.pp 1: set mesh.pp, or leave it out")
        return
    schedule, per_rank = _SCHEDULES[options.schedule], stages_per_rank(config)
    require(
        hasattr(pipelining, schedule.name),
        f"pipeline.schedule {options.schedule}: torch {torch.__version__} has no torch.distributed.pipelining."
        f"{schedule.name}; use another schedule, or another torch",
    )
    allowed = {"one": per_rank == 1, "loop": per_rank >= 2, "v": per_rank == 2}
    require(
        allowed[schedule.placement],
        f"pipeline.stages_per_rank {per_rank} with schedule {options.schedule}, which needs "
        f"{ {'one': 'one stage', 'loop': 'two or more stages', 'v': 'two stages'}[schedule.placement] } per rank",
    )
    stages = dims.pp * per_rank
    require(
        config.model.n_layers >= stages,
        f"a pipeline of mesh.pp {dims.pp} x {per_rank} stages per rank needs as many layers, but model.n_layers is "
        f"{config.model.n_layers}: use fewer stages",
    )
    cuts = options.cuts
    require(
        cuts is None or (len(cuts) == stages - 1 and (not cuts or cuts[-1] < config.model.n_layers)),
        f"pipeline.cuts {list(cuts or ())}: {stages} stages of {config.model.n_layers} layers have {stages - 1} cuts "
        f"between 1 and {config.model.n_layers - 1}",
    )
    require(
        config.accumulation >= dims.pp,
        f"a pipeline over mesh.pp {dims.pp} ranks needs at least as many micro-batches, but accumulation is "
        f"{config.accumulation}: set accumulation={dims.pp} or more",
    )
    rounds = max(1, config.accumulation // dims.pp)
    require(
        schedule.placement != "loop" or config.accumulation % rounds == 0,
        f"accumulation {config.accumulation} with schedule {options.schedule}: its micro-batches pass in rounds of "
        f"mesh.pp {dims.pp}; use a multiple",
    )
    _check_goes_with_pipeline(config)


def _check_goes_with_pipeline(config: TrainerConfig) -> None:
    name = f"a pipeline with schedule {config.pipeline.schedule}"
    require(
        not config.model.tied_embeddings,
        f"{name} and model.tied_embeddings: embedding and output are on different stages, each with a gradient of its "
        "own for the shared weight; set model.tied_embeddings=false",
    )
    require(
        config.grouping == "blocks-and-ends",
        f"{name} and grouping {config.grouping}: embedding and output are on different stages; leave grouping out",
    )
    require(
        config.checkpoint_reader == "each-rank",
        f"{name} and checkpoint_reader {config.checkpoint_reader}: torch broadcasts a state dict to ranks "
        "that hold the same parameters; use checkpoint_reader each-rank",
    )
    require(
        config.gradient_sync == "each",
        f"{name} and gradient_sync {config.gradient_sync}: gradients are reduced once, after the last micro-batch, in "
        "any case; leave gradient_sync out",
    )
    require(config.implementation == "fsdp2", f"{name} and implementation {config.implementation}: use fsdp2")
    for option in ("forward_prefetch", "backward_prefetch"):
        require(
            not getattr(config, option),
            f"{name} and {option} {getattr(config, option)}: the schedule enters groups in an order of its own; set "
            f"{option}=0",
        )
    require(
        config.reshard in ("default", "never") or config.pipeline.schedule not in _BACKWARD_OF_INPUTS,
        f"{name} and reshard {config.reshard}: torch loses gradients of groups that are resharded after forward, see "
        "findings/zero_bubble_loses_gradients.py; use reshard never, or another schedule",
    )
    require(
        config.compile == "none" or config.pipeline.schedule not in _BACKWARD_OF_INPUTS,
        f"{name} and compile {config.compile}: a compiled backward computes all gradients at once; use compile "
        "none, or another schedule",
    )
    require(
        config.activation_checkpointing == "none" or config.pipeline.schedule not in _BACKWARD_OF_INPUTS,
        f"{name} and activation_checkpointing {config.activation_checkpointing}: each of the two parts of backward "
        "would recompute activations; use activation_checkpointing none, or another schedule",
    )


class _ObservedStage(pipelining.PipelineStage):
    """Stage that reports its actions to the observer."""

    observe: Callable[[StageAction, int], None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the activations of a micro-batch."""
        self.observe("forward", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of a micro-batch, or those of its input alone."""
        self.observe("backward" if kwargs.get("full_backward", True) else "backward-input", bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of parameters that `backward-input` has postponed."""
        self.observe("backward-weight", bwd_chunk_id)
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipeline:
    """Stages of this rank, and the schedule that runs micro-batches through them.

    On the rank that has the last stage, `loss` maps logits and labels of a micro-batch to its summed loss, a scalar.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainerConfig,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        observer: Observer,
    ) -> None:
        self._model, self._device, self._observer = model, device, observer
        self._loss = loss
        self._start_of_backward: Callable[[Tensor], Tensor] | None = None
        self._losses: list[Tensor] = []
        """Losses of the micro-batches so far, while a step runs."""
        pp, pp_rank = degree(mesh, "pp"), mesh.get_local_rank("pp")
        dp = degree(mesh, "dp_replicate") * degree(mesh, "dp_shard")
        samples = config.data.global_batch_size // dp // config.accumulation
        sequence = config.data.seq_len // (degree(mesh, "tp") if config.sequence_parallel else 1)
        compute = torch_dtype(PRECISIONS[config.precision].compute)
        tokens = torch.empty(samples, config.data.seq_len, dtype=torch.int64, device="meta")
        activations = torch.empty(samples, sequence, config.model.dim, dtype=compute, device="meta", requires_grad=True)
        logits = torch.empty(samples, config.data.seq_len, config.model.vocab_size, dtype=compute, device="meta")
        count = pp * stages_per_rank(config)
        self._step = 0
        stages = []
        for index, module in zip(stages_of_rank(config, pp, pp_rank=pp_rank), model.stages, strict=True):
            stage = _ObservedStage(
                module,
                index,
                count,
                device,
                # Given, so that torch does not run the model to learn them.
                input_args=tokens if index == 0 else activations,
                output_args=logits if index == count - 1 else activations,
                group=mesh.get_group("pp"),
            )
            stage.observe = partial(self._observe, index)
            stages.append(stage)
        schedule = _SCHEDULES[config.pipeline.schedule]
        self._schedule = getattr(pipelining, schedule.name)(
            stages[0] if schedule.placement == "one" else stages,
            n_microbatches=config.accumulation,
            loss_fn=self._loss_of_micro_batch,
            scale_grads=False,
        )
        # torch 2.13 can drop the logits, which are not read.
        takes = inspect.signature(self._schedule.step).parameters
        self._options = {"return_outputs": False} if "return_outputs" in takes else {}

    def _observe(self, stage: int, action: StageAction, micro_batch: int) -> None:
        self._observer.phase("forward" if action == "forward" else "backward", step=self._step)
        self._observer.stage_action(action, stage=stage, micro_batch=micro_batch, step=self._step)

    def _loss_of_micro_batch(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss_sum = self._loss(logits, labels)
        self._losses.append(full_loss(loss_sum.detach()))
        if self._start_of_backward is None:
            raise RuntimeError("a stage computes a loss outside of `run`")
        return self._start_of_backward(loss_sum)

    def run(
        self, micro_batches: list[tuple[Tensor, Tensor]], *, start_of_backward: Callable[[Tensor], Tensor], step: int
    ) -> Tensor | float:
        """Accumulate and reduce the gradients of a step's micro-batches; returns their summed loss, a detached scalar.

        Each has inputs and labels, int64 of shape (samples, seq_len). `start_of_backward` maps the summed loss of a
        micro-batch to the scalar from which its backward starts. The loss is 0.0 without the last stage.
        """
        self._start_of_backward, self._step = start_of_backward, step
        inputs, labels = (torch.cat(tensors).to(self._device) for tensors in zip(*micro_batches, strict=True))
        first = (inputs,) if self._model.is_first else ()
        last = {"target": labels, "losses": []} if self._model.is_last else {}
        self._schedule.step(*first, **last, **self._options)
        loss_sum = sum(self._losses)
        self._losses.clear()
        return loss_sum


def gather_over_stages(value: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Return a plain scalar of each rank of the pipeline, in their order; the scalar itself without a pipeline."""
    if "pp" not in (mesh.mesh_dim_names or ()):
        return [value]
    values = [torch.empty_like(value) for _ in range(degree(mesh, "pp"))]
    dist.all_gather(values, value, group=mesh.get_group("pp"))
    return values
