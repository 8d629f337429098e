"""Memory that a model needs without FSDP: activations, and gradients of all that FSDP would unshard.

The memory models of `conformance.oracles` add the allocations of FSDP.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.simulation import simulated_world
from conformance.instruments.activations import GroupMarks, Groups
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.memory import Ledger, mark
from conformance.memory_segment import MemorySegment
from conformance.oracles.schedule import communicates
from conformance.oracles.torch_versions import gradients_stay, traits_of
from conformance.run.experiment import Needs
from reference_trainer.config import TrainerConfig
from reference_trainer.data import Batches
from reference_trainer.init_weights import init_weights
from reference_trainer.loss import loss_context, summed_loss
from reference_trainer.mesh import build_mesh
from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.model import Stage, Transformer
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.parallelize import apply_ac, apply_tp


@experiment(needs=Needs.NOTHING, world="none")
def profile_without_fsdp(rank: RankWorld) -> list[MemorySegment]:
    """Profile the model of a cell without FSDP, in one process; returns the result of `segments_without_fsdp`.

    With tensor parallelism the process is rank 0 of a simulated world of tensor-parallel ranks.
    """
    config = rank.config
    with simulated_world(rank.dims.tp, device_type=rank.device.type):
        model = Transformer(config.model)
        init_weights(model, seed=config.seed)
        parallelize_without_fsdp(model.to(rank.device), config, rank.device, tp=rank.dims.tp)
        batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
        return segments_without_fsdp(model, batches, config, rank.dims, ledger=lambda: ledger_of(rank.device))


def parallelize_without_fsdp(model: Transformer, config: TrainerConfig, device: torch.device, *, tp: int) -> None:
    """Cast parameters to the compute dtype, and apply to the model, in place, all that the trainer does but FSDP."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(mixed_precision_policy(config.precision).param_dtype)
    if tp > 1:
        apply_tp(model, build_mesh(ParallelDims(dp_replicate=1, dp_shard=1, tp=tp), device)["tp"], config)
    for block in model.blocks.values():
        if config.activation_checkpointing != "none":
            apply_ac(block, mode=config.activation_checkpointing)


def segments_without_fsdp(
    model: Transformer, batches: Batches, config: TrainerConfig, dims: ParallelDims, *, ledger: Ledger
) -> list[MemorySegment]:
    """Measure forward, loss and backward of each micro-batch after a warm step; marks as in `instruments.activations`.

    Gradients have the dtypes that FSDP gives them in this version of torch, and are kept for as many micro-batches.
    """
    traits = traits_of(str(torch.__version__))
    marks = GroupMarks(group_modules(model))
    micro_batches = batches.micro_batches(0, dp_rank=0, dp_size=dims.dp, accumulation=config.accumulation)
    for _warm in (True, False):
        with ledger() as measured:
            for index, (inputs, labels) in enumerate(micro_batches):
                reduces, _ = communicates(config, index)
                marks.reduces = reduces
                marks.releases = reduces or not gradients_stay(config, traits)
                if traits.gradients_have_own_dtypes and config.implementation == "fsdp2":
                    set_grad_dtypes(model, config, reduces=reduces)
                _forward_backward(model, marks, config, inputs, labels)
    return measured.segments


def set_grad_dtypes(model: nn.Module, config: TrainerConfig, *, reduces: bool) -> None:
    """Set `grad_dtype` before backward as FSDP does if gradients are reduced in a wider dtype.

    See `_set_unsharded_grad_dtypes` of torch 2.15, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. Gradients
    keep the dtype in which they are computed, and are added to existing gradients. The gradients of the first of
    several micro-batches, and those that tensor parallelism may have to reduce, are cast at once.
    """
    policy = mixed_precision_policy(config.precision)
    reduce_dtype = policy.reduce_dtype or torch.float32  # the default of 2.15, see `oracles.dtype_policy`
    if policy.param_dtype in (None, reduce_dtype):
        return
    for parameter in model.parameters():
        first = parameter.grad is None and not reduces
        replicated = isinstance(parameter, DTensor) and any(where.is_replicate() for where in parameter.placements)
        parameter.grad_dtype = reduce_dtype if first or replicated else None


def _forward_backward(
    model: Transformer, marks: GroupMarks, config: TrainerConfig, inputs: Tensor, labels: Tensor
) -> None:
    """Run forward and backward of a micro-batch; logits and loss are held until backward ends, as in the trainer."""
    device = model.output.weight.device
    mark("forward")
    with loss_context(parallel=config.loss_parallel and config.mesh.tp > 1):
        logits = model(inputs.to(device))
        loss = summed_loss(logits, labels.to(device), arithmetic=config.model.arithmetic)
        mark("backward")
        loss.backward()  # type: ignore[no-untyped-call]
    marks.finish_backward()
    mark("end")


def group_modules(model: Transformer | Stage) -> Groups:
    """Return the modules of each group that FSDP shards, see `oracles.schedule.groups`."""
    groups: dict[str, list[nn.Module]] = {"tok_embeddings": [model.tok_embeddings]}
    groups |= {f"layers.{index}": [block] for index, block in model.layers.items()}
    groups["output"] = [model.norm, model.output]
    return {name: modules for name, modules in groups.items() if not isinstance(modules[0], nn.Identity)}
