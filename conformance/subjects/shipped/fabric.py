"""Lightning Fabric with `ModelParallelStrategy` (FSDP2), by public options alone, in a loop as its documentation has.

Tried with lightning 2.6.6. https://lightning.ai/docs/fabric/stable/advanced/model_parallel/
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from lightning.fabric import Fabric as LightningFabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from conformance.subjects.cells import SubjectCell
from conformance.subjects.data import default_count
from conformance.subjects.own_loop import LoopConfig, own_loop
from conformance.subjects.shipped.workload import (
    Decoder,
    apply_tensor_parallelism,
    decoder_loss,
    feature_scale,
    tokens_and_labels,
)


def refuses(cell: SubjectCell) -> str | None:
    """Return the reason for HSDP, which the strategy has no option for, and for other devices than processors."""
    if cell.device != "cpu":
        return "Fabric has classes for the accelerators that it knows: this adapter asks for accelerator='cpu'"
    return "ModelParallelStrategy has no mesh with replicas" if "dp_replicate" in cell.shape else None


judged = partial(
    own_loop,
    loss=decoder_loss,
    batch=tokens_and_labels,
    meshes=("dp2", "dp2-tp2"),
    precisions=("fp32", "bf16"),
    meta=True,
    offload=True,
    resumes=True,
    refuses=refuses,
    packages=("lightning",),
)


class CompleteDecoder(Decoder):
    """Decoder that initialises its own buffer: Fabric asks each module to initialise itself, and warns of the others.

    Parameters and buffers of modules without `reset_parameters` stay as they are in fresh memory.
    """

    def reset_parameters(self) -> None:
        """Compute the buffer."""
        self.scale.copy_(feature_scale())


def synchronise_again(model: nn.Module) -> None:
    """Switch synchronisation on: `_FSDPNoSync.__exit__` sets `enabled`, which is False in the last micro-batch."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(True, recurse=False)


@judged(model=Decoder, tied_model=partial(Decoder, tied=True))
def fabric(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train with Fabric as it is released."""
    return train(config, after_block=lambda _model: None)


@judged(model=CompleteDecoder, tied_model=partial(CompleteDecoder, tied=True))
def fabric_with_fix(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train a model that Fabric can initialise, with synchronisation switched on after `no_backward_sync`."""
    return train(config, after_block=synchronise_again)


def train(config: LoopConfig, *, after_block: Callable[[nn.Module], None]) -> Iterator[tuple[Tensor, Tensor]]:
    """Train, and yield the loss and the norm of each step; `after_block` follows each `no_backward_sync`."""
    strategy = ModelParallelStrategy(
        partial(sharded, config=config),
        data_parallel_size=config.shape["dp_shard"],
        tensor_parallel_size=config.shape.get("tp", 1),
    )
    fabric = LightningFabric(accelerator="cpu", devices=prod(config.shape.values()), strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=config.on_meta):
        model = config.model()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(config.optimizer(model.parameters()))
    if config.load_from:
        fabric.load(config.load_from, {"model": model, "optimizer": optimizer})
    for micro_batches in config.steps:
        count = total(fabric, sum(map(default_count, micro_batches)))
        losses = []
        for batch in micro_batches:
            is_last, is_alone = batch is micro_batches[-1], len(micro_batches) == 1
            with nullcontext() if is_alone else fabric.no_backward_sync(model, enabled=not is_last):
                loss = decoder_loss(model, batch)
                fabric.backward(loss * (fabric.world_size / count))
            if not is_alone:
                after_block(model)
            losses.append(loss.detach())
        norm = fabric.clip_gradients(model, optimizer, max_norm=config.max_norm, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        yield total(fabric, sum(losses)) / count, norm
    if config.save_to:
        fabric.save(config.save_to, {"model": model, "optimizer": optimizer})


def total(fabric: LightningFabric, number: float | Tensor) -> Tensor:
    """Return the sum of a number over all ranks, those that have the same data included, in fp64."""
    summed: Tensor = fabric.all_reduce(torch.as_tensor(number, dtype=torch.float64), reduce_op="sum")
    return summed


def sharded(model: Any, mesh: DeviceMesh, *, config: LoopConfig) -> nn.Module:
    """Return the decoder, sharded as `ModelParallelStrategy` asks its user to."""
    if mesh["tensor_parallel"].size() > 1:
        apply_tensor_parallelism(model, mesh["tensor_parallel"])
    for module in [*model.layers, model]:
        fully_shard(
            module, mesh=mesh["data_parallel"], mp_policy=config.mixed_precision, offload_policy=config.offload_policy
        )
    return model  # type: ignore[no-any-return]
