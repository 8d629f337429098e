"""Faults of repetition: activations that are recomputed in backward, and runs that cannot be repeated."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy

from conformance.defects.injection import Defect, replaced_call
from conformance.defects.precision_faults import through
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Block, Transformer
from reference_trainer.train import Trainer

Inputs = tuple[Tensor, Tensor]
"""Inputs of a block: activations of shape (batch, seq_len, dim), and the RoPE table."""


def recomputation(change: Callable[[Tensor, Tensor], Inputs], **options: Any) -> AbstractContextManager[None]:
    """Recompute each block from `change(*inputs)`, with further options of torch.utils.checkpoint."""

    def checkpoint(
        original: Callable[..., Tensor], function: Callable[..., Tensor], *inputs: Tensor, **kwargs: Any
    ) -> Tensor:
        again = False

        def layer(x: Tensor, table: Tensor) -> Tensor:
            nonlocal again
            x, table = change(x, table) if again else (x, table)
            again = True
            return function(x, table)

        return original(layer, *inputs, **kwargs, **options)

    return replaced_call("reference_trainer.parallelize", "checkpoint", checkpoint)


def copied(x: Tensor, table: Tensor) -> Inputs:
    """Return copies of both inputs."""
    return x.clone(), table.clone()


def table_in_dtype_of_x(x: Tensor, table: Tensor) -> Inputs:
    """Return the activations, and the RoPE table cast to their dtype."""
    return x, table.to(x.dtype)


AC_RECOMPUTE_CAST_SKIP = Defect(
    id="ac-recompute-cast-skip",
    title="recomputation sees inputs of another dtype than forward did, and torch notices",
    source="https://github.com/pytorch/pytorch/issues/159359",
    mechanism="the RoPE table is cast to bf16 in recomputation alone; saved tensors then differ in dtype",
    laws=("MP-1", "MP-3", "MP-4"),
    cells="id in (dp2-bf16mp-default-meta-acfull, "
    "dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1)",
    inject=partial(recomputation, table_in_dtype_of_x),
    inject_twin=partial(recomputation, copied),
    raises="CheckpointError",
)
AC_RECOMPUTE_CAST_SILENT = Defect(
    id="ac-recompute-cast-silent",
    title="recomputation sees inputs of another dtype than forward did, and torch was told not to look",
    source="https://github.com/pytorch/pytorch/issues/148831",
    mechanism="the RoPE table is cast to bf16 in recomputation alone, with determinism_check='none'",
    laws=("MP-3", "MP-1", "PAR-2"),
    cells="id in (dp2-bf16mp-default-meta-acfull, "
    "dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1)",
    inject=partial(recomputation, table_in_dtype_of_x, determinism_check="none"),
    inject_twin=partial(recomputation, copied, determinism_check="none"),
)


def x_rounded(x: Tensor, table: Tensor) -> Inputs:
    """Return the activations rounded to bf16 and cast back, and the RoPE table."""
    return through(x, torch.bfloat16), table


AC_RECOMPUTE_INPUT_ROUNDED = Defect(
    id="ac-recompute-input-rounded",
    title="recomputation starts from other numbers than forward did",
    source="https://github.com/pytorch/pytorch/issues/171779",
    mechanism="a block's input is rounded to bf16, and cast back, in recomputation alone",
    laws=("PAR-4", "PAR-1"),
    cells="id = dp2-fp32-default-meta-acfull",
    inject=partial(recomputation, x_rounded),
    inject_twin=partial(recomputation, copied),
)


def checkpointing(mode: Literal["none", "full"]) -> AbstractContextManager[None]:
    """Checkpoint activations in this mode, whatever the configuration says."""

    def parallelize(
        original: Callable[..., None], model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any
    ) -> None:
        original(model, mesh, replace(config, activation_checkpointing=mode), policy)

    return replaced_call("reference_trainer.build", "parallelize", parallelize)


def blocks_called_through() -> AbstractContextManager[None]:
    """Call each block's layer through the attribute that checkpointing sets, without checkpointing it."""

    def parallelize(
        original: Callable[..., None], model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any
    ) -> None:
        original(model, mesh, config, policy)
        for module in model.modules():
            if isinstance(module, Block):
                module.recompute = lambda layer, *inputs: layer(*inputs)

    return replaced_call("reference_trainer.build", "parallelize", parallelize)


AC_UNASKED = Defect(
    id="ac-unasked",
    title="activations are recomputed although the configuration does not ask for it",
    source="https://github.com/linkedin/Liger-Kernel/issues/1064",
    mechanism="checkpointing is applied whatever the configuration says: forward runs twice, and communicates twice",
    laws=("MP-4", "MP-1", "MP-3"),
    cells="id = tp2-fp32-default-meta",
    inject=partial(checkpointing, "full"),
    inject_twin=blocks_called_through,
)
AC_IGNORED = Defect(
    id="ac-ignored",
    title="activations are kept although the configuration asks for recomputation",
    source="https://github.com/Lightning-AI/pytorch-lightning/pull/18006",
    mechanism="checkpointing is not applied whatever the configuration says; all numbers are right",
    laws=("AXIS-1", "AC-1", "MP-1", "MP-3"),
    cells="id = dp2-fp32-default-meta-acfull",
    inject=partial(checkpointing, "none"),
    inject_twin=partial(recomputation, copied, preserve_rng_state=False),
)


def kept_by_selection(*, attention: bool) -> AbstractContextManager[None]:
    """Keep matrix products alone in selective checkpointing, or attention as well, and more than is asked for."""

    def keep(original: Callable[..., Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        kept = original(context, operator, *args, **kwargs)
        if "scaled_dot_product" not in operator.name():
            return kept
        return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE

    return replaced_call("reference_trainer.parallelize", "_keep_expensive", keep)


ATTENTION_NOT_SELECTED = Defect(
    id="attention-not-selected",
    title="selective activation checkpointing computes attention twice",
    source="https://github.com/pytorch/torchtitan/issues/2091",
    mechanism="a policy names the operator of attention of one backend, and another one runs",
    laws=("AC-1",),
    cells="id = dp2-fp32-default-meta-acselective",
    inject=partial(kept_by_selection, attention=False),
    inject_twin=partial(kept_by_selection, attention=True),
)


def dropout_seed(*, from_system: bool) -> AbstractContextManager[None]:
    """Sample dropout masks from a seed of the operating system, or from another known seed."""

    def seed_dropout(original: Callable[[Trainer], None], trainer: Trainer) -> None:
        original(trainer)
        if from_system:
            torch.seed()
        else:
            torch.manual_seed(torch.initial_seed() ^ 1)

    return replaced_call("reference_trainer.train:Trainer", "_seed_dropout", seed_dropout)


DROPOUT_UNSEEDED = Defect(
    id="dropout-unseeded",
    title="dropout masks cannot be repeated",
    source="https://github.com/mosaicml/composer/issues/12",
    mechanism="the generator is seeded by torch.seed(), from the operating system",
    laws=("PAR-8",),
    cells="id = dp2-fp32-default-meta-drop0.1",
    inject=partial(dropout_seed, from_system=True),
    inject_twin=partial(dropout_seed, from_system=False),
)
