"""From a plain model to a parallel one, in seven steps: see `parallelize`."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
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

from reference_trainer.config import GradientSync, TrainerConfig, has_group_around_blocks
from reference_trainer.experts import Experts, MixtureOfExperts, over_ranks
from reference_trainer.float8 import apply_float8
from reference_trainer.frozen import freeze
from reference_trainer.loss import sum_over_dp
from reference_trainer.mesh import build_expert_mesh, degree, fsdp_mesh
from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.model import Block, Transformer
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.precision import PRECISIONS
from reference_trainer.reshard import ReshardPolicy, apply_prefetch


def parallelize(
    model: Transformer,
    mesh: DeviceMesh,
    config: TrainerConfig,
    policy: ReshardPolicy,
    *,
    blocks: Sequence[int] | None = None,
    ends: bool = True,
) -> None:
    """Parallelise a model in place, on the meta device or with its weights, which are then sharded.

    `blocks` are the indices of the blocks to parallelise (default: all); `ends` includes embedding, norm, output and
    the root. The ends come after all blocks. The order of the seven steps is a contract.
    """
    indices = model.blocks if blocks is None else blocks
    chosen = {f"layers.{index}": model.blocks[index] for index in indices}

    # Modules that multiply in float8 take the place of others, whose parameters they have.
    if config.float8 != "none":
        for block in chosen.values():
            apply_float8(block, config.float8, mesh.device_type)

    # 1. Tensor parallelism decides the placements of parameters.
    if "tp" in (mesh.mesh_dim_names or ()):
        # One object for all blocks: torch.compile compares meshes by identity, and would compile each block by itself.
        tp_mesh = mesh["tp"]
        for block in chosen.values():
            apply_tp_to_block(block, tp_mesh, config)
        if ends:
            apply_tp_to_ends(model, tp_mesh, config)

    for block in chosen.values():
        if isinstance(block.feed_forward, MixtureOfExperts):
            apply_ep(block.feed_forward, mesh, _expert_mesh(model, mesh, config))

    # 2. Activation checkpointing marks what is recomputed in backward.
    if config.activation_checkpointing != "none":
        for block in chosen.values():
            apply_ac(block, mode=config.activation_checkpointing)

    # 3. Compilation replaces what runs inside of the recomputation.
    if config.compile != "none" and config.compiled == "blocks":
        for block in chosen.values():
            apply_compile(block, backend=config.compile)
        if ends:
            model.tok_embeddings.register_forward_hook(_wait_for_output)

    # 4. Parameters that never train are frozen before FSDP looks at them.
    freeze(model, config.frozen)

    # 5. FSDP shards what the steps before have made; its hooks are outermost.
    fsdp = _fsdp_options(config, mesh)
    norms_apart = PRECISIONS[config.precision].norms_apart
    for name, block in chosen.items():
        if model.expert_mesh is not None:
            experts = f"{name}.feed_forward.experts"
            apply_fsdp_to_experts(model.get_submodule(experts), policy.of(experts), fsdp, model.expert_mesh)
        apply_fsdp_to_block(block, name, policy, fsdp, norms_apart=norms_apart)
    if ends:
        apply_fsdp_to_ends(model, policy, fsdp, norms_apart=norms_apart, together=has_group_around_blocks(config))

    if ends and config.gradient_divisor is not None:
        set_gradient_divisor(model, config.gradient_divisor, mesh)

    # 6. Prefetching names groups: all of them must exist, which those of a pipeline's other stages do not.
    if ends and not model.stages:
        apply_prefetch(model, config)

    # 7. A compiled model breaks its graph at the hooks of all steps before, which run as they do without a compiler.
    if config.compile != "none" and config.compiled == "model":
        model.compile(backend=config.compile)


def apply_tp(model: Transformer, mesh: DeviceMesh, config: TrainerConfig) -> None:
    """Apply tensor parallelism to the full model, and nothing else; `mesh` has one dimension."""
    for block in model.blocks.values():
        apply_tp_to_block(block, mesh, config)
    apply_tp_to_ends(model, mesh, config)


class ReplicateParallel(ParallelStyle):
    """Style of a module that all tensor-parallel ranks compute redundantly, with replicated DTensors as parameters.

    Without this style the parameters would stay plain tensors, and their gradients would be on another mesh than all
    others, which torch.nn.utils.clip_grad_norm_ refuses.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate_parameters(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))

        # The values that these two return replace inputs and output, but torch annotates None: hence Any.
        def to_dtensor(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            x, *rest = inputs
            return (DTensor.from_local(x, mesh, [Replicate()]), *rest)

        def to_local(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Any:
            return output.to_local(grad_placements=[Replicate()])

        return distribute_module(module, device_mesh, replicate_parameters, to_dtensor, to_local)


def apply_tp_to_block(block: Block, mesh: DeviceMesh, config: TrainerConfig) -> None:
    """Apply tensor parallelism (arXiv:1909.08053), with sequence parallelism (arXiv:2205.05198) if asked for."""
    between = _between_regions(config)
    plan: dict[str, ParallelStyle] = {
        "attention": _gather_input(between, number_of_inputs=2),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward": _gather_input(between, number_of_inputs=1),
    }
    if isinstance(block.feed_forward, MixtureOfExperts):
        apply_tp_to_mixture(block.feed_forward, mesh, between)
    else:
        plan |= _feed_forward_plan("feed_forward", RowwiseParallel(output_layouts=between))
    if norms := _norm_style(config):
        plan |= {"attention_norm": norms, "ffn_norm": norms}
    parallelize_module(block, mesh, plan)


def _feed_forward_plan(prefix: str, down: RowwiseParallel) -> dict[str, ParallelStyle]:
    return {f"{prefix}.w1": ColwiseParallel(), f"{prefix}.w3": ColwiseParallel(), f"{prefix}.w2": down}


def apply_tp_to_mixture(mixture: MixtureOfExperts, mesh: DeviceMesh, between: Placement) -> None:
    """Shard the shared expert as a dense network, and let each rank route all tokens, which are gathered before.

    Weighted by the router, a rank's parts of all experts are one partial sum, which is reduced once. Routed experts are
    sharded where they are divided among ranks, see `shard_experts`.
    """
    partial_sum = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    parallelize_module(mixture, mesh, _feed_forward_plan("shared", partial_sum))
    # The gradient of a sum is known to all: torch up to 2.9 would take it for partial, too.
    mixture.shared.register_forward_hook(lambda _module, _inputs, out: out.to_local(grad_placements=[Replicate()]))
    parallelize_module(mixture, mesh, PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=between))
    router = mixture.router
    router.weight = nn.Parameter(distribute_tensor(router.weight, mesh, [Replicate()]))
    mixture.local = router.local = partial(DTensor.to_local, grad_placements=[Partial()])


def apply_tp_to_ends(model: Transformer, mesh: DeviceMesh, config: TrainerConfig) -> None:
    """Shard embedding and output along the vocabulary (arXiv:1909.08053)."""
    between = _between_regions(config)
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if config.loss_parallel else Replicate(),
            use_local_output=not config.loss_parallel,
        ),
    }
    if norms := _norm_style(config):
        plan["norm"] = norms
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in model.ends})
    model.tie_weights()  # each style has made a separate parameter, with the same placement: rows of the vocabulary


def _between_regions(config: TrainerConfig) -> Placement:
    """Return the placement of activations between tensor-parallel regions: sequence shards, or replicas."""
    return Shard(1) if config.sequence_parallel else Replicate()


def _norm_style(config: TrainerConfig) -> ParallelStyle | None:
    """Style of norms; None leaves them out of tensor parallelism."""
    if config.sequence_parallel:
        return SequenceParallel()
    return ReplicateParallel() if config.norms_in_tp else None


def _gather_input(layout: Placement, *, number_of_inputs: int) -> PrepareModuleInput:
    """Gather the first input once for all its users, as a replicated DTensor; the RoPE table is left alone."""
    others = (None,) * (number_of_inputs - 1)
    return PrepareModuleInput(input_layouts=(layout, *others), desired_input_layouts=(Replicate(), *others))


def _expert_mesh(model: Transformer, mesh: DeviceMesh, config: TrainerConfig) -> DeviceMesh | None:
    """Return the mesh of experts, which is built for the first block; None if each rank holds all experts."""
    if config.mesh.ep > 1 and model.expert_mesh is None:
        dims = resolve_mesh(config.mesh, world_size=mesh.size())
        model.expert_mesh = build_expert_mesh(dims, torch.device(mesh.device_type))
    return model.expert_mesh


def apply_ep(mixture: MixtureOfExperts, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> None:
    """Balance experts over the tokens of all ranks, and divide them among ranks if there is a mesh for it."""
    mixture.sum_over_ranks = partial(sum_over_dp, mesh=mesh)
    shard_experts(mixture.experts, expert_mesh or mesh)
    if expert_mesh is not None:
        mixture.dispatch = partial(over_ranks, group=expert_mesh.get_group("ep"))


def shard_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `ep` other experts, and each tensor-parallel rank a part of their hidden layers."""
    names = tuple(name for name in ("ep", "tp") if name in (mesh.mesh_dim_names or ()))
    if not names:
        return
    own = mesh[names]
    for name, parameter in experts.named_parameters():
        sharded = {"ep": Shard(0), "tp": Shard(2 if name == "w2" else 1)}
        weight = distribute_tensor(parameter, own, [sharded[each] for each in names])
        experts.register_parameter(name, nn.Parameter(weight))


def apply_ac(block: Block, *, mode: Literal["full", "selective"]) -> None:
    """Let a block keep only its input for backward and, if `selective`, activations that are expensive to recompute."""
    block.recompute = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        keep = partial(create_selective_checkpoint_contexts, _keep_expensive)
        block.recompute = partial(checkpoint, use_reentrant=False, context_fn=keep)


def _keep_expensive(
    _context: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    """Keep matrix products and attention; the operator of attention has another name for each kernel of a device."""
    name = operator.name()
    expensive = name in ("aten::mm", "aten::addmm", "aten::bmm") or "scaled_dot_product" in name
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def apply_compile(block: Block, *, backend: Literal["inductor", "aot_eager"]) -> None:
    """Compile a block's layer by itself, without graph breaks: one graph serves all blocks.

    Checkpointing stays outside of the compiled function: inside of it, with DTensor parameters, AOTAutograd fails an
    assertion on a saved DeviceMesh (torch 2.13).
    """
    block.layer = torch.compile(block.layer, backend=backend, fullgraph=True)  # type: ignore[method-assign]


def _wait_for_output(_module: nn.Module, _inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Copy an output that is still in flight (AsyncCollectiveTensor, of tensor parallelism) to a plain tensor.

    As input of a compiled function the gradient of such a tensor would silently be zero, and the embedding would not be
    trained. The hook can go with torch 2.13, when all supported versions have
    https://github.com/pytorch/pytorch/pull/191113.
    """
    return output if type(output) is torch.Tensor else output.clone()


def apply_fsdp_to_block(
    block: Block, name: str, policy: ReshardPolicy, options: dict[str, Any], *, norms_apart: bool
) -> None:
    """Shard a block as one FSDP group, or as three, with each norm as a separate group.

    The parameters of a group must have one dtype: "FSDP expects uniform original parameter dtype",
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    if norms_apart:
        fully_shard(block.attention_norm, reshard_after_forward=policy.of(f"{name}.attention_norm"), **options)
        fully_shard(block.ffn_norm, reshard_after_forward=policy.of(f"{name}.ffn_norm"), **options)
    fully_shard(block, reshard_after_forward=policy.of(name), **options)


def apply_fsdp_to_experts(
    experts: nn.Module, reshard_after_forward: bool | int, options: dict[str, Any], mesh: DeviceMesh
) -> None:
    """Shard a rank's experts over the ranks that have the same ones, as an FSDP group inside of that of the block.

    The gradient of an expert has the tokens of all ranks that send it some: FSDP would divide it by the ranks that
    share it, and not, as all others, by those that see different data.
    """
    different_data = mesh.size() // degree(mesh, "tp")
    fully_shard(experts, reshard_after_forward=reshard_after_forward, **options | {"mesh": fsdp_mesh(mesh)})
    group = cast("FSDPModule", experts)
    group.set_gradient_divide_factor(float(different_data))
    # gloo has no reduction that multiplies first, and a group of one shard no reduction, see `set_gradient_divisor`.
    group.set_force_sum_reduction_for_comms(degree(mesh, "expert_shard") > 1)


def apply_fsdp_to_ends(
    model: Transformer, policy: ReshardPolicy, options: dict[str, Any], *, norms_apart: bool, together: bool
) -> None:
    """Shard the embedding and (norm, output) as separate groups, or `together` as one, then the root.

    Tied embeddings form one group with norm and output: a parameter can belong to one group only.
    """
    ends = model.ends
    if "tok_embeddings" in ends and not together:
        fully_shard(ends.pop("tok_embeddings"), reshard_after_forward=policy.of("tok_embeddings"), **options)
    if "norm" in ends and norms_apart:
        fully_shard(ends.pop("norm"), reshard_after_forward=policy.of("norm"), **options)
    if ends:
        fully_shard(list(ends.values()), reshard_after_forward=policy.of("output"), **options)
    # The root owns no parameters, so it has nothing to reshard; it drives the others (streams, end of backward). Each
    # stage of a pipeline is a root.
    for root in model.stages or (model,):
        fully_shard(root, reshard_after_forward=False, **options)


def _fsdp_options(config: TrainerConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """Options of `fully_shard` that all groups have in common."""
    no_offloading = OffloadPolicy()
    by_columns = partial(_columns_if_even, shards=degree(mesh, "dp_shard"))
    return {
        "mesh": fsdp_mesh(mesh),
        "shard_placement_fn": by_columns if config.shard_placement == "columns" else None,
        "mp_policy": mixed_precision_policy(config.precision),
        "offload_policy": CPUOffloadPolicy(pin_memory=config.pin_memory) if config.offload == "cpu" else no_offloading,
    }


def _columns_if_even(parameter: nn.Parameter, *, shards: int) -> Shard | None:
    """Shard the columns of a matrix, or of a tensor-parallel rank's part of it, if all shards get equally many."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(1) if local.ndim == 2 and local.shape[1] % shards == 0 else None


def set_gradient_divisor(model: Transformer, divisor: float, mesh: DeviceMesh) -> None:
    """Let each group divide its sums of gradients by this number instead of that of ranks.

    NCCL alone can scale within a reduction, see `torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor`: with
    other backends FSDP has to sum, and to divide afterwards. A group of one shard must not be told so: it would divide
    twice (findings/divide_factor_of_one_shard.py).
    """
    sums = dist.get_backend(fsdp_mesh(mesh).get_group("dp_shard")) != "nccl"
    for module in model.modules():
        if isinstance(module, FSDPModule):
            apart = isinstance(module, Experts) and model.expert_mesh is not None
            shards = (
                degree(cast("DeviceMesh", model.expert_mesh), "expert_shard") if apart else degree(mesh, "dp_shard")
            )
            module.set_gradient_divide_factor(divisor)
            module.set_force_sum_reduction_for_comms(sums and shards > 1)


def set_gradient_sync(model: Transformer, gradient_sync: GradientSync, *, last: bool) -> None:
    """Set, before a micro-batch's forward, whether its backward communicates gradients; `last`: it is the step's last.

    `set_is_last_backward` stays True. That switch is meant for several forwards before their backwards (pipelines):
    left False, FSDP keeps the order of an earlier forward, and a later backward prefetches parameters that it does not
    need.
    """
    root = cast("FSDPModule", model)  # `fully_shard` has added the methods of FSDPModule
    match gradient_sync:
        case "each":
            pass
        case "last":
            root.set_requires_gradient_sync(last)
        case "all-reduce-last":
            root.set_requires_all_reduce(last)
