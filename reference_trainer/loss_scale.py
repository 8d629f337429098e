"""Loss scaling for fp16 (arXiv:1710.03740 section 3.2): shifts gradients that are too small for fp16 into its range.

The loss is multiplied by a power of two before backward, and reduced gradients are divided by it before anything looks
at them. A scale that makes a gradient overflow is halved, and that step is skipped.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from reference_trainer.config import TrainerConfig
from reference_trainer.precision import PRECISIONS


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
