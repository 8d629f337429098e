"""Loss: the sum over valid tokens divided by the number of valid tokens of the step, over all ranks.

A mean over each rank's own tokens would weight tokens by rank: wrong if ranks have different numbers of them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from reference_trainer.data import IGNORED_LABEL


def sum_over_dp(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum a plain tensor in place over the ranks that see different data, one mesh dimension after the other."""
    return sum_over(value, mesh, ("dp_replicate", "dp_shard"))


def sum_over(value: Tensor, mesh: DeviceMesh, dims: Sequence[str]) -> Tensor:
    """Sum a plain tensor in place over dimensions of the mesh, outermost first; those that it lacks are left out."""
    for name in mesh.mesh_dim_names or ():
        if name in dims and mesh[name].size() > 1:
            dist.all_reduce(value, group=mesh.get_group(name))
    return value


def count_valid_tokens(labels: list[Tensor], mesh: DeviceMesh, device: torch.device) -> int:
    """Count the valid labels (int64) in all micro-batches of all data-parallel ranks.

    Raises ValueError if there is none.
    """
    local = sum(int((batch != IGNORED_LABEL).sum()) for batch in labels)
    total = int(sum_over_dp(torch.tensor(local, dtype=torch.int64, device=device), mesh))
    if not total:
        raise ValueError("no valid label in the whole batch: the loss is undefined")
    return total


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy summed over valid labels: a scalar in fp32, in nats.

    `logits` have shape (batch, seq_len, vocab_size) and any floating-point dtype, `labels` (batch, seq_len), int64.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


def scaled_for_backward(loss_sum: Tensor, *, dp_size: int, valid_tokens: int) -> Tensor:
    """Return the scalar from which backward starts, so that the reduced gradient is that of the step's mean loss.

    `loss_sum` is a scalar of this rank's micro-batch, `valid_tokens` counts the step's over all ranks. FSDP averages
    gradients over the data-parallel ranks (torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor): multiplying
    by their number makes the average a sum.
    """
    return loss_sum * (dp_size / valid_tokens)


def summed_loss(logits: Tensor, labels: Tensor, *, arithmetic: Literal["float", "integer"]) -> Tensor:
    """Return the summed loss that goes with the model's arithmetic, a scalar in fp32.

    Cross entropy, or minus the sum of the logits of the valid labels; shapes are those of `summed_cross_entropy`.
    """
    if arithmetic == "float":
        return summed_cross_entropy(logits, labels)
    return F.nll_loss(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


def full_loss(loss_sum: Tensor) -> Tensor:
    """Return a detached loss as a plain scalar; of sharded logits each rank has a partial sum of the loss."""
    return loss_sum.full_tensor() if isinstance(loss_sum, DTensor) else loss_sum


def loss_context(*, parallel: bool) -> AbstractContextManager[None]:
    """Return a context in which cross entropy (and its backward) works on logits sharded over the vocabulary."""
    return loss_parallel() if parallel else nullcontext()
