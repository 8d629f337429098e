"""From a plain model to a parallel one: `apply_tp`, `apply_ac`, `apply_compile`, `apply_fsdp`, `apply_prefetch`.

The order is a contract: tensor parallelism decides the parameters' placements, checkpointing marks what is recomputed,
compilation replaces what runs in it, and FSDP's hooks stay outermost; which groups it gathers ahead can be said when
all of them exist.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from reference_trainer.config import GradientSync, TrainerConfig
from reference_trainer.mesh import fsdp_mesh
from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.model import Block, Transformer
from reference_trainer.precision import PRECISIONS, PrecisionName
from reference_trainer.prefetch import apply_prefetch
from reference_trainer.reshard import ReshardPolicy


def parallelize(model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: ReshardPolicy) -> None:
    """Apply in place everything that the configuration asks for: block by block, then to what is around them."""
    for index in range(len(model.blocks)):
        parallelize_block(model, index, mesh, config, policy)
    parallelize_ends(model, mesh, config, policy)


def apply_tp(model: Transformer, mesh: DeviceMesh, config: TrainerConfig) -> None:
    """Tensor parallelism of the whole model, and nothing else, over a mesh of its own."""
    norms, sequence_parallel = norm_style(config), config.sequence_parallel
    for block in model.blocks:
        apply_tp_to_block(block, mesh, norms=norms, sequence_parallel=sequence_parallel)
    apply_tp_to_ends(model, mesh, norms=norms, sequence_parallel=sequence_parallel, loss_parallel=config.loss_parallel)


def parallelize_block(
    model: Transformer, index: int, mesh: DeviceMesh, config: TrainerConfig, policy: ReshardPolicy
) -> None:
    """One block, on the meta device or with its weights, which are then sharded."""
    block = model.blocks[index]
    if "tp" in (mesh.mesh_dim_names or ()):
        apply_tp_to_block(block, mesh["tp"], norms=norm_style(config), sequence_parallel=config.sequence_parallel)
    if config.activation_checkpointing != "none":
        apply_ac(block, mode=config.activation_checkpointing)
    if config.compile != "none":
        apply_compile(block, backend=config.compile)
    apply_fsdp_to_block(block, f"layers.{index}", sharding(config, mesh, policy), precision=config.precision)


def parallelize_ends(model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: ReshardPolicy) -> None:
    """Embedding, norm and output, and the root; all blocks must be parallel already."""
    if "tp" in (mesh.mesh_dim_names or ()):
        apply_tp_to_ends(
            model,
            mesh["tp"],
            norms=norm_style(config),
            sequence_parallel=config.sequence_parallel,
            loss_parallel=config.loss_parallel,
        )
    if config.compile != "none":
        model.tok_embeddings.register_forward_hook(_wait_for_output)
    apply_fsdp_to_ends(model, sharding(config, mesh, policy), precision=config.precision)
    apply_prefetch(model, config)


class ReplicateParallel(ParallelStyle):
    """A module computed alike on every tensor-parallel rank; its parameters become replicated DTensors.

    Without it they would stay plain tensors, and their gradients be on another mesh than all others, which
    torch.nn.utils.clip_grad_norm_ refuses.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate_parameters(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))

        # What these two return replaces inputs and output, but torch annotates None: hence Any.
        def to_dtensor(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            x, *rest = inputs
            return (DTensor.from_local(x, mesh, [Replicate()]), *rest)

        def to_local(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Any:
            return output.to_local(grad_placements=[Replicate()])

        return distribute_module(module, device_mesh, replicate_parameters, to_dtensor, to_local)


def apply_tp_to_ends(
    model: Transformer, mesh: DeviceMesh, *, norms: ParallelStyle | None, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Embedding and output split along the vocabulary (arXiv:1909.08053)."""
    between = _between_regions(sequence_parallel=sequence_parallel)
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    if norms:
        plan["norm"] = norms
    parallelize_module(model, mesh, plan)
    model.tie_weights()  # each style has made a parameter of its own, with the same placement: rows of the vocabulary


def apply_tp_to_block(block: Block, mesh: DeviceMesh, *, norms: ParallelStyle | None, sequence_parallel: bool) -> None:
    """Tensor parallelism (arXiv:1909.08053), with sequence parallelism (arXiv:2205.05198) if asked for."""
    between = _between_regions(sequence_parallel=sequence_parallel)
    plan: dict[str, ParallelStyle] = {
        "attention": _gather_input(between, number_of_inputs=2),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward": _gather_input(between, number_of_inputs=1),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
    }
    if norms:
        plan |= {"attention_norm": norms, "ffn_norm": norms}
    parallelize_module(block, mesh, plan)


def _between_regions(*, sequence_parallel: bool) -> Placement:
    """Between the tensor-parallel regions activations are sharded along the sequence, or replicated."""
    return Shard(1) if sequence_parallel else Replicate()


def norm_style(config: TrainerConfig) -> ParallelStyle | None:
    """None leaves norms out of tensor parallelism."""
    if config.sequence_parallel:
        return SequenceParallel()
    return ReplicateParallel() if config.norms_in_tp else None


def _gather_input(layout: Placement, *, number_of_inputs: int) -> PrepareModuleInput:
    """The first input becomes a replicated DTensor, gathered once for all its users; the RoPE table is left alone."""
    others = (None,) * (number_of_inputs - 1)
    return PrepareModuleInput(input_layouts=(layout, *others), desired_input_layouts=(Replicate(), *others))


def apply_ac(block: Block, *, mode: Literal["full", "selective"]) -> None:
    """Activation checkpointing: the block keeps its input and, if `selective`, what is expensive to recompute."""
    block.recompute = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        keep = partial(create_selective_checkpoint_contexts, _keep_expensive)
        block.recompute = partial(checkpoint, use_reentrant=False, context_fn=keep)


def _keep_expensive(
    _context: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    """Keep matrix products and attention, whose operator has another name for each kernel of a device."""
    name = operator.name()
    expensive = name in ("aten::mm", "aten::addmm", "aten::bmm") or "scaled_dot_product" in name
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def apply_compile(block: Block, *, backend: Literal["inductor", "aot_eager"]) -> None:
    """Compile a block's layer by itself, without graph breaks: one graph serves all blocks.

    Checkpointing stays outside of what is compiled: inside, with DTensor parameters, AOTAutograd fails an assertion on
    a saved DeviceMesh (torch 2.13).
    """
    block.layer = torch.compile(block.layer, backend=backend, fullgraph=True)  # type: ignore[method-assign]


def _wait_for_output(_module: nn.Module, _inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """A tensor still in flight (AsyncCollectiveTensor, of tensor parallelism) becomes a plain one, by a copy.

    As input of a compiled function its gradient would silently be zero, and the embedding not be trained. Can go with
    torch 2.13, when all supported versions have https://github.com/pytorch/pytorch/pull/191113.
    """
    return output if type(output) is torch.Tensor else output.clone()


ShardGroup = Callable[[nn.Module | list[nn.Module], str], None]
ROOT = ""


def sharding(config: TrainerConfig, mesh: DeviceMesh, policy: ReshardPolicy) -> ShardGroup:
    """A function that makes modules one FSDP group, under the name that the reshard policy has for it."""
    options: dict[str, Any] = {
        "mesh": fsdp_mesh(mesh),
        "mp_policy": mixed_precision_policy(config.precision),
        "offload_policy": offload_policy(config),
    }

    def shard(modules: nn.Module | list[nn.Module], name: str) -> None:
        fully_shard(modules, reshard_after_forward=policy.after_forward.get(name, False), **options)

    return shard


def apply_fsdp_to_block(block: Block, name: str, shard: ShardGroup, *, precision: PrecisionName) -> None:
    """A group for each block. `bf16-mixed` takes the norms out of it: the parameters of a group must have one dtype
    ("FSDP expects uniform original parameter dtype", torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """
    if PRECISIONS[precision].norms_apart:
        shard(block.attention_norm, f"{name}.attention_norm")
        shard(block.ffn_norm, f"{name}.ffn_norm")
    shard(block, name)


def apply_fsdp_to_ends(model: Transformer, shard: ShardGroup, *, precision: PrecisionName) -> None:
    """Shard the embedding and (norm, output) as groups of their own, then the root.

    Tied embeddings form one group with norm and output: a parameter can belong to one group only. `bf16-mixed` takes
    the norm out of it.
    """
    tied, norm_apart = model.config.tied_embeddings, PRECISIONS[precision].norms_apart
    if not tied:
        shard(model.tok_embeddings, "tok_embeddings")
    if norm_apart:
        shard(model.norm, "norm")
    last = [*([model.tok_embeddings] if tied else []), *([] if norm_apart else [model.norm]), model.output]
    shard(last, "output")
    # The root owns no parameters; it drives the others (streams, end of backward).
    shard(model, ROOT)


def offload_policy(config: TrainerConfig) -> OffloadPolicy:
    """The base class stands for no offloading."""
    return CPUOffloadPolicy(pin_memory=config.pin_memory) if config.offload == "cpu" else OffloadPolicy()


def set_gradient_sync(model: Transformer, gradient_sync: GradientSync, *, last: bool) -> None:
    """To be called before each micro-batch's forward: whether its backward communicates gradients.

    `set_is_last_backward` stays True. It is meant for several forwards before their backwards (pipelines): left False,
    FSDP keeps the order of an earlier forward, and a later backward prefetches parameters that it does not need.
    """
    root = cast("FSDPModule", model)  # `fully_shard` has added the methods of FSDPModule
    match gradient_sync:
        case "each":
            pass
        case "last":
            root.set_requires_gradient_sync(last)
        case "all-reduce-last":
            root.set_requires_all_reduce(last)
