"""Faults of what is computed again: activations in backward, and whole runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conformance.defects.injection import Defect, replaced
from conformance.defects.precision_faults import through
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Block, Transformer
from reference_trainer.train import Trainer

Inputs = tuple[Tensor, Tensor]
"""Of a block: activations and the RoPE table."""


def recomputation(change: Callable[[Tensor, Tensor], Inputs], **options: Any) -> AbstractContextManager[None]:
    """Recompute from changed inputs, with further options of torch.utils.checkpoint."""

    def make(original: Any) -> Any:
        def checkpoint(function: Callable[..., Tensor], *inputs: Tensor, **kwargs: Any) -> Tensor:
            again = False

            def layer(x: Tensor, table: Tensor) -> Tensor:
                nonlocal again
                x, table = change(x, table) if again else (x, table)
                again = True
                return function(x, table)

            output: Tensor = original(layer, *inputs, **kwargs, **options)
            return output

        return checkpoint

    return replaced("reference_trainer.parallelize", "checkpoint", make)


def copied(x: Tensor, table: Tensor) -> Inputs:
    return x.clone(), table.clone()


def table_in_dtype_of_x(x: Tensor, table: Tensor) -> Inputs:
    return x, table.to(x.dtype)


def x_rounded(x: Tensor, table: Tensor) -> Inputs:
    return through(x, torch.bfloat16), table


def checkpointing(mode: Literal["none", "full"]) -> AbstractContextManager[None]:
    """Checkpoint activations in this mode, whatever the configuration says."""

    def make(original: Any) -> Any:
        def parallelize(model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any) -> None:
            original(model, mesh, replace(config, activation_checkpointing=mode), policy)

        return parallelize

    return replaced("reference_trainer.build", "parallelize", make)


def blocks_called_through() -> AbstractContextManager[None]:
    """Call each block's layer by the way that checkpointing takes, without checkpointing it."""

    def make(original: Any) -> Any:
        def parallelize(model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any) -> None:
            original(model, mesh, config, policy)
            for module in model.modules():
                if isinstance(module, Block):
                    module.recompute = lambda layer, *inputs: layer(*inputs)

        return parallelize

    return replaced("reference_trainer.build", "parallelize", make)


def dropout_seed(*, of_the_moment: bool) -> AbstractContextManager[None]:
    """Draw dropout from a seed that no one knows, or from another known one."""

    def make(original: Any) -> Any:
        def seed_dropout(trainer: Trainer) -> None:
            original(trainer)
            if of_the_moment:
                torch.seed()
            else:
                torch.manual_seed(torch.initial_seed() ^ 1)

        return seed_dropout

    return replaced("reference_trainer.train:Trainer", "_seed_dropout", make)


_CAST_SKIP = "https://github.com/pytorch/pytorch/issues/159359"

DEFECTS = (
    Defect(
        id="ac-recompute-cast-skip",
        title="recomputation sees inputs of another dtype than forward did, and torch notices",
        source=_CAST_SKIP,
        mechanism="the RoPE table is cast to bf16 in recomputation alone; saved tensors then differ in dtype",
        laws=("MP-1", "MP-3", "MP-4"),
        inject=partial(recomputation, table_in_dtype_of_x),
        inject_twin=partial(recomputation, copied),
    ),
    Defect(
        id="ac-recompute-cast-silent",
        title="recomputation sees inputs of another dtype than forward did, and torch was told not to look",
        source="https://github.com/pytorch/pytorch/issues/148831",
        mechanism="as ac-recompute-cast-skip, with determinism_check='none'",
        laws=("MP-3", "MP-1", "PAR-2"),
        inject=partial(recomputation, table_in_dtype_of_x, determinism_check="none"),
        inject_twin=partial(recomputation, copied, determinism_check="none"),
    ),
    Defect(
        id="ac-recompute-input-rounded",
        title="recomputation starts from other numbers than forward did",
        source="https://github.com/pytorch/pytorch/issues/171779",
        mechanism="a block's input is rounded to bf16, and cast back, in recomputation alone",
        laws=("PAR-4", "PAR-1"),
        inject=partial(recomputation, x_rounded),
        inject_twin=partial(recomputation, copied),
    ),
    Defect(
        id="ac-unasked",
        title="activations are recomputed although that was not asked for",
        source="https://github.com/linkedin/Liger-Kernel/issues/1064",
        mechanism="checkpointing is applied whatever the configuration says: forward runs twice, and sends twice",
        laws=("MP-4", "MP-1", "MP-3"),
        inject=partial(checkpointing, "full"),
        inject_twin=blocks_called_through,
    ),
    Defect(
        id="ac-ignored",
        title="activations are kept although recomputation was asked for",
        source="https://github.com/Lightning-AI/pytorch-lightning/pull/18006",
        mechanism="checkpointing is not applied whatever the configuration says; all numbers are right",
        laws=("AXIS-1", "MP-1", "MP-3"),
        inject=partial(checkpointing, "none"),
        inject_twin=partial(recomputation, copied, preserve_rng_state=False),
    ),
    Defect(
        id="dropout-unseeded",
        title="dropout masks cannot be repeated",
        source="https://github.com/mosaicml/composer/issues/12",
        mechanism="the generator is seeded by torch.seed(), from the operating system",
        laws=("PAR-8",),
        inject=partial(dropout_seed, of_the_moment=True),
        inject_twin=partial(dropout_seed, of_the_moment=False),
    ),
)
