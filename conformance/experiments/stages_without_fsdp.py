"""Memory that the stages of a pipeline need without FSDP, in the order in which a schedule has them act.

The memory models of `conformance.oracles` add the allocations of FSDP, see `experiments.without_fsdp`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.simulation import simulated_world
from conformance.experiments.without_fsdp import group_modules, parallelize_without_fsdp, set_grad_dtypes
from conformance.instruments.activations import GroupMarks
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.memory import mark
from conformance.memory_segment import MemorySegment
from conformance.oracles import pipeline
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.pipeline import Action
from conformance.oracles.torch_versions import gradients_stay, traits_of
from conformance.run.experiment import Needs
from reference_trainer.config import TrainerConfig
from reference_trainer.data import Batches
from reference_trainer.init_weights import init_weights
from reference_trainer.loss import loss_context, summed_loss
from reference_trainer.model import Stage, StageLayers, Transformer
from reference_trainer.parallel_dims import ParallelDims


@experiment(needs=Needs.NOTHING, world="none")
def profile_stages_without_fsdp(rank: RankWorld) -> list[list[MemorySegment]]:
    """Profile the stage of each rank of a cell's pipeline without FSDP, in one process.

    Marks are those of `instruments.activations`, and `reduce` after the last backward. With tensor parallelism the
    process is rank 0 of a simulated world of tensor-parallel ranks.
    """
    with simulated_world(rank.dims.tp):
        return [_profile(rank, pp_rank) for pp_rank in range(rank.dims.pp)]


def _profile(rank: RankWorld, pp_rank: int) -> list[MemorySegment]:
    config, (index,) = rank.config, pipeline.stages_of(pp_rank, rank.config)
    layers = pipeline.layers_of(index, config)
    held = StageLayers(range(layers[0], layers[-1] + 1), first=index == 0, last=index == rank.dims.pp - 1)
    model = Transformer(config.model, [held])
    init_weights(model, seed=config.seed)
    parallelize_without_fsdp(model.to(rank.device), config, rank.device, tp=rank.dims.tp)
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    micro_batches = batches.micro_batches(0, dp_rank=0, dp_size=rank.dims.dp, accumulation=config.accumulation)
    driver = _Driver(model.stages[0], held, config, rank.dims, micro_batches, rank.device)
    for _warm in (True, False):
        with ledger_of(rank.device) as measured:
            driver.run(pipeline.known_order(config, rank=pp_rank))
    return measured.segments


class _Driver:
    """Runs a stage's actions, and holds what a schedule of torch.distributed.pipelining holds.

    That is, of each micro-batch between its forward and its backward, the output, its graph and its loss; the output of
    the last forward and the gradient that was sent last, in local variables of the schedule (`_step_microbatches` in
    torch/distributed/pipelining/schedules.py); and buffers for all micro-batches that it receives, which are there
    before the step.
    """

    def __init__(
        self,
        stage: Stage,
        held: StageLayers,
        config: TrainerConfig,
        dims: ParallelDims,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        device: torch.device,
    ) -> None:
        self._stage, self._held, self._config, self._device = stage, held, config, device
        self._micro_batches = micro_batches
        self._marks = GroupMarks(group_modules(stage))
        self._traits = traits_of(str(torch.__version__))
        numel = pipeline.activation_numel(config, dims)
        shape = (len(micro_batches[0][0]), numel // len(micro_batches[0][0]) // config.model.dim, config.model.dim)
        dtype = getattr(torch, dtype_policy(config.precision).compute)
        buffers = [[torch.zeros(shape, dtype=dtype, device=device) for _ in micro_batches] for _ in range(2)]
        self._inputs, self._gradients = buffers
        self._outputs: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._last_output: Tensor | None = None
        self._last_gradient: Tensor | None = None

    def run(self, actions: Sequence[Action]) -> None:
        """Run forwards and backwards, then release the gradients of each group as FSDP does when it reduces them."""
        self._marks.reduces, self._marks.releases = False, not gradients_stay(self._config, self._traits)
        for action in actions:
            mark(action.kind)
            (self._forward if action.kind == "forward" else self._backward)(action.micro_batch)
        self._last_output = self._last_gradient = None
        mark("reduce")
        self._marks.reduces = self._marks.releases = True
        self._marks.release_all(backward=self._traits.stages_finalize_backward)
        mark("end")

    def _forward(self, index: int) -> None:
        tokens, labels = self._micro_batches[index]
        x = tokens.to(self._device) if self._held.first else self._inputs[index].requires_grad_()
        output = self._stage(x)
        self._outputs[index] = self._last_output = output
        if self._held.last:
            with loss_context(parallel=self._config.loss_parallel and self._config.mesh.tp > 1):
                arithmetic = self._config.model.arithmetic
                self._losses[index] = summed_loss(output, labels.to(self._device), arithmetic=arithmetic)

    def _backward(self, index: int) -> None:
        if self._traits.gradients_have_own_dtypes:
            set_grad_dtypes(self._stage, self._config, reduces=False)
        if self._config.pipeline.schedule == "gpipe":  # it receives into the variable from which it has sent
            self._last_gradient = None
        output = self._outputs.pop(index)
        if self._held.last:
            with loss_context(parallel=self._config.loss_parallel and self._config.mesh.tp > 1):
                torch.autograd.backward(self._losses.pop(index))
        else:
            torch.autograd.backward(output, self._gradients[index])
        if not self._held.first:
            self._last_gradient, self._inputs[index].grad = self._inputs[index].grad, None
        self._marks.finish_backward()
        mark("end")
