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
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from reference_trainer.config import TrainerConfig
from reference_trainer.data import IGNORED_LABEL
from reference_trainer.mesh import degree
from reference_trainer.precision import PRECISIONS


def sum_over_dp(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum a plain tensor in place over the ranks that see different tokens, one mesh dimension after the other."""
    return sum_over(value, mesh, ("dp_replicate", "dp_shard"))


def sum_over(value: Tensor, mesh: DeviceMesh, dims: Sequence[str]) -> Tensor:
    """Sum a plain tensor in place over dimensions of the mesh, outermost first; those that it lacks are left out."""
    for name in mesh.mesh_dim_names or ():
        if name in dims and degree(mesh, name) > 1:
            dist.all_reduce(value, group=mesh.get_group(name))
    return value


def count_valid_tokens(labels: list[Tensor], mesh: DeviceMesh, device: torch.device) -> int:
    """Count the valid labels (int64) in all micro-batches of all data-parallel ranks; shared ones count repeatedly.

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


def with_balance(loss_sum: Tensor, balance_loss: Tensor | float, *, tp: int) -> Tensor:
    """Add the balance loss of experts to a summed loss; both are those of the same tokens.

    All tensor-parallel ranks compute the balance loss, and add up the gradients of routers: each has a share of it.
    """
    balance_loss = torch.as_tensor(balance_loss)
    if tp == 1:
        return loss_sum + balance_loss
    share = balance_loss / tp
    return full_loss(loss_sum) + share + (balance_loss - share).detach()


def scaled_for_backward(loss_sum: Tensor, *, divisor: float, valid_tokens: int) -> Tensor:
    """Return the scalar from which backward starts, so that the reduced gradient is that of the step's mean loss.

    `loss_sum` is a scalar of this rank's micro-batch, `valid_tokens` counts the step's over all ranks. FSDP divides the
    sum of gradients over the data-parallel ranks by `divisor`, which is their number unless it is told another one
    (torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor): multiplying by it leaves the sum.
    """
    return loss_sum * (divisor / valid_tokens)


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


# Loss scaling for fp16 (arXiv:1710.03740 section 3.2) shifts gradients that are too small for fp16 into its range: the
# loss is multiplied by a power of two before backward, and reduced gradients are divided by it before anything looks at
# them. A scale that makes a gradient overflow is halved, and that step is skipped.


class LossScaler(GradScaler):
    """Gradient scaler of torch whose ranks all agree on overflows; enabled with a precision of fp16 only.

    torch asks the ranks among which the *first* gradient is sharded (`found_inf_reduce_handler` in
    torch/distributed/tensor/_dispatch.py). If that gradient were replicated over tensor parallelism, or a number bad on
    one replica alone, some ranks would skip a step that others take, and go on with another scale (torch 2.13).
    """

    def __init__(self, config: TrainerConfig, device: torch.device) -> None:
        options = config.loss_scale
        super().__init__(
            device.type,
            init_scale=options.initial,
            growth_interval=options.growth_interval,
            enabled=PRECISIONS[config.precision].scales_loss,
        )
        self._is_offloaded = config.offload == "cpu"

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Return a scalar by device, 1.0 after an overflow; torch's own scaler for FSDP1 extends the same method."""
        if self._is_offloaded:
            # torch copies both to the gradients' device without waiting, and the host then reads what may not be there
            # (torch 2.13; reported for FSDP1 in https://github.com/pytorch/pytorch/pull/176429, which 2.13 does not
            # have). Can go once GradScaler waits.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        overflows: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for overflowed in overflows.values():
            dist.all_reduce(overflowed, dist.ReduceOp.MAX)
        return overflows
