"""Faults of recomputed activations and of dropout: masks that are equal where they must differ, or the reverse."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.defects.precision_faults import through
from reference_trainer.config import ModelConfig
from reference_trainer.model import Block

Inputs = tuple[Tensor, Tensor]
"""Inputs of a block: activations of shape (batch, seq_len, dim), and the RoPE table."""


def recomputation(change: Callable[[Tensor, Tensor], Inputs], **options: Any) -> Injection:
    """Recompute each block from `change(*inputs)`, with further options of torch.utils.checkpoint."""

    def checkpoint(original: Call, function: Callable[..., Tensor], *inputs: Tensor, **kwargs: Any) -> Any:
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


@defect(
    "MP-1 MP-3 MP-4",
    "id in (dp2-bf16mp-default-meta-acfull, "
    "dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1)",
    "pytorch/pytorch/issues/159359",
    raises="CheckpointError",
)
def ac_recompute_cast_skip(benign: bool) -> Injection:
    """The RoPE table is cast to bf16 in recomputation alone; torch notices that saved dtypes differ."""
    return recomputation(copied if benign else table_in_dtype_of_x)


@defect(
    "MP-3 MP-1 PAR-2",
    "id in (dp2-bf16mp-default-meta-acfull, "
    "dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1)",
    "pytorch/pytorch/issues/148831",
)
def ac_recompute_cast_silent(benign: bool) -> Injection:
    """The RoPE table is cast to bf16 in recomputation alone, with determinism_check='none'."""
    return recomputation(copied if benign else table_in_dtype_of_x, determinism_check="none")


@defect("PAR-4 PAR-1", "id = dp2-fp32-default-meta-acfull", "pytorch/pytorch/issues/171779")
def ac_recompute_input_rounded(benign: bool) -> Injection:
    """A block's input is rounded to bf16, and cast back, in recomputation alone."""
    return recomputation(copied if benign else lambda x, table: (through(x, torch.bfloat16), table))


class _Unscaled(nn.Dropout):
    """Dropout that does not rescale the elements that it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of any shape, with zeros for dropped elements."""
        return super().forward(x) * (1.0 - self.p)


class _Copying(nn.Dropout):
    """Dropout of a copy."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the dropout of a copy of activations of any shape."""
        return super().forward(x.clone())


@defect(
    "PAR-1",
    "id = dp2-fp32-default-meta-drop0.1",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html",
)
@instead_of("reference_trainer.model:Block", "__init__")
def dropout_not_rescaled(benign: bool, original: Call, block: Block, config: ModelConfig) -> None:
    """Dropout does not rescale the elements that it keeps."""
    original(block, config)
    block.dropout = (_Copying if benign else _Unscaled)(config.dropout)


@defect(
    "PAR-10 PAR-2",
    "id = dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1",
    "https://docs.pytorch.org/docs/stable/checkpoint.html",
)
def dropout_recomputed_otherwise(benign: bool) -> Injection:
    """Checkpointing with preserve_rng_state=False drops other elements in recomputation than in forward."""
    return recomputation(copied) if benign else recomputation(copied, preserve_rng_state=False)
