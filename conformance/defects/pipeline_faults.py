"""Faults of pipelines: micro-batches, their order and activations, resharding, and what stages must agree on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule

from conformance.defects.clipping_faults import finite_check
from conformance.defects.injection import Defect, replaced_call

_PIPELINING = "torch.distributed.pipelining"
_DOCS = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
_PLAIN = "id = pp2-dp2-fp32-default-meta-cut-acc4"
_PLAIN_OR_GPIPE = "id in (pp2-dp2-fp32-default-meta-cut-acc4, pp2-dp2-fp32-default-meta-cut-acc4-gpipe)"
_TWO_STAGES = "id in (pp2-dp2-fp32-default-meta-cut-acc4-loopedbfs, pp2-dp2-fp32-default-meta-cut-acc4-zbvzerobubble)"

_HALVES = "id in (pp2-dp2-fp32-default-meta-cut-acc4-zbvzerobubble, pp2-dp2-bf16mp-default-meta-cut-acc4-zbvzerobubble)"


def loss_of_micro_batches(*, dropped: bool) -> AbstractContextManager[None]:
    """Let the first micro-batch of each step contribute nothing, or let it pass."""

    def loss(original: Callable[..., Tensor], stages: Any, *args: Any) -> Tensor:
        is_first = not stages._losses
        scalar = original(stages, *args)
        return scalar * 0.0 if dropped and is_first else scalar

    return replaced_call("reference_trainer.pipeline:Pipeline", "_loss_of_micro_batch", loss)


MICRO_BATCH_DROPPED = Defect(
    id="pipeline-micro-batch-dropped",
    title="one micro-batch of a pipeline does not contribute to the gradients",
    source="https://github.com/pytorch/pytorch/issues/164756",
    mechanism="its loss is multiplied by zero",
    laws=("PAR-1",),
    cells=_PLAIN,
    inject=partial(loss_of_micro_batches, dropped=True),
    inject_twin=partial(loss_of_micro_batches, dropped=False),
)


def schedule(name: str, *, becomes: str, **changes: object) -> AbstractContextManager[None]:
    """Let the trainer get another schedule than it asks for, or one with other options."""

    def build(_original: object, *args: Any, **kwargs: Any) -> Any:
        return built(*args, **kwargs | changes)

    built = getattr(pipelining, becomes)
    return replaced_call(_PIPELINING, name, build)


GRADIENTS_SCALED_TWICE = Defect(
    id="pipeline-gradients-scaled-twice",
    title="gradients of a summed loss are divided by the number of micro-batches",
    source=f"{_DOCS}#torch.distributed.pipelining.schedules.PipelineScheduleSingle",
    mechanism="`scale_grads` of the schedule is left at its default, which is for a loss that is a mean",
    laws=("PAR-1",),
    cells=_PLAIN,
    inject=partial(schedule, "Schedule1F1B", becomes="Schedule1F1B", scale_grads=True),
    inject_twin=partial(schedule, "Schedule1F1B", becomes="Schedule1F1B", scale_grads=False),
)
ALL_FORWARDS_FIRST = Defect(
    id="pipeline-all-forwards-first",
    title="a 1F1B pipeline runs all forwards first and holds all activations",
    source="https://arxiv.org/abs/2006.09503",
    mechanism="the schedule that is built is GPipe's",
    laws=("PP-1", "PP-2", "MEM-1"),
    cells=_PLAIN,
    inject=partial(schedule, "Schedule1F1B", becomes="ScheduleGPipe"),
    inject_twin=partial(schedule, "Schedule1F1B", becomes="Schedule1F1B"),
)


def gradient_sync(*, each: bool) -> AbstractContextManager[None]:
    """Let FSDP reduce the gradients of every micro-batch, or as the schedule says."""

    def set_sync(original: Callable[..., None], module: FSDPModule, requires: bool, **options: Any) -> None:
        original(module, requires or each, **options)

    return replaced_call("torch.distributed.fsdp:FSDPModule", "set_requires_gradient_sync", set_sync)


REDUCED_EACH_MICRO_BATCH = Defect(
    id="pipeline-reduced-each-micro-batch",
    title="a pipeline reduces the gradients of each micro-batch",
    source="https://github.com/pytorch/pytorch/pull/134052",
    mechanism="`set_requires_gradient_sync(False)` of the stage has no effect",
    laws=("PP-4", "RS-1", "MP-4"),
    cells=_PLAIN,
    inject=partial(gradient_sync, each=True),
    inject_twin=partial(gradient_sync, each=False),
)


def norms_of_stages(*, own: bool) -> AbstractContextManager[None]:
    """Let each stage clip by its own norm, or by those of all."""

    def gather(original: Callable[..., list[Tensor]], norm: Tensor, **options: Any) -> list[Tensor]:
        norms = original(norm, **options)
        return [norm] if own else norms

    return replaced_call("reference_trainer.train", "gather_over_stages", gather)


CLIPPED_BY_OWN_NORM = Defect(
    id="pipeline-clipped-by-own-norm",
    title="each stage of a pipeline clips by its own norm",
    source="https://github.com/pytorch/torchtitan/pull/649",
    mechanism="norms are not combined over the stages",
    laws=("PP-5", "CLIP-1", "PAR-5"),
    cells=_PLAIN,
    inject=partial(norms_of_stages, own=True),
    inject_twin=partial(norms_of_stages, own=False),
)


@contextmanager
def errors_of_stages(*, own: bool) -> Iterator[None]:
    """Raise an error if a stage's own norm is not finite, or if that of any stage is not."""
    with norms_of_stages(own=own), finite_check(agreed=not own):
        yield


ERROR_ON_ONE_STAGE = Defect(
    id="pipeline-error-on-one-stage",
    title="only the stage that holds a non-finite gradient raises an error",
    source="https://github.com/pytorch/torchtitan/pull/649",
    mechanism="error_if_nonfinite looks at the norm of the stage before norms are combined",
    laws=("CLIP-3",),
    cells=_PLAIN,
    inject=partial(errors_of_stages, own=True),
    inject_twin=partial(errors_of_stages, own=False),
)


@contextmanager
def graphs(*, kept: bool) -> Iterator[None]:
    """Keep the output of each micro-batch after its backward, with all activations of its graph, or nothing."""
    outputs: list[Any] = []

    def backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        outputs.extend([tensors] if kept else [])
        original(tensors, *args, **kwargs | {"retain_graph": kept})

    with replaced_call("torch.autograd", "backward", backward):
        yield


ACTIVATIONS_KEPT = Defect(
    id="pipeline-activations-kept",
    title="activations of a pipeline outlive the backward of their micro-batch",
    source="https://github.com/pytorch/pytorch/issues/164756",
    mechanism="the graph is retained, and its output is referenced",
    laws=("PP-2", "MEM-1", "MEM-6"),
    cells=_PLAIN_OR_GPIPE,
    inject=partial(graphs, kept=True),
    inject_twin=partial(graphs, kept=False),
)


def default_mode(*, frees: bool) -> AbstractContextManager[None]:
    """Let the default reshard mode free groups after the forward of each micro-batch, or keep them."""

    def named(original: Callable[..., bool], mode: str, name: str, *args: Any) -> bool:
        return original("always" if frees and mode == "default" else mode, name, *args)

    return replaced_call("reference_trainer.reshard", "_named", named)


GATHERED_EACH_MICRO_BATCH = Defect(
    id="pipeline-gathered-each-micro-batch",
    title="a pipeline gathers parameters again for each micro-batch",
    source="https://github.com/pytorch/pytorch/issues/164756",
    mechanism="`reshard_after_forward` is what it is without a pipeline",
    laws=("PP-3", "RS-1", "MP-4", "MEM-1"),
    cells=_PLAIN,
    inject=partial(default_mode, frees=True),
    inject_twin=partial(default_mode, frees=False),
)


def reshard_mode(*, ignored: bool) -> AbstractContextManager[None]:
    """Let FSDP reshard by default whatever the configuration says, or as it says."""

    def named(original: Callable[..., bool], mode: str, name: str, *args: Any) -> bool:
        return original("default" if ignored else mode, name, *args)

    return replaced_call("reference_trainer.reshard", "_named", named)


RESHARD_IGNORED = Defect(
    id="pipeline-reshard-ignored",
    title="a pipeline keeps all parameters unsharded, although it is to free them after each forward",
    source="https://github.com/pytorch/torchtitan/pull/822",
    mechanism="the reshard mode is not passed on to the stages",
    laws=("AXIS-1", "PP-3", "RS-1", "MP-4", "MEM-1"),
    cells="id = pp2-dp2-fp32-always-meta-cut-acc4",
    inject=partial(reshard_mode, ignored=True),
    inject_twin=partial(reshard_mode, ignored=False),
)


def stages_in_memory(*, number: int) -> AbstractContextManager[None]:
    """Let a rank gather so many of its stages at a time, and free the others."""

    def lowered(original: Callable[..., list[Any]], actions: list[Any], *_args: Any, **options: Any) -> list[Any]:
        return original(actions, **options | {"max_active_stages": number})

    return replaced_call(f"{_PIPELINING}.schedules", "_add_unshard_reshard", lowered)


STAGES_GATHERED_AGAIN = Defect(
    id="pipeline-stages-gathered-again",
    title="a rank with two stages gathers one of them again whenever it acts after the other",
    source=_DOCS,
    mechanism="`max_active_stages` is 1: a schedule reshards the stage that does not act next",
    laws=("PP-3", "RS-1", "MP-4", "MEM-1"),
    cells=_TWO_STAGES,
    inject=partial(stages_in_memory, number=1),
    inject_twin=partial(stages_in_memory, number=2),
)


def loss_over_stages(*, lost: bool) -> AbstractContextManager[None]:
    """Leave the loss on the ranks of the last stage, or add it up over the stages."""

    def add_up(original: Callable[..., Tensor], value: Tensor, mesh: Any, dims: Any) -> Tensor:
        return original(value, mesh, [dim for dim in dims if dim != "pp" or not lost])

    return replaced_call("reference_trainer.train", "sum_over", add_up)


LOSS_STAYS_ON_LAST_STAGE = Defect(
    id="pipeline-loss-stays-on-last-stage",
    title="only the last stage of a pipeline reports the loss",
    source=_DOCS,
    mechanism="the loss is not added up over the stages",
    laws=("PAR-5", "PAR-1"),
    cells=_PLAIN,
    inject=partial(loss_over_stages, lost=True),
    inject_twin=partial(loss_over_stages, lost=False),
)


def second_halves(*, last: bool) -> AbstractContextManager[None]:
    """Let a rank compute all second halves of backwards at the end of a step, or as early as the schedule says."""

    def ordered(original: Callable[..., list[Any]], schedule: Any, rank: int) -> list[Any]:
        actions = original(schedule, rank)
        return sorted(actions, key=lambda action: last and action is not None and action.computation_type.value == "W")

    return replaced_call(f"{_PIPELINING}.schedules:ScheduleZBVZeroBubble", "_calculate_single_rank_operations", ordered)


SECOND_HALVES_LAST = Defect(
    id="pipeline-second-halves-last",
    title="a zero-bubble pipeline computes the gradients of all parameters after those of all activations",
    source="https://arxiv.org/abs/2401.10241",
    mechanism="second halves of backwards are put at the end of each rank's actions",
    laws=("PP-1", "PAR-2", "MEM-1"),
    cells=_HALVES,
    inject=partial(second_halves, last=True),
    inject_twin=partial(second_halves, last=False),
    since="2.10",
)


@contextmanager
def graphs_of_halves(*, kept: bool) -> Iterator[None]:
    """Keep the graph of each first half after both halves of its backward, or let it go."""
    edges: list[GradientEdge] = []

    def first_half(original: Callable[..., Any], outputs: Any, *args: Any) -> Any:
        edges.extend(get_gradient_edge(output) for output in outputs if kept)
        return original(outputs, *args)

    with replaced_call(f"{_PIPELINING}.stage", "stage_backward_input", first_half):
        yield


GRAPHS_OF_HALVES_KEPT = Defect(
    id="pipeline-graphs-of-halves-kept",
    title="a backward in two halves retains the graph of its loss",
    source="https://github.com/pytorch/pytorch/pull/138119",
    mechanism="the graph above the outputs is referenced, which the first half of a backward has detached",
    laws=("PP-2", "MEM-1"),
    cells=_HALVES,
    inject=partial(graphs_of_halves, kept=True),
    inject_twin=partial(graphs_of_halves, kept=False),
    since="2.10",
)
