"""From a plain model on the meta device to a parallel one: `apply_tp`, `apply_ac`, `apply_compile`, `apply_fsdp`.

The order is a contract: tensor parallelism decides the parameters' placements, checkpointing marks what is recomputed,
compilation replaces what runs in it, and FSDP's hooks stay outermost.
"""

from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import fsdp_mesh
from reference_trainer.model import Block, Transformer


def parallelize(model: Transformer, mesh: DeviceMesh, config: TrainerConfig) -> None:
    """Apply in place everything that the configuration asks for."""
    if "tp" in (mesh.mesh_dim_names or ()):
        apply_tp(
            model,
            mesh["tp"],
            sequence_parallel=config.sequence_parallel,
            loss_parallel=config.loss_parallel,
        )
    if config.activation_checkpointing == "full":
        apply_ac(model)
    if config.compile != "none":
        apply_compile(model, backend=config.compile)
    apply_fsdp(model, fsdp_mesh(mesh), precision=config.precision, reshard=config.reshard)


class ReplicateParallel(ParallelStyle):
    """A module computed alike on every tensor-parallel rank; its parameters become replicated DTensors.

    Without it they would stay plain tensors, and the gradient norm would mix parameters of different meshes.
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


def apply_tp(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Megatron-style tensor parallelism (arXiv:1909.08053), with sequence parallelism (arXiv:2205.05198) if asked for.

    Between the tensor-parallel regions activations are sharded along the sequence, or replicated.
    """
    between: Placement = Shard(1) if sequence_parallel else Replicate()

    def norm() -> ParallelStyle:
        return SequenceParallel() if sequence_parallel else ReplicateParallel()

    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "norm": norm(),
            "output": ColwiseParallel(
                input_layouts=between,
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    for block in _blocks(model):
        plan: dict[str, ParallelStyle] = {
            "attention_norm": norm(),
            "attention": _gather_input(between, number_of_inputs=2),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=between),
            "ffn_norm": norm(),
            "feed_forward": _gather_input(between, number_of_inputs=1),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
        }
        parallelize_module(block, mesh, plan)
    if model.config.tied_embeddings:
        # Each style has made a parameter of its own, with the same placement (rows of the vocabulary): tie them again.
        model.output.weight = model.tok_embeddings.weight


def _gather_input(layout: Placement, *, number_of_inputs: int) -> PrepareModuleInput:
    """The first input becomes a replicated DTensor, gathered once for all its users; the RoPE table is left alone."""
    others = (None,) * (number_of_inputs - 1)
    return PrepareModuleInput(input_layouts=(layout, *others), desired_input_layouts=(Replicate(), *others))


def apply_ac(model: Transformer) -> None:
    """Full activation checkpointing of each block."""
    for block in _blocks(model):
        block.recompute_in_backward = True


def apply_compile(model: Transformer, *, backend: Literal["inductor", "aot_eager"]) -> None:
    """Compile each block's layer by itself, without graph breaks: one graph serves all of them.

    Checkpointing stays outside of what is compiled: inside, with DTensor parameters, AOTAutograd fails an assertion on
    a saved DeviceMesh (torch 2.13).
    """
    for block in _blocks(model):
        block.layer = torch.compile(block.layer, backend=backend, fullgraph=True)  # type: ignore[method-assign]
    model.tok_embeddings.register_forward_hook(_wait_for_output)


def _wait_for_output(_module: nn.Module, _inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """A tensor still in flight (AsyncCollectiveTensor, of tensor parallelism) becomes a plain one, by a copy.

    As input of a compiled function its gradient would silently be zero, and the embedding not be trained. Can go with
    torch 2.13, when all supported versions have https://github.com/pytorch/pytorch/pull/191113.
    """
    return output if type(output) is torch.Tensor else output.clone()


def apply_fsdp(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    precision: Literal["fp32", "bf16-mp"],
    reshard: Literal["always", "never", "default"],
) -> None:
    """Shard embedding, each block, and (norm, output) as groups of their own, then the root.

    Tied embeddings form one group with norm and output: a parameter can belong to one group only.
    """
    policy = mixed_precision_policy(precision)

    def shard(modules: nn.Module | list[nn.Module], *, last: bool = False) -> None:
        fully_shard(
            modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward(reshard, last=last)
        )

    tied = model.config.tied_embeddings
    if not tied:
        shard(model.tok_embeddings)
    for block in _blocks(model):
        shard(block)
    shard([*([model.tok_embeddings] if tied else []), model.norm, model.output], last=True)
    # The root owns no parameters; it drives the others (streams, end of backward).
    shard(model, last=True)


def mixed_precision_policy(precision: Literal["fp32", "bf16-mp"]) -> MixedPrecisionPolicy:
    """`bf16-mp` reduces gradients in fp32 and leaves inputs alone: casting them would round the fp32 RoPE table."""
    match precision:
        case "fp32":
            return MixedPrecisionPolicy()
        case "bf16-mp":
            return MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )


def reshard_after_forward(reshard: Literal["always", "never", "default"], *, last: bool) -> bool:
    """Whether a group is freed after forward; `last`: backward needs the group at once."""
    match reshard:
        case "always":
            return True
        case "never":
            return False
        case "default":
            return not last


def _blocks(model: Transformer) -> list[Block]:
    return cast("list[Block]", list(model.layers))
